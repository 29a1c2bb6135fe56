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

// A point of CLOCK_MONOTONIC. Timeouts below zero (and NaN) are over at once, infinity never.
class Deadline {
 public:
  explicit Deadline(double timeout_s) {
    constexpr double kFarAway_s = 1e9;  // 30 years, and no overflow
    const double bounded = timeout_s > 0 ? std::fmin(timeout_s, kFarAway_s) : 0.0;
    at_ns_ = monotonic_ns() + static_cast<std::uint64_t>(bounded * 1e9);
  }
  std::uint64_t left_ns() const {
    const std::uint64_t now = monotonic_ns();
    return now < at_ns_ ? at_ns_ - now : 0;
  }

 private:
  std::uint64_t at_ns_;
};

}  // namespace transport
