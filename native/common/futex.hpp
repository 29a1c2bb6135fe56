// An event counter in shared memory that processes can sleep on.
//
// A sleeper raises `waiting` and sleeps while `count` is what it has seen. A waker takes `waiting` down,
// advances `count`, looks at `waiting` again, and wakes all sleepers if it was up either time. `waiting` is
// a flag and not a number of sleepers, so a sleeper that is killed costs one needless wake-up and
// nothing after it.
//
// SYNC W: the sleeper stores `waiting` and then lets the kernel compare `count`; the waker changes
// `count` and then loads `waiting`. Both orders are sequentially consistent, so at least one of the
// two sees the other: either the kernel refuses to sleep, or the waker wakes.
// The flag goes down before `count` is advanced, never after: a sleeper whose flag a waker has taken
// down then either finds another count, or sleeps before that waker wakes. Taken down after, it may be
// the flag of a sleeper that has seen the new count and comes back, and the next waker wakes no sleeper.
// native/model/futex.pml searches all of it.
// A waker killed in between loses the wake-up: sleepers look again after kRecheck_ns.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/clock.hpp"
#include "common/fault.hpp"

namespace transport {

inline constexpr std::uint64_t kRecheck_ns = 100'000'000;

struct EventWord {
  std::atomic<std::uint32_t> count;
  std::atomic<std::uint32_t> waiting;
};
static_assert(sizeof(EventWord) == 8, "the kernel sleeps on the first four bytes");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "only a lock-free atomic works across processes");

inline long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

inline void advance(EventWord& event) {
  // Looking first spares the write where there is no sleeper to wake.
  const bool lowered = event.waiting.load(std::memory_order_seq_cst) != 0 &&
                       event.waiting.exchange(0, std::memory_order_seq_cst) != 0;  // SYNC W
  event.count.fetch_add(1, std::memory_order_seq_cst);                             // SYNC W
  FAULT_POINT("event.advanced");
  if (lowered || event.waiting.load(std::memory_order_seq_cst) != 0)  // SYNC W
    futex(event.count, FUTEX_WAKE, INT_MAX, nullptr);
}

// SYNC E: who sees the new count sees what was done before it was advanced.
inline std::uint32_t seen(const EventWord& event) { return event.count.load(std::memory_order_acquire); }

// Of an event that is often, and seldom waited for: it is advanced where `expect` has announced a wait, else one load.
// The sleeper looks at what it waits for between `expect` and its sleep, the waker has changed that before.
inline void advance_if_expected(EventWord& event) {
  if (event.waiting.load(std::memory_order_seq_cst) != 0) advance(event);  // SYNC X
}

// SYNC X: the count is read before the flag goes up. Who takes that down advances the count later, and so ends the
// sleep; until then each waker finds the flag, or what it has changed is seen by the look.
inline std::uint32_t expect(EventWord& event) {
  const std::uint32_t before = seen(event);
  event.waiting.store(1, std::memory_order_seq_cst);
  return before;
}

// Sleeps until the count differs from `before`, a signal arrives, or one re-check interval has passed.
// True if the count differs.
inline bool sleep_slice(EventWord& event, std::uint32_t before, const Deadline& deadline) {
  if (seen(event) != before) return true;
  const std::uint64_t slice_ns = std::min(deadline.left_ns(), kRecheck_ns);
  if (slice_ns == 0) return false;
  event.waiting.store(1, std::memory_order_seq_cst);  // SYNC W
  const timespec timeout{0, static_cast<long>(slice_ns)};
  futex(event.count, FUTEX_WAIT, before, &timeout);  // not private: other processes wake us
  return seen(event) != before;
}

}  // namespace transport
