// TAKE at the client: one buffer with room for whatever the listener may answer, one message into it.
//
//   take ──► receive posted, TAKE sent ──► STATUS ──► checked, all of it ──► checksums of what is joined ──► event
//
// Outcomes: the listener's code, how many payloads, how many are left (kMoreToCome: the writer goes on), then the
// positions of the payloads whose bytes are not what was written.
// The answer is left where it is: its layout is that of frames.hpp. Payloads that are not joined are asked for by
// `Link::read` with their tickets, under the claims.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ucp/reading.hpp"
#include "ucp/taken_rows.hpp"

namespace transport::ucp {

struct TakeRoom {
  std::byte* data;
  std::size_t size;
  std::shared_ptr<void> keep;
};

}  // namespace transport::ucp
