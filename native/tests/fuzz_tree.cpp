// libFuzzer: any bytes in the place of a nested value (or a schema's header, which is one) are refused, or are whole: the
// second look agrees, no part of them passes, and neither depth nor number is above its limit. The bytes lie in memory of
// exactly their size.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/tree_check.hpp"

using transport::TreeCheck;

namespace {

constexpr unsigned kDepth = 6;
constexpr std::uint64_t kValues = 200;

bool whole(const std::uint8_t* data, std::size_t size, unsigned depth, std::uint64_t values) {
  const auto copy = std::make_unique<std::uint8_t[]>(size);
  std::memcpy(copy.get(), data, size);
  return TreeCheck(copy.get(), size, depth, values).run() == nullptr;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (!whole(data, size, kDepth, kValues)) return 0;
  if (!whole(data, size, kDepth + 1, kValues + 1)) std::abort();  // what fits into less fits into more
  for (std::size_t part = size < 64 ? 0 : size - 64; part < size; ++part)
    if (whole(data, part, kDepth, kValues)) std::abort();  // a value that ends early is another value
  return 0;
}
