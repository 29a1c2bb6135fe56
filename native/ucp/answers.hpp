// A STATUS message as the client reads it: what a listener answers to one CONTROL message. The whole message
// is checked before any of it is used, and no check reads beyond it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ucp/frames.hpp"

namespace transport::ucp {

inline Answer answer_at(const std::byte* message, std::size_t index) {
  return load<Answer>(message + sizeof(Header) + index * sizeof(Answer));
}

// Why a message of `length` bytes is not the STATUS of number `due`, in words; null when it is. `asked` records had
// asked for an answer, behind `before` others.
inline const char* status_fault(const std::byte* message, std::size_t length, std::uint32_t due,
                                std::size_t before, std::size_t asked) {
  if (length < sizeof(Header) + asked * sizeof(Answer)) return "a status message is too short for its answers";
  if (!sealed(message, sizeof(Header) + asked * sizeof(Answer)))
    return "a status message whose bytes have changed on the way";
  const auto header = load<Header>(message);
  if (header.version != kVersion || header.kind != static_cast<std::uint8_t>(Kind::status))
    return "not a status message of this version";
  if (header.count != asked) return "a status message with the wrong number of answers";
  if (header.number != due) return "a status message with the wrong message number";
  for (std::size_t at = 0; at < asked; ++at)
    if (answer_at(message, at).position != before + at) return "an answer for the wrong record";
  return nullptr;
}

// Why the payloads cannot stand where this STATUS (see above) says, in words; null when they can: each small one behind
// the answers, in the order of the records, or each in a message of its own. `size_of(at)` is the size that was asked
// for; payloads of up to `inline_limit` bytes are small.
template <typename SizeOf>
const char* joined_fault(const std::byte* message, std::size_t length, std::size_t payloads, std::uint64_t inline_limit,
                         SizeOf size_of) {
  const auto header = load<Header>(message);
  std::uint64_t joined = 0;
  bool apart = false;
  for (std::size_t at = 0; at < payloads; ++at) {
    const Answer answer = answer_at(message, at);
    const std::uint64_t size = size_of(at);
    const bool small = size <= inline_limit;
    if ((answer.flags & kJoined) != 0) {
      if (answer.code != 0 || !small || answer.length != size)
        return "a joined payload that was refused, is too large to be joined, or has another length than it says";
      joined += size;
    } else if (small) {
      apart = true;
    }
  }
  if (joined != header.joined_bytes || length != sizeof(Header) + header.count * sizeof(Answer) + joined)
    return "size mismatch of the joined payloads";
  if (joined != 0 && apart) return "only some of the small payloads are joined";  // pieces would lie elsewhere
  return nullptr;
}

}  // namespace transport::ucp
