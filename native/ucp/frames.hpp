// The hot frames of transport/wire/frames.py as they lie in memory: little-endian, fixed layouts, checked before they are read.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/checksum.hpp"

namespace transport::ucp {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

inline constexpr std::uint8_t kVersion = 10;  // of the wire: both sides of a connection have the same
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
  take = 0x25,
  finish = 0x26,
  give_back = 0x27,
  cancel_take = 0x28,
  renew = 0x29,
  outcome = 0x2a,
  end = 0x2b,
  read_range = 0x2c,
};
inline constexpr Kind kLastKind = Kind::read_range;

// Of CONTROL and STATUS. The checksum is XXH3 of everything behind it but the payloads: of a CONTROL message, of the
// header and answers of a STATUS, of the head of the answer to a TAKE. A message whose bytes have changed ends its
// connection, since a claim may be held that only one side knows of.
struct Header {
  std::uint64_t checksum;
  std::uint8_t version, kind;
  std::uint16_t count;
  std::uint32_t number, joined_bytes, code;  // the last, of the answer to a TAKE: see below
};
static_assert(sizeof(Header) == 24);

struct Record {
  std::uint8_t kind, rank;
  std::uint16_t attempts;  // of TAKE: the limit; of FINISH, GIVE_BACK, OUTCOME and END: the claim's
  std::uint32_t slot, generation, joined_most;  // the last, of READ_RANGE: where it begins, in units of kRangeUnit
  std::uint64_t key, length;
};
static_assert(sizeof(Record) == 32);

inline constexpr std::uint64_t kRangeUnit = 64;  // at multiples of which the fields of a payload begin

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

// --- TAKE ---------------------------------------------------------------------------------------------------
// The record, which stands alone in its message: `slot` is how many payloads at most, `generation` for how many
// milliseconds it may wait, `length` how many bytes of payloads (lower half) and what the client was last told to be left
// (upper half), `joined_most` the largest that is joined, `key` the oldest policy version (signed). Its STATUS:
//
//    header | a Taken for each payload | their notes | zeros up to a multiple of 64 | payloads, each at a multiple of 64
//
// Payloads without kJoined are claimed, and asked for by READ. `joined_bytes` are those from the first multiple on. The
// header's `code` has, above its lowest 8 bits, how many payloads are left that the rank has not consumed, whoever has
// claimed them; kMoreToCome while the writer has not said its end. The number only falls, so that a client that holds as
// many has them all, however old the answer is.
// The fields of Taken are listed here and nowhere else: the struct follows from the list, and so does the dtype of
// transport/claims/batch.py, through `_ring.TAKEN_FIELDS`.
#define TRANSPORT_TAKEN_FIELDS(FIELD)                                              \
  FIELD(std::uint32_t, slot)                                                       \
  FIELD(std::uint32_t, generation)                                                 \
  FIELD(std::uint8_t, rank)                                                        \
  FIELD(std::uint8_t, flags)                                                       \
  FIELD(std::uint16_t, attempts)                                                   \
  FIELD(std::uint16_t, note_bytes) /* of the encoded ticket */                     \
  FIELD(std::uint16_t, in_vain)    /* deliveries that counted before this one */   \
  FIELD(std::uint64_t, length)                                                     \
  FIELD(std::uint64_t, checksum)                                                   \
  FIELD(std::uint64_t, sequence)                                                   \
  FIELD(std::int64_t, policy_version)

struct Taken {
#define TRANSPORT_MEMBER(type, name) type name;
  TRANSPORT_TAKEN_FIELDS(TRANSPORT_MEMBER)
#undef TRANSPORT_MEMBER
};

struct Field {
  const char* name;
  bool is_signed;
  std::size_t bytes, offset;
};
inline constexpr std::array kTakenFields{
#define TRANSPORT_FIELD(type, name) Field{#name, std::is_signed_v<type>, sizeof(type), offsetof(Taken, name)},
    TRANSPORT_TAKEN_FIELDS(TRANSPORT_FIELD)
#undef TRANSPORT_FIELD
};
consteval bool without_gaps() {  // what lies in a gap would be sent as it is
  std::size_t end = 0;
  for (const Field& field : kTakenFields) {
    if (field.offset != end) return false;
    end += field.bytes;
  }
  return end == sizeof(Taken);
}
static_assert(without_gaps(), "fill the gap with a reserved field");

inline constexpr std::uint32_t kMostTaken = 256;
inline constexpr std::uint64_t kMostTakenBytes = std::uint64_t{1} << 30;
inline constexpr std::uint16_t kMostTries = 2047;
inline constexpr std::uint8_t kRanks = 16;
inline constexpr std::size_t kTakenAlignment = 64;

inline constexpr std::uint32_t kMoreToCome = (1U << 24) - 1;
constexpr std::uint32_t found_code(std::uint32_t code, std::uint32_t left) { return left << 8 | code; }
constexpr std::uint32_t code_of(const Header& found) { return found.code & 0xff; }
constexpr std::uint32_t left_of(const Header& found) { return found.code >> 8; }
constexpr std::uint64_t length_of_take(std::uint64_t bytes, std::uint32_t told) { return std::uint64_t{told} << 32 | bytes; }
constexpr std::uint64_t bytes_of(const Record& take) { return take.length & 0xffff'ffff; }
constexpr std::uint32_t told_of(const Record& take) { return static_cast<std::uint32_t>(take.length >> 32); }

constexpr std::uint64_t aligned_taken(std::uint64_t bytes) {
  return (bytes + kTakenAlignment - 1) / kTakenAlignment * kTakenAlignment;
}
// No answer to a TAKE is longer.
constexpr std::uint64_t taken_room(std::uint64_t most, std::uint64_t most_bytes, std::uint64_t note_capacity) {
  return aligned_taken(sizeof(Header) + most * (sizeof(Taken) + note_capacity)) + most_bytes + most * kTakenAlignment;
}

// --- END ----------------------------------------------------------------------------------------------------
// The record, which stands alone in its message: `joined_most` is how the delivery ends, `key` how many bytes of reason
// (lower half) and of consumer (upper half) follow the record. GIVE_BACK has `kUnread` in `joined_most` where the payload
// was not looked at, so that its delivery does not count; its `length` is the delay in milliseconds.
inline constexpr std::uint32_t kUnread = 1;
inline constexpr std::uint32_t kMostReason = 160, kMostConsumer = 56;  // as a ring's log of failures has room for
inline constexpr std::uint32_t kEndsDead = 1, kEndsAged = 2;           // as in ring/failure_log.hpp

// What only the two sides of a connection know: OUTCOME names one that broke, in `key`.
constexpr std::uint64_t taker_token(std::uint32_t listener_base, std::uint32_t client_base) {
  return std::uint64_t{listener_base} << 32 | client_base;
}

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

// Stores the checksum of a message, or of its part in front of the payloads. The last step before it is sent.
inline void seal(std::byte* message, std::size_t length) {
  store(message, checksum(message + sizeof(std::uint64_t), length - sizeof(std::uint64_t)));
}
inline bool sealed(const std::byte* message, std::size_t length) {
  return load<std::uint64_t>(message) == checksum(message + sizeof(std::uint64_t), length - sizeof(std::uint64_t));
}

inline Record record_at(const std::byte* message, std::size_t index) {
  return load<Record>(message + sizeof(Header) + index * sizeof(Record));
}

inline constexpr bool ends_delivery(std::uint32_t how) { return how == kEndsDead || how == kEndsAged; }

inline std::uint32_t reason_bytes(const Record& end) { return static_cast<std::uint32_t>(end.key); }
inline std::uint32_t consumer_bytes(const Record& end) { return static_cast<std::uint32_t>(end.key >> 32); }

inline const char* end_fault(const Record& record, std::uint16_t count, std::size_t length) {
  if (count != 1) return "the end of a delivery that does not stand alone";
  if (!ends_delivery(record.joined_most)) return "an unknown way to end a delivery";
  if (reason_bytes(record) > kMostReason || consumer_bytes(record) > kMostConsumer)
    return "a reason or a name that is too long";
  if (length < sizeof(Header) + sizeof(Record) + reason_bytes(record) + consumer_bytes(record))
    return "a control message is too short for its texts";
  return nullptr;
}

// Why a message of `length` bytes is not the CONTROL of number `due`, in words; null when it is. Nothing of a message
// is done before all of it was looked at.
inline const char* control_fault(const std::byte* message, std::size_t length, std::uint32_t due) {
  if (length < sizeof(Header)) return "a control message has no header";
  if (!sealed(message, length)) return "a control message whose bytes have changed on the way";
  const auto header = load<Header>(message);
  if (header.version != kVersion || header.kind != static_cast<std::uint8_t>(Kind::control))
    return "not a control message of this version";
  if (header.count == 0 || header.count > kMostRecords) return "a control message of too few or too many records";
  if (length < sizeof(Header) + header.count * sizeof(Record)) return "a control message is too short for its records";
  for (std::size_t index = 0; index < header.count; ++index) {
    const Record record = record_at(message, index);
    if (record.kind < static_cast<std::uint8_t>(Kind::read) || record.kind > static_cast<std::uint8_t>(kLastKind))
      return "a record of unknown kind";
    if (record.kind == static_cast<std::uint8_t>(Kind::end)) {
      if (const char* const fault = end_fault(record, header.count, length)) return fault;
    }
    if (record.kind != static_cast<std::uint8_t>(Kind::take)) continue;
    if (header.count != 1) return "a demand that does not stand alone";
    if (record.slot == 0 || record.slot > kMostTaken) return "a demand for too few or too many payloads";
    if (bytes_of(record) > kMostTakenBytes) return "a demand for too many bytes";
    if (record.rank >= kRanks || record.attempts > kMostTries) return "a demand of no rank, or for too many attempts";
  }
  if (header.number != due) return "a control message with the wrong message number";
  return nullptr;
}

}  // namespace transport::ucp
