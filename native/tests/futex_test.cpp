// The event counter, one step of one thread at a time: native/common/futex.hpp. native/model/futex.pml searches all orders.
#include <atomic>
#include <csignal>
#include <thread>

#include "check.hpp"
#include "common/fault.hpp"
#include "common/futex.hpp"

#ifndef TRANSPORT_FAULT_POINTS
#error "tests that stop a thread between two steps need TRANSPORT_FAULT_POINTS"
#endif

using namespace transport;
using namespace transport::test;

namespace {

// A thread that goes into the trap waits in its signal handler until it is let go.
constexpr std::size_t kAdvanced = fault::index_of("event.advanced");
std::atomic<bool> inside{false}, go_on{false};
void wait_in_trap(int) {
  inside.store(true);
  while (!go_on.load()) {
  }
}

}  // namespace

TEST(a_waker_that_was_held_up_does_not_take_down_the_flag_of_a_sleeper_that_has_seen_its_count) {
  EventWord event{};
  CHECK(std::signal(SIGUSR1, wait_in_trap) != SIG_ERR);
  fault::set(kAdvanced, SIGUSR1, 0);
  event.waiting.store(1);  // a sleeper is there, or was

  std::atomic<bool> start{false};
  std::thread waker([&] {
    while (!start.load()) std::this_thread::yield();
    advance(event);
  });
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR1);
  CHECK(pthread_sigmask(SIG_BLOCK, &blocked, nullptr) == 0);  // it is the waker's
  start.store(true);
  while (!inside.load()) std::this_thread::yield();

  // The sleeper comes back: it sees the new count, finds nothing, raises its flag and is about to sleep.
  const std::uint32_t before = seen(event);
  CHECK(before == 1);
  event.waiting.store(1);
  go_on.store(true);
  waker.join();
  CHECK(event.waiting.load() == 1);  // so that the next advance wakes it
  fault::set(kAdvanced, 0, 0);
  CHECK(!sleep_slice(event, before, Deadline(0)));  // nothing has come since
  advance(event);
  CHECK(event.waiting.load() == 0 && seen(event) == 2);
}

int main(int argc, char** argv) { return run_all(argc, argv); }
