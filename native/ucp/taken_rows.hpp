// The answer to a TAKE as the client reads it. The whole message is checked before any of it is used, and no check reads
// beyond it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ring/segment.hpp"
#include "ucp/frames.hpp"

namespace transport::ucp {

struct TakeTerms {
  std::uint32_t most, wait_ms;
  std::uint64_t most_bytes;
  std::uint32_t joined_most;
  std::uint8_t rank;
  std::int64_t oldest_version;
  std::uint16_t most_attempts;
  bool verify;
  std::uint32_t told = kMoreToCome;  // how many are left, by the last answer
};

inline Taken taken_at(const std::byte* message, std::size_t index) {
  return load<Taken>(message + sizeof(Header) + index * sizeof(Taken));
}

inline constexpr std::uint64_t kMostLength = std::uint64_t{1} << 46;  // of a payload; no memory is larger

// Why a message of `length` bytes is not an answer to this TAKE, in words; null when it is.
inline const char* taken_fault(const std::byte* message, std::size_t length, std::uint32_t due,
                               const TakeTerms& terms) {
  if (length < sizeof(Header)) return "an answer to a demand has no header";
  const auto header = load<Header>(message);
  if (header.joined_bytes > length - sizeof(Header) || !sealed(message, length - header.joined_bytes))
    return "an answer to a demand whose bytes have changed on the way";
  if (header.version != kVersion || header.kind != static_cast<std::uint8_t>(Kind::status))
    return "not a status message of this version";
  if (header.number != due) return "a status message of another number than was due";
  if (header.count > terms.most) return "more payloads than were asked for";
  if (code_of(header) != 0 && header.count != 0) return "payloads beside a refusal";
  std::uint64_t head = sizeof(Header) + header.count * sizeof(Taken);
  if (length < head) return "a status message is too short for its payloads";
  std::uint64_t joined = 0, bytes = 0;
  bool any = false;
  for (std::size_t at = 0; at < header.count; ++at) {
    const Taken taken = taken_at(message, at);
    if (taken.note_bytes > kNoteCapacity) return "a ticket that is too long";
    if (taken.rank != terms.rank) return "a payload for another rank";
    head += taken.note_bytes;
    if (taken.length > kMostLength) return "a payload that no slot can hold";
    const std::uint64_t room = terms.most_bytes - std::min(bytes, terms.most_bytes);
    if (at != 0 && terms.joined_most != 0 && taken.length > room)  // as `Ring::claim` has it
      return "more bytes of payloads than were asked for";
    bytes += taken.length;
    if ((taken.flags & kJoined) == 0) continue;
    if (taken.length > terms.most_bytes) return "a payload that is too large to be joined";
    joined = aligned_taken(joined) + taken.length;
    any = any || taken.length != 0;
  }
  if (any) head = aligned_taken(head);
  if (joined != header.joined_bytes || length != head + joined) return "more or fewer bytes than its payloads have";
  return nullptr;
}

}  // namespace transport::ucp
