// XXH3, 64 bits, as python-xxhash's xxh3_64 computes it. On x86-64 checksum.cpp is compiled twice, with
// and without AVX2, and the processor chooses at run time; elsewhere once (NEON is the baseline of aarch64).
//
// Computed: of a payload by its writer, while it is copied into the slot or when a `WriteLease` is published; of a
// range by the listener that is asked for it; of a message by its sender (ucp/frames.hpp).
// Verified: by the client on arrival (ucp/reading.cpp; ucp/takes.cpp for TAKE), in a thread where the payload is
// large (transport/client/attempts.py), or while a batch is copied together (ring/gathering.hpp). A mapped payload
// is verified where its reader asks for it: `ClaimedPayload.verify`, ``verify`` of a batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace transport {

struct ChecksumKernel {
  std::uint64_t (*of)(const void* data, std::size_t size);
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, std::size_t size);
  std::uint64_t (*digest)(const void* state);
};

extern const ChecksumKernel checksum_kernel_baseline;
#ifdef TRANSPORT_HAS_AVX2_UNIT
extern const ChecksumKernel checksum_kernel_avx2;
#endif

inline const ChecksumKernel& checksum_kernel() {
#ifdef TRANSPORT_HAS_AVX2_UNIT
  static const ChecksumKernel& chosen =
      __builtin_cpu_supports("avx2") ? checksum_kernel_avx2 : checksum_kernel_baseline;
  return chosen;
#else
  return checksum_kernel_baseline;
#endif
}

inline std::uint64_t checksum(const void* data, std::size_t size) { return checksum_kernel().of(data, size); }

// The checksum of a text that comes in pieces.
class Checksum {
 public:
  Checksum() { checksum_kernel().reset(state_.data()); }
  void update(const void* data, std::size_t size) { checksum_kernel().update(state_.data(), data, size); }
  std::uint64_t digest() const { return checksum_kernel().digest(state_.data()); }

 private:
  static constexpr std::size_t kStateBytes = 576;  // checked where xxhash.h is known
  alignas(64) std::array<std::byte, kStateBytes> state_;
};

}  // namespace transport
