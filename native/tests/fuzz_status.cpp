// libFuzzer: any bytes in the place of a STATUS message are refused, or every answer of it can be read and every payload
// behind the answers lies within the message, each in memory of its size. The message lies in memory of exactly its size,
// so that the address sanitizer sees a look beyond it.
//
// Input: how many records had asked before (one byte) and how many asked for a payload (one byte), a byte for the size
// of each, and the message.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "ucp/answers.hpp"

using namespace transport::ucp;

namespace {

constexpr std::uint64_t kInline = 100;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::size_t before = data[0] % 4, payloads = data[1] % 5;
  data += 2, size -= 2;
  if (size < payloads) return 0;
  std::vector<std::uint64_t> sizes;
  for (std::size_t at = 0; at < payloads; ++at) sizes.push_back(data[at] < 200 ? data[at] % 8 : kInline + data[at] - 210);
  data += payloads, size -= payloads;
  const auto message = std::make_unique<std::byte[]>(size);
  std::memcpy(message.get(), data, size);
  std::uint32_t due = 0;
  if (size >= sizeof(Header)) due = load<Header>(message.get()).number & 0xff;  // so that numbers can be right

  // A question has one answer and no payload.
  const std::size_t asked = std::max<std::size_t>(payloads, 1);
  if (size >= sizeof(Header) + asked * sizeof(Answer)) seal(message.get(), sizeof(Header) + asked * sizeof(Answer));
  if (status_fault(message.get(), size, due, before, asked) != nullptr) return 0;
  if (joined_fault(message.get(), size, payloads, kInline, [&](std::size_t at) { return sizes[at]; }) != nullptr) return 0;

  const std::size_t start = sizeof(Header) + asked * sizeof(Answer);
  std::size_t end = start;  // of what the answers say stands behind them
  bool joined = false, apart = false;
  for (std::size_t at = 0; at < payloads; ++at) {
    const Answer answer = answer_at(message.get(), at);
    if (answer.position != before + at) std::abort();
    const bool small = sizes[at] <= kInline;
    if ((answer.flags & kJoined) == 0) {
      apart = apart || small;
      continue;
    }
    if (answer.code != 0 || !small) std::abort();
    joined = joined || sizes[at] != 0;
    std::vector<std::byte> destination(sizes[at]);
    std::copy_n(message.get() + end, sizes[at], destination.data());  // a look beyond the message is seen here
    end += sizes[at];
  }
  if (end != size || load<Header>(message.get()).joined_bytes != end - start || (joined && apart)) std::abort();
  return 0;
}
