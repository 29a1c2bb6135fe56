// SipHash-2-4 with a 64-bit result (Aumasson and Bernstein, 2012): a keyed hash that cannot be predicted
// without the key, made for messages as short as ours.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace transport {

class SipHash24 {
 public:
  explicit SipHash24(const std::array<std::uint8_t, 16>& key) {
    const std::uint64_t k0 = load(key.data()), k1 = load(key.data() + 8);
    v0_ = k0 ^ 0x736f6d6570736575;  // "somepseudorandomlygeneratedbytes"
    v1_ = k1 ^ 0x646f72616e646f6d;
    v2_ = k0 ^ 0x6c7967656e657261;
    v3_ = k1 ^ 0x7465646279746573;
  }

  // One message per object: the state is used up.
  std::uint64_t of(const void* message, std::size_t size) && {
    const auto* bytes = static_cast<const std::uint8_t*>(message);
    std::size_t at = 0;
    for (; at + 8 <= size; at += 8) absorb(load(bytes + at));
    std::uint64_t last = std::uint64_t{size & 0xff} << 56;
    for (unsigned shift = 0; at < size; ++at, shift += 8) last |= std::uint64_t{bytes[at]} << shift;
    return finish(last);
  }
  // The message of eight bytes that `word` is in little-endian order.
  std::uint64_t of(std::uint64_t word) && {
    absorb(word);
    return finish(std::uint64_t{8} << 56);
  }

 private:
  static std::uint64_t load(const std::uint8_t* bytes) {
    static_assert(std::endian::native == std::endian::little, "words are read as they lie");
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
  }
  void round() {
    v0_ += v1_, v1_ = std::rotl(v1_, 13) ^ v0_, v0_ = std::rotl(v0_, 32);
    v2_ += v3_, v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ += v3_, v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ += v1_, v1_ = std::rotl(v1_, 17) ^ v2_, v2_ = std::rotl(v2_, 32);
  }
  void absorb(std::uint64_t word) {
    v3_ ^= word;
    round(), round();
    v0_ ^= word;
  }
  std::uint64_t finish(std::uint64_t last) {
    absorb(last);
    v2_ ^= 0xff;
    round(), round(), round(), round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

  std::uint64_t v0_, v1_, v2_, v3_;
};

// The key of one payload: of slot and generation, little-endian, under the ring's secret. Publishing needs
// no random bytes, and one ticket reveals nothing about the next.
inline std::uint64_t slot_key(const std::array<std::uint8_t, 16>& secret, std::uint32_t slot,
                              std::uint32_t generation) {
  return SipHash24(secret).of(std::uint64_t{generation} << 32 | slot);
}

}  // namespace transport
