#include "common/block_pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

#include <pthread.h>
#include <sys/mman.h>

namespace transport {

namespace {

// Above it memory is mapped for itself: it goes back to the system when it is let go, and the heap stays whole.
constexpr std::size_t kMapBytes = std::size_t{256} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Large copies and registered memory like whole pages; small blocks would waste as much again.
constexpr std::size_t kPage = 4096, kPagedBytes = std::size_t{64} << 10, kCacheLine = 64;

std::byte* allocate(std::size_t bytes) {
  if (bytes < kMapBytes) {
    const std::size_t alignment = bytes < kPagedBytes ? kCacheLine : kPage;
    return static_cast<std::byte*>(std::aligned_alloc(alignment, bytes + -bytes % alignment));
  }
  // Huge pages lie at multiples of their size: what surrounds the aligned part is given back at once.
  const std::size_t spare = bytes >= kHugePage ? kHugePage : 0;
  void* const mapped = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* memory = static_cast<std::byte*>(mapped);
  if (spare == 0) return memory;
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(memory) % kHugePage;
  if (before != 0) munmap(memory, before);
  memory += before;
  if (spare != before) munmap(memory + bytes, spare - before);
  madvise(memory, bytes, MADV_HUGEPAGE);  // an advice: where it is refused, pages are small
  return memory;
}

void release(std::byte* memory, std::size_t bytes) noexcept {
  if (bytes < kMapBytes)
    std::free(memory);
  else
    munmap(memory, bytes);
}

// One lock for all pools, of which a process has few. A fork waits for it, so that a child, in which the thread that
// held it does not exist, finds it free and the lists whole; its blocks are its own copies.
std::mutex& lock() {
  // Never destroyed: blocks may outlive the static destructors.
  static std::mutex* const mutex = [] {
    static auto* made = new std::mutex;
    pthread_atfork([] { made->lock(); }, [] { made->unlock(); }, [] { made->unlock(); });
    return made;
  }();
  return *mutex;
}

}  // namespace

std::byte* BlockPool::take(std::size_t size) {
  const unsigned wanted = size_class::index(size);
  std::byte* memory = nullptr;
  {
    const std::lock_guard hold(lock());
    std::vector<std::byte*>& idle = idle_[wanted];
    if (!idle.empty()) {
      memory = idle.back();  // the last to come back is the warmest
      idle.pop_back();
      idle_bytes_.fetch_sub(size_class::bytes(wanted), std::memory_order_relaxed);
    }
  }
  if (memory == nullptr) memory = allocate(size_class::bytes(wanted));
  if (memory != nullptr) lent_.fetch_add(1, std::memory_order_relaxed);
  return memory;
}

void BlockPool::give_back(std::byte* memory, unsigned class_index) noexcept {
  const std::size_t bytes = size_class::bytes(class_index);
  lent_.fetch_sub(1, std::memory_order_relaxed);
  {
    const std::lock_guard hold(lock());
    const std::size_t idle_bytes = idle_bytes_.load(std::memory_order_relaxed);
    if (idle_bytes <= most_idle_bytes_ && bytes <= most_idle_bytes_ - idle_bytes) {
      try {
        idle_[class_index].push_back(memory);
        idle_bytes_.store(idle_bytes + bytes, std::memory_order_relaxed);
        memory = nullptr;
      } catch (const std::bad_alloc&) {  // no memory for the list: let go of the block
      }
    }
  }
  if (memory != nullptr) release(memory, bytes);
}

void BlockPool::clear() noexcept {
  for (unsigned index = 0; index < size_class::kCount; ++index) {
    std::vector<std::byte*> going;
    {
      const std::lock_guard hold(lock());
      going.swap(idle_[index]);
      idle_bytes_.fetch_sub(going.size() * size_class::bytes(index), std::memory_order_relaxed);
    }
    for (std::byte* memory : going) release(memory, size_class::bytes(index));
  }
}

}  // namespace transport
