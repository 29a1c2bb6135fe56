// One bit per slot, and above it one bit per 64 of them that is set where any is. Only the slot words are the truth: a
// bit may be set for a slot that is not what it promises (its taker notices), and may be missing for one that
// is, after a crash (offer it again).
//
// SYNC H, SYNC R: the words change before the bit is set, and the taker of the bit reads the words afterwards;
// both change the same leaf with read-modify-writes that acquire and release. A bit that is set again while it is taken
// stays.
// SYNC T: lowering the upper bit and then looking at the leaf again is sequentially consistent with filling the leaf and
// then raising the upper bit: a filled leaf does not stay hidden.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace transport {

class Hints {
 public:
  static constexpr std::size_t kBits = 64;
  using Bits = std::atomic<std::uint64_t>;
  static_assert(Bits::is_always_lock_free, "only a lock-free atomic works across processes");

  static constexpr std::size_t leaves_for(std::size_t slots) { return (slots + kBits - 1) / kBits; }
  static constexpr std::size_t bytes_for(std::size_t slots) {
    const std::size_t leaves = leaves_for(slots);
    return (leaves + leaves_for(leaves)) * sizeof(Bits);
  }

  Hints() = default;
  Hints(void* memory, std::size_t slots)
      : slots_(slots),
        leaf_count_(leaves_for(slots)),
        leaves_(static_cast<Bits*>(memory)),
        tops_(leaves_ + leaf_count_) {}

  void offer(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    const std::uint64_t before = leaves_[leaf].fetch_or(mask(slot), std::memory_order_acq_rel);  // SYNC H, R
    if (before == 0) tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);        // SYNC T
  }
  // As offer, for a slot whose hint seems lost: also repairs the bit above a leaf that is not empty.
  void offer_again(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    if ((leaves_[leaf].load(std::memory_order_relaxed) & mask(slot)) == 0) offer(slot);
    if ((tops_[leaf / kBits].load(std::memory_order_relaxed) & mask(leaf)) == 0)
      tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);  // SYNC T
  }

 protected:
  // Clears the bit; what the leaf was.
  std::uint64_t take(std::size_t slot) {
    const std::size_t leaf = slot / kBits;
    const std::uint64_t before = leaves_[leaf].fetch_and(~mask(slot), std::memory_order_acq_rel);  // SYNC H, R
    if ((before & ~mask(slot)) == 0) {
      tops_[leaf / kBits].fetch_and(~mask(leaf), std::memory_order_seq_cst);  // SYNC T
      if (leaves_[leaf].load(std::memory_order_seq_cst) != 0)                 // SYNC T
        tops_[leaf / kBits].fetch_or(mask(leaf), std::memory_order_seq_cst);
    }
    return before;
  }

  // Visits leaves that seem filled, the lowest first, until a visit returns true.
  template <class Visit>
  bool any_leaf(Visit visit) const {
    for (std::size_t top = 0, tops = leaves_for(leaf_count_); top < tops; ++top)
      for (std::uint64_t bits = tops_[top].load(std::memory_order_acquire); bits != 0; bits &= bits - 1) {
        const std::size_t leaf = top * kBits + lowest(bits);
        if (leaf >= leaf_count_) break;
        if (visit(leaf)) return true;
      }
    return false;
  }

  std::uint64_t leaf(std::size_t index) const { return leaves_[index].load(std::memory_order_acquire); }
  std::size_t slots() const { return slots_; }
  static std::uint64_t mask(std::size_t index) { return std::uint64_t{1} << (index % kBits); }
  static unsigned lowest(std::uint64_t bits) { return static_cast<unsigned>(std::countr_zero(bits)); }

 private:
  std::size_t slots_ = 0, leaf_count_ = 0;
  Bits* leaves_ = nullptr;
  Bits* tops_ = nullptr;
};

// Where a free slot may be. The taker of a slot takes its bit. The lowest slot is handed out first: the memory used last
// is the memory still in the caches.
class FreeHints : public Hints {
 public:
  using Hints::Hints;

  std::optional<std::size_t> claim() {
    std::size_t found = 0;
    const auto in_leaf = [&](std::size_t index) {
      for (std::uint64_t bits = leaf(index); bits != 0;) {
        found = index * kBits + lowest(bits);
        const std::uint64_t before = take(found);
        if ((before & mask(found)) != 0 && found < slots()) return true;
        bits = before & ~mask(found);
      }
      return false;
    };
    return any_leaf(in_leaf) ? std::optional(found) : std::nullopt;
  }
};

// Where a payload may be that can be claimed. Claimers look at the bits without taking them, since what they find may be
// for another rank, and a claimer that took a bit and died would hide a payload. A bit that promises too much is
// withdrawn by the claimer that notices, who looks at the words again afterwards and offers the slot if they promise
// something: either the withdrawal comes before an offer, and the bit stays set, or that look sees the words.
class ReadyHints : public Hints {
 public:
  using Hints::Hints;

  void withdraw(std::size_t slot) { take(slot); }

  template <class Look>
  void each(Look look) const {
    any_leaf([&](std::size_t index) {
      for (std::uint64_t bits = leaf(index); bits != 0; bits &= bits - 1)
        if (const std::size_t slot = index * kBits + lowest(bits); slot < slots()) look(slot);
      return false;
    });
  }
};

}  // namespace transport
