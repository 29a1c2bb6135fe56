// libFuzzer: any bytes in the place of the answer to a TAKE are refused, or every ticket and every payload of it lies
// within the message, where transport/claims/batch.py looks for it. The message lies in memory of exactly its size, so
// that the address sanitizer sees a look beyond it.
//
// Input: the demand (how many payloads, for which rank, a byte for how many bytes), and the message.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "ucp/taken_rows.hpp"

using namespace transport::ucp;

namespace {

// Copies them out, where a look beyond the message is seen.
void read(const std::byte* message, std::uint64_t begin, std::uint64_t bytes) {
  std::vector<std::byte> copy(message + begin, message + begin + bytes);
  volatile std::size_t used = copy.size();
  static_cast<void>(used);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  TakeTerms terms{};
  terms.most = 1 + data[0] % 4;
  terms.rank = data[1] % 2;
  terms.most_bytes = data[2];
  data += 3, size -= 3;
  const auto message = std::make_unique<std::byte[]>(size);
  std::memcpy(message.get(), data, size);
  std::uint32_t due = 0;
  if (size >= sizeof(Header)) due = load<Header>(message.get()).number & 0xff;  // so that numbers can be right
  if (size >= sizeof(Header) && load<Header>(message.get()).joined_bytes <= size - sizeof(Header))
    seal(message.get(), size - load<Header>(message.get()).joined_bytes);
  if (taken_fault(message.get(), size, due, terms) != nullptr) return 0;

  const auto header = load<Header>(message.get());
  if (header.count > terms.most || size > taken_room(terms.most, terms.most_bytes, transport::kNoteCapacity)) std::abort();
  std::uint64_t at_bytes = sizeof(Header) + header.count * sizeof(Taken);
  for (std::size_t at = 0; at < header.count; ++at) {
    const Taken taken = taken_at(message.get(), at);
    if (taken.rank != terms.rank) std::abort();
    read(message.get(), at_bytes, taken.note_bytes);
    at_bytes += taken.note_bytes;
  }
  // As `parsed` has it, and as the checksums are computed: both have to be in the message, and the same.
  const std::uint64_t first = aligned_taken(at_bytes), from_end = size - header.joined_bytes;
  std::uint64_t begin = first, joined = 0;
  for (std::size_t at = 0; at < header.count; ++at) {
    const Taken taken = taken_at(message.get(), at);
    if ((taken.flags & kJoined) == 0) continue;
    joined = aligned_taken(joined);
    if (taken.length != 0) {
      if (begin != from_end + joined) std::abort();
      read(message.get(), begin, taken.length);
    }
    joined += taken.length;
    begin += aligned_taken(taken.length);
  }
  return 0;
}
