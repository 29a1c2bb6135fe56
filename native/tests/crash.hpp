// Killing and stopping children, and what survivors must find.
#pragma once

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.hpp"
#include "common/checksum.hpp"
#include "common/clock.hpp"
#include "common/fault.hpp"

#ifndef TRANSPORT_FAULT_POINTS
#error "tests of crashes need TRANSPORT_FAULT_POINTS"
#endif

namespace transport::test {

inline constexpr std::uint64_t kSlots = 6;
inline constexpr std::uint64_t kCapacity = 256;

// Runs `body` in a child. True if SIGKILL ended it, false if it came to its end; anything else is a failure.
template <class Body>
bool killed(Body body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    try {
      body();
    } catch (const RingFault& fault) {
      std::fprintf(stderr, "child: %s\n", fault.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
  return WIFSIGNALED(status);
}

inline bool publish_text(Ring& ring, const Lease& lease, std::uint64_t value, unsigned readers) {
  std::byte* data = ring.payload(lease.slot);
  std::memset(data, static_cast<int>(value), kCapacity);
  return ring.publish(lease.slot, lease.generation,
                      {kCapacity, checksum(data, kCapacity), readers, 0, std::to_string(value)});
}

inline Lease published(Ring& ring, unsigned readers) {
  static std::uint64_t value = 0;
  const auto lease = ring.try_take();
  CHECK(lease);
  CHECK(publish_text(ring, *lease, ++value, readers));
  return *lease;
}

// What must hold once the dead are reclaimed: nothing is held, what is published is whole, everything can be used.
inline void check_survivors(Ring& ring, const std::set<unsigned>& living_places = {0}) {
  for (const OwnerInfo& owner : ring.owners()) CHECK(owner.alive == (living_places.count(owner.index) > 0));
  for (std::uint64_t slot = 0; slot < kSlots; ++slot) {
    const SlotInfo info = ring.info(slot);
    CHECK(info.state == State::free || info.state == State::ready);
    CHECK(info.pins == 0);
    if (info.state != State::ready) continue;
    CHECK(info.checksum == checksum(ring.payload(slot), info.length));
    CHECK(ring.note(slot, info.generation).has_value());
    for (unsigned rank = 0; rank < info.readers; ++rank) CHECK(!ring.claim_word(slot, rank).held() || (info.done >> rank & 1) != 0);
  }
  for (unsigned rank = 0; rank < kMaxReaders; ++rank) {  // what is still to be done can be claimed by any owner
    const std::uint64_t ready = ring.depth(rank).ready;
    std::vector<Claimed> claimed;
    const Deadline patience(20);  // a lost hint is found after a re-check interval
    while (claimed.size() < ready && patience.left_ns() > 0) {
      Asked asked;
      asked.rank = rank;
      asked.most = kSlots;
      ring.claim(asked, claimed);
    }
    CHECK(claimed.size() == ready);
    for (const Claimed& one : claimed) CHECK(ring.finish(one.id));
  }
  for (std::uint64_t slot = 0; slot < kSlots; ++slot) CHECK(ring.info(slot).state == State::free);
  std::set<std::uint32_t> taken;
  for (std::uint64_t i = 0; i < kSlots; ++i) taken.insert(published(ring, 1).slot);
  CHECK(taken.size() == kSlots && !ring.try_take());
  for (std::uint64_t slot = 0; slot < kSlots; ++slot) CHECK(ring.consume(slot, ring.info(slot).generation, 0));
  CHECK(ring.state_counts()[0] == kSlots);
}

inline std::vector<std::string_view> points_starting(std::initializer_list<const char*> prefixes, bool wanted) {
  std::vector<std::string_view> points;
  for (const std::string_view point : fault::kPoints) {
    const bool found =
        std::any_of(prefixes.begin(), prefixes.end(), [&](const char* prefix) { return point.starts_with(prefix); });
    if (found == wanted) points.push_back(point);
  }
  return points;
}

inline std::size_t index_of(std::string_view point) {
  return static_cast<std::size_t>(std::find(fault::kPoints.begin(), fault::kPoints.end(), point) -
                                  fault::kPoints.begin());
}

// A child that stops at `point` of `body`; `meanwhile` runs here; then the child goes on and must come to its end.
template <class Body, class Meanwhile>
void stopped_at(std::string_view point, Body body, Meanwhile meanwhile) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fault::set(index_of(point), SIGSTOP, 0);
    body();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
  meanwhile();
  CHECK(kill(child, SIGCONT) == 0 && waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace transport::test
