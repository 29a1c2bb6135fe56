// Sleeping on several event words at once, which may lie in several segments: futex_waitv, Linux 5.16.
//
// The protocol is that of futex.hpp: `waiting` of each is raised, and then the kernel compares each count. Where the
// kernel has no futex_waitv, the first word is slept on for a millisecond at a time and the others are looked at.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <vector>

#include "common/clock.hpp"
#include "common/futex.hpp"

namespace transport {

inline constexpr std::size_t kMostWords = 128;  // the kernel's limit

// As sleep_slice: true if one of the counts differs from what was seen of it.
inline bool sleep_on_any(const std::vector<EventWord*>& words, const std::vector<std::uint32_t>& before,
                         const Deadline& deadline) {
  const auto differs = [&] {
    for (std::size_t i = 0; i < words.size(); ++i)
      if (seen(*words[i]) != before[i]) return true;
    return false;
  };
  if (words.size() == 1) return sleep_slice(*words[0], before[0], deadline);
  if (differs()) return true;
  const std::uint64_t slice_ns = std::min(deadline.left_ns(), kRecheck_ns);
  if (slice_ns == 0) return false;
  for (EventWord* word : words) word->waiting.store(1, std::memory_order_seq_cst);  // SYNC W

  struct Waiter {  // struct futex_waitv, which older headers lack
    std::uint64_t value, address;
    std::uint32_t flags, reserved;
  };
  constexpr std::uint32_t kSize32 = 2;  // FUTEX_32, not private: other processes wake us
  constexpr long kFutexWaitv = 449;
  std::vector<Waiter> waiters;
  for (std::size_t i = 0; i < words.size(); ++i)
    waiters.push_back({before[i], reinterpret_cast<std::uint64_t>(&words[i]->count), kSize32, 0});
  const std::uint64_t until_ns = monotonic_ns() + slice_ns;
  const timespec until{static_cast<time_t>(until_ns / 1'000'000'000), static_cast<long>(until_ns % 1'000'000'000)};
  const long slept = syscall(kFutexWaitv, waiters.data(), waiters.size(), 0, &until, CLOCK_MONOTONIC);
  if (slept < 0 && errno == ENOSYS) {
    const timespec moment{0, static_cast<long>(std::min<std::uint64_t>(slice_ns, 1'000'000))};
    futex(words[0]->count, FUTEX_WAIT, before[0], &moment);
  }
  return differs();
}

}  // namespace transport
