// The hot frames of transport/wire/frames.py as they lie in memory: little-endian, fixed layouts, checked before they are read.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace transport::ucp {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

inline constexpr std::uint32_t kMostRecords = 63;
inline constexpr std::uint32_t kMessageNumbers = 1U << 24;

enum class Kind : std::uint8_t {
  control = 0x10,
  status = 0x11,
  read = 0x20,
  ack = 0x21,
  discard = 0x22,
  state = 0x23,
  bye = 0x24,
};

// Of CONTROL and STATUS. `version` is what the handshake has agreed on; the layouts here are those of all versions.
struct Header {
  std::uint8_t version, kind;
  std::uint16_t count;
  std::uint32_t number, joined_bytes, reserved;
};
static_assert(sizeof(Header) == 16);

struct Record {
  std::uint8_t kind, rank;
  std::uint16_t reserved;
  std::uint32_t slot, generation, reserved2;
  std::uint64_t key, length;
};
static_assert(sizeof(Record) == 32);

// `joined`: the payload stands in the STATUS message itself, behind the answers, in the order of the records.
inline constexpr std::uint8_t kJoined = 0x01;
inline constexpr std::uint8_t kChecked = 0x02;

struct Answer {
  std::uint8_t code, flags;
  std::uint16_t position;
  std::uint32_t reserved;
  std::uint64_t length, checksum, value;
};
static_assert(sizeof(Answer) == 32);

inline constexpr std::size_t kControlBytes = sizeof(Header) + kMostRecords * sizeof(Record);
inline constexpr std::size_t kStatusBytes = sizeof(Header) + kMostRecords * sizeof(Answer);

inline std::uint64_t tag_of(std::uint32_t base, std::uint32_t number, std::uint32_t part = 0) {
  return std::uint64_t{base} << 32 | std::uint64_t{number} << 8 | part;
}

// Frames come from a peer and lie anywhere: read by copying.
template <typename Frame>
Frame load(const std::byte* at) {
  Frame frame;
  std::memcpy(&frame, at, sizeof frame);
  return frame;
}

template <typename Frame>
void store(std::byte* at, const Frame& frame) {
  std::memcpy(at, &frame, sizeof frame);
}

inline Record record_at(const std::byte* message, std::size_t index) {
  return load<Record>(message + sizeof(Header) + index * sizeof(Record));
}

// Why a message of `length` bytes is not the CONTROL of number `due` in the connection's `version`, in words; null when
// it is. Nothing of a message is done before all of it was looked at.
inline const char* control_fault(const std::byte* message, std::size_t length, std::uint32_t due,
                                 std::uint8_t version) {
  if (length < sizeof(Header)) return "a control message has no header";
  const auto header = load<Header>(message);
  if (header.version != version || header.kind != static_cast<std::uint8_t>(Kind::control))
    return "not a control message of the connection's version";
  if (header.count == 0 || header.count > kMostRecords) return "a control message of too few or too many records";
  if (length < sizeof(Header) + header.count * sizeof(Record)) return "a control message is too short for its records";
  for (std::size_t index = 0; index < header.count; ++index) {
    const std::uint8_t kind = record_at(message, index).kind;
    if (kind < static_cast<std::uint8_t>(Kind::read) || kind > static_cast<std::uint8_t>(Kind::bye))
      return "a record of unknown kind";
  }
  if (header.number != due) return "a control message with the wrong message number";
  return nullptr;
}

}  // namespace transport::ucp
