// One unit, compiled per instruction set. It must not emit any function that another unit could emit
// too (the linker would keep one of them, perhaps the one this processor cannot run): hence xxhash is
// inlined as static functions, and nothing of the standard library is used.
#define XXH_INLINE_ALL
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "common/checksum.hpp"

#ifndef TRANSPORT_CHECKSUM_KERNEL
#error "the build names the kernel of this unit"
#endif

namespace transport {
namespace {

static_assert(sizeof(XXH3_state_t) == 576 && alignof(XXH3_state_t) == 64, "Checksum reserves the state's memory");

std::uint64_t of(const void* data, std::size_t size) { return XXH3_64bits(data, size); }
void reset(void* state) {
  XXH3_INITSTATE(static_cast<XXH3_state_t*>(state));
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state));
}
void update(void* state, const void* data, std::size_t size) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, size);
}
std::uint64_t digest(const void* state) { return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state)); }

}  // namespace

const ChecksumKernel TRANSPORT_CHECKSUM_KERNEL = {of, reset, update, digest};

}  // namespace transport
