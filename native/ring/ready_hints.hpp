// Where a payload may be that can be claimed: one bit per slot, and above it one bit per 64 of them, as free_hints.hpp.
// Only slot and claim words are the truth. Claimers look at the bits without taking them, since what they find may be
// for another rank, and a claimer that took a bit and died would hide a payload. A bit that promises too
// much is withdrawn by the claimer that notices; one that is missing after a crash is set again.
//
// SYNC R: the words change before the bit is set; who withdraws a bit looks at the words again afterwards, and sets it
// if they promise something. Both change the same leaf with read-modify-writes that acquire and release, so either the
// withdrawal comes first, and the bit stays set, or the look sees the words.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace transport {

class ReadyHints {
 public:
  static constexpr std::size_t kBits = 64;
  using Bits = std::atomic<std::uint64_t>;

  static constexpr std::size_t leaves_for(std::size_t slots) { return (slots + kBits - 1) / kBits; }
  static constexpr std::size_t bytes_for(std::size_t slots) {
    const std::size_t leaves = leaves_for(slots);
    return (leaves + leaves_for(leaves)) * sizeof(Bits);
  }

  ReadyHints() = default;
  ReadyHints(void* memory, std::size_t slots)
      : slots_(slots),
        leaf_count_(leaves_for(slots)),
        leaves_(static_cast<Bits*>(memory)),
        tops_(leaves_ + leaf_count_) {}

  void offer(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    const std::uint64_t before = leaves_[leaf].fetch_or(mask(slot), std::memory_order_acq_rel);  // SYNC R
    if (before == 0) tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);        // SYNC T
  }
  // As offer, for a slot whose hint seems lost: also repairs the bit above.
  void offer_again(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    if ((leaves_[leaf].load(std::memory_order_relaxed) & mask(slot)) == 0) offer(slot);
    if ((tops_[leaf / kBits].load(std::memory_order_relaxed) & mask(leaf)) == 0)
      tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);  // SYNC T
  }

  // Afterwards the caller looks at the words again.
  void withdraw(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    const std::uint64_t before = leaves_[leaf].fetch_and(~mask(slot), std::memory_order_acq_rel);  // SYNC R
    if (before != mask(slot)) return;
    tops_[leaf / kBits].fetch_and(~mask(leaf), std::memory_order_seq_cst);  // SYNC T, as in free_hints.hpp
    if (leaves_[leaf].load(std::memory_order_seq_cst) != 0)                 // SYNC T
      tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);
  }

  template <class Look>
  void each(Look look) const {
    for (std::size_t top = 0, tops = leaves_for(leaf_count_); top < tops; ++top)
      for (std::uint64_t above = tops_[top].load(std::memory_order_acquire); above != 0; above &= above - 1) {
        const std::size_t leaf = top * kBits + lowest(above);
        if (leaf >= leaf_count_) break;
        for (std::uint64_t bits = leaves_[leaf].load(std::memory_order_acquire); bits != 0; bits &= bits - 1) {
          const std::size_t slot = leaf * kBits + lowest(bits);
          if (slot < slots_) look(slot);
        }
      }
  }

 private:
  static std::uint64_t mask(std::size_t index) { return std::uint64_t{1} << (index % kBits); }
  static unsigned lowest(std::uint64_t bits) { return static_cast<unsigned>(std::countr_zero(bits)); }

  std::size_t slots_ = 0, leaf_count_ = 0;
  Bits* leaves_ = nullptr;
  Bits* tops_ = nullptr;
};

}  // namespace transport
