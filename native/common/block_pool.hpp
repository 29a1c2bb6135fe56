// Pooled memory for received payloads, by size class. A returned block is lent again before the system is asked for
// new memory, so its pages are already mapped.
//
// Blocks may be taken and given back on any thread, with or without the GIL. Nothing here runs Python,
// allocates or returns memory while it holds the lock, so the lock is held for a few instructions only.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace transport {

// Four size classes for each power of two, so that at most a quarter is wasted; the smallest is a page.
namespace size_class {

inline constexpr unsigned kSteps = 4, kSmallestPower = 12;
inline constexpr std::size_t kSmallest = std::size_t{1} << kSmallestPower;
inline constexpr unsigned kCount = 1 + kSteps * (64 - kSmallestPower);
// Beyond it a class would not fit into 64 bits, and no machine has it.
inline constexpr std::size_t kLargest = std::size_t{1} << 62;

// size <= kLargest.
constexpr unsigned index(std::size_t size) {
  if (size <= kSmallest) return 0;
  const auto power = static_cast<unsigned>(std::bit_width(size - 1)) - 1;  // 2^power < size <= 2^(power+1)
  const auto quarter = static_cast<unsigned>((size - 1) >> (power - 2) & 3);
  return 1 + kSteps * (power - kSmallestPower) + quarter;
}
constexpr std::size_t bytes(unsigned index) {
  if (index == 0) return kSmallest;
  const unsigned power = kSmallestPower + (index - 1) / kSteps, quarter = (index - 1) % kSteps;
  return (std::size_t{1} << power) + (std::size_t{quarter + 1} << (power - 2));
}

static_assert(bytes(index(0)) == 4096 && bytes(index(4096)) == 4096 && bytes(index(4097)) == 5120);
static_assert(bytes(index(5120)) == 5120 && bytes(index(5121)) == 6144 && bytes(index(8192)) == 8192);
static_assert(index(kLargest) < kCount && bytes(index(kLargest)) == kLargest);

}  // namespace size_class

class BlockPool {
 public:
  // What is idle never exceeds `most_idle_bytes`.
  explicit BlockPool(std::size_t most_idle_bytes) : most_idle_bytes_(most_idle_bytes) {}
  ~BlockPool() { clear(); }
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Memory of the size class, at least 64-byte aligned, its content whatever was there; null if there is none to
  // be had. size <= size_class::kLargest.
  std::byte* take(std::size_t size);
  // What `take` gave for a size of this class. It is not in use any more.
  void give_back(std::byte* memory, unsigned class_index) noexcept;
  // Frees all idle blocks.
  void clear() noexcept;

  std::size_t idle_bytes() const { return idle_bytes_.load(std::memory_order_relaxed); }
  std::size_t lent() const { return lent_.load(std::memory_order_relaxed); }

 private:
  using Idle = std::array<std::vector<std::byte*>, size_class::kCount>;

  const std::size_t most_idle_bytes_;
  // Under the lock of block_pool.cpp. Invariant: idle_bytes_ is the sum over idle_, and at most most_idle_bytes_.
  Idle idle_;
  std::atomic<std::size_t> idle_bytes_{0};
  std::atomic<std::size_t> lent_{0};
};

// Memory of a pool for as long as the object lives. The pool lives as long as any of them.
class Block {
 public:
  // Null memory: there was none to be had.
  Block(std::shared_ptr<BlockPool> pool, std::size_t size)
      : pool_(std::move(pool)), memory_(size <= size_class::kLargest ? pool_->take(size) : nullptr), size_(size) {}
  Block(Block&& other) noexcept
      : pool_(std::move(other.pool_)), memory_(std::exchange(other.memory_, nullptr)), size_(other.size_) {}
  Block& operator=(Block&&) = delete;
  ~Block() {
    if (memory_ != nullptr) pool_->give_back(memory_, size_class::index(size_));
  }

  std::byte* data() const { return memory_; }
  std::size_t size() const { return size_; }

 private:
  std::shared_ptr<BlockPool> pool_;
  std::byte* memory_;
  std::size_t size_;
};

}  // namespace transport
