#pragma once

#include <cmath>
#include <cstdint>
#include <ctime>

namespace transport {

inline std::uint64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}
inline std::uint64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }
inline std::uint64_t realtime_ns() { return clock_ns(CLOCK_REALTIME); }

// Every time that a caller gives in seconds comes through here: below zero and NaN are none, and 30 years are infinity.
inline std::uint64_t duration_ns(double seconds) {
  constexpr double kFarAway_s = 1e9;  // no overflow
  return seconds > 0 ? static_cast<std::uint64_t>(std::fmin(seconds, kFarAway_s) * 1e9) : 0;
}

// A point of CLOCK_MONOTONIC.
class Deadline {
 public:
  explicit Deadline(double timeout_s) : at_ns_(monotonic_ns() + duration_ns(timeout_s)) {}
  std::uint64_t left_ns() const {
    const std::uint64_t now = monotonic_ns();
    return now < at_ns_ ? at_ns_ - now : 0;
  }

 private:
  std::uint64_t at_ns_;
};

}  // namespace transport
