// TAKE at the client: one buffer with room for whatever the listener may answer, one message into it.
//
//   take ──► receive posted, TAKE sent ──► STATUS ──► checked, all of it ──► checksums of what is joined ──► event
//
// Outcomes: the listener's code, how many payloads, then the positions of those whose bytes are not what was written.
// The answer is left where it is: its layout is that of frames.hpp. Payloads that are not joined are asked for by
// `Link::read` with their tickets, under the claims.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ucp/reading.hpp"

namespace transport::ucp {

struct TakeTerms {
  std::uint32_t most, wait_ms;
  std::uint64_t most_bytes;
  std::uint32_t joined_most;
  std::uint8_t rank;
  std::int64_t oldest_version;
  std::uint16_t most_attempts;
  bool verify;
};

struct TakeRoom {
  std::byte* data;
  std::size_t size;
  std::shared_ptr<void> keep;
};

// Why a message of `length` bytes is not an answer to this TAKE, in words; null when it is.
const char* taken_fault(const std::byte* message, std::size_t length, std::uint8_t version, std::uint32_t due,
                        const TakeTerms& terms);

}  // namespace transport::ucp
