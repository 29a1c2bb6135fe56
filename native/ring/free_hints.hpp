// Where a free slot may be: one bit per slot, and above it one bit per 64 of them that is set where
// any is. Only the slot words are the truth. A bit may be set for a slot that is not free (the taker
// notices), and may be missing for one that is (after a crash; `offer` it again).
//
// The lowest slot is handed out first: the memory used last is the memory still in the caches.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace transport {

class FreeHints {
 public:
  static constexpr std::size_t kBits = 64;
  using Bits = std::atomic<std::uint64_t>;
  static_assert(Bits::is_always_lock_free, "only a lock-free atomic works across processes");

  static constexpr std::size_t leaves_for(std::size_t slots) { return (slots + kBits - 1) / kBits; }
  static constexpr std::size_t bytes_for(std::size_t slots) {
    const std::size_t leaves = leaves_for(slots);
    return (leaves + leaves_for(leaves)) * sizeof(Bits);
  }

  FreeHints() = default;
  FreeHints(void* memory, std::size_t slots)
      : slots_(slots),
        leaf_count_(leaves_for(slots)),
        leaves_(static_cast<Bits*>(memory)),
        tops_(leaves_ + leaf_count_) {}

  // SYNC H: a slot's word becomes FREE before its hint is set, so that a taker who claims the hint
  // sees the word free. A taker who claims a stale hint before it is set again leaves the new one.
  void offer(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    const std::uint64_t before = leaves_[leaf].fetch_or(mask(slot), std::memory_order_acq_rel);  // SYNC H
    if (before == 0) tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);        // SYNC T
  }

  std::optional<std::size_t> claim() {
    for (std::size_t top = 0, tops = leaves_for(leaf_count_); top < tops; ++top) {
      for (std::uint64_t bits = tops_[top].load(std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
        const std::size_t leaf = top * kBits + lowest(bits);
        if (leaf >= leaf_count_) break;
        if (const auto slot = claim_in(leaf)) return slot;
      }
    }
    return std::nullopt;
  }

  bool offered(std::size_t slot) const {
    return (leaves_[slot / kBits].load(std::memory_order_relaxed) & mask(slot)) != 0 &&
           (tops_[slot / kBits / kBits].load(std::memory_order_relaxed) & mask(slot / kBits)) != 0;
  }
  // As offer, for a slot whose hint seems lost: also repairs the bit above a leaf that is not empty.
  void offer_again(std::size_t slot) {
    if (offered(slot)) return;
    offer(slot);
    tops_[slot / kBits / kBits].fetch_or(mask(slot / kBits), std::memory_order_seq_cst);  // SYNC T
  }

 private:
  static std::uint64_t mask(std::size_t index) { return std::uint64_t{1} << (index % kBits); }
  static unsigned lowest(std::uint64_t bits) { return static_cast<unsigned>(std::countr_zero(bits)); }

  std::optional<std::size_t> claim_in(std::size_t leaf) {
    std::uint64_t bits = leaves_[leaf].load(std::memory_order_relaxed);
    while (bits != 0) {
      const std::size_t slot = leaf * kBits + lowest(bits);
      const std::uint64_t before = leaves_[leaf].fetch_and(~mask(slot), std::memory_order_acq_rel);  // SYNC H
      bits = before & ~mask(slot);
      if (bits == 0) lower_top(leaf);
      if ((before & mask(slot)) != 0 && slot < slots_) return slot;
    }
    return std::nullopt;
  }

  // SYNC T: lowering the upper bit and then looking at the leaf again is sequentially consistent with
  // filling the leaf and then raising the upper bit: a filled leaf does not stay hidden.
  void lower_top(std::size_t leaf) {
    tops_[leaf / kBits].fetch_and(~mask(leaf), std::memory_order_seq_cst);  // SYNC T
    if (leaves_[leaf].load(std::memory_order_seq_cst) != 0)                 // SYNC T
      tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);
  }

  std::size_t slots_ = 0, leaf_count_ = 0;
  Bits* leaves_ = nullptr;
  Bits* tops_ = nullptr;
};

}  // namespace transport
