// Tells an event loop through a descriptor when a ring has something new, or a time has come.
//
//   arm ──► a thread sleeps on the ring's event word ──► it has advanced, or it is time ──► the descriptor is readable
//
// There is no thread before the first `arm`, and it sleeps without a limit while nothing is armed. Publishing costs
// a system call only while a thread sleeps on the word (futex.hpp): while a demand waits, and once after each.
// In a forked child there is no such thread: what it shares is left to the end of the process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "common/futex.hpp"
#include "ring/segment.hpp"

namespace transport::ucp {

class PublishWatch {
 public:
  PublishWatch(std::shared_ptr<Mapping> mapping, EventWord& word);
  ~PublishWatch();
  PublishWatch(const PublishWatch&) = delete;
  PublishWatch& operator=(const PublishWatch&) = delete;

  int descriptor() const { return shared_ ? shared_->descriptor : -1; }
  // Once, as soon as the word is not at `before`, or at `until_ns` of the monotonic clock. Of several times the earliest.
  void arm(std::uint32_t before, std::uint64_t until_ns);
  void clear();  // what the descriptor says
  void close();  // ends the thread, and with it the descriptor; nothing is watched afterwards

 private:
  enum Order : std::uint32_t { idle, watch, end };
  struct Shared {
    Shared(std::shared_ptr<Mapping> mapping, EventWord& word);
    ~Shared();
    void run();

    const std::shared_ptr<Mapping> mapping;  // keeps the word
    EventWord& word;
    int descriptor;
    std::atomic<std::uint32_t> order = idle;
    std::atomic<std::uint32_t> before = 0;
    std::atomic<std::uint64_t> until_ns = 0;
    std::atomic<std::uint64_t> asleep_until_ns = 0;  // it looks by itself then
  };

  const pid_t pid_;
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace transport::ucp
