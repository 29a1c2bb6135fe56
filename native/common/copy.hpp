// Large copies, with and without a checksum on the way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

#include "common/checksum.hpp"

namespace transport {

inline bool overlap(const std::byte* a, const std::byte* b, std::size_t size) { return a < b + size && b < a + size; }

// From here on a copy goes past the caches: it would drive out everything else and still not be there
// when it is read, and a store that does not fetch the line first saves a third of the memory traffic.
inline constexpr std::size_t kStreamBytes = std::size_t{8} << 20;

// Copies past the caches. `finish_stream` orders what was copied before whatever is stored next.
#ifdef __x86_64__
inline void stream_piece(std::byte* destination, const std::byte* source, std::size_t size) {
  const std::size_t head = std::min(size, (16 - reinterpret_cast<std::uintptr_t>(destination) % 16) % 16);
  std::memcpy(destination, source, head);
  std::size_t at = head;
  for (; at + 64 <= size; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(source + at);
    auto* to = reinterpret_cast<__m128i*>(destination + at);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(destination + at, source + at, size - at);
}
inline void finish_stream() { _mm_sfence(); }
#else
inline void stream_piece(std::byte* destination, const std::byte* source, std::size_t size) {
  std::memcpy(destination, source, size);
}
inline void finish_stream() {}
#endif

inline void copy_bytes(std::byte* destination, const std::byte* source, std::size_t size) {
  if (size == 0) return;  // and perhaps no memory
  if (overlap(destination, source, size)) {
    std::memmove(destination, source, size);
  } else if (size < kStreamBytes) {
    std::memcpy(destination, source, size);
  } else {
    stream_piece(destination, source, size);
    finish_stream();
  }
}

// From here on hashing while copying saves a second pass over memory; below it both are in the caches.
inline constexpr std::size_t kFusedBytes = 256 * 1024;

// One pass over memory: a piece is hashed as it comes from memory, and copied while it is in the cache.
// Source and destination do not overlap.
inline void copy_and_update(Checksum& checksum, std::byte* destination, const std::byte* source, std::size_t size) {
  const bool stream = size >= kStreamBytes;
  const std::size_t piece_bytes = stream ? 64 * 1024 : 16 * 1024;  // measured: second-level, first-level cache
  for (std::size_t at = 0; at < size; at += piece_bytes) {
    const std::size_t piece = std::min(piece_bytes, size - at);
    checksum.update(source + at, piece);
    if (stream)
      stream_piece(destination + at, source + at, piece);
    else
      std::memcpy(destination + at, source + at, piece);
  }
  if (stream) finish_stream();
}

}  // namespace transport
