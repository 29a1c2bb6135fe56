#include "ucp/publish_watch.hpp"

#include <csignal>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace transport::ucp {

PublishWatch::Shared::Shared(std::shared_ptr<Mapping> slots, EventWord& watched)
    : mapping(std::move(slots)), word(watched), descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "making an eventfd");
}

PublishWatch::Shared::~Shared() { ::close(descriptor); }

PublishWatch::PublishWatch(std::shared_ptr<Mapping> mapping, EventWord& word)
    : pid_(getpid()), shared_(std::make_shared<Shared>(std::move(mapping), word)) {}

PublishWatch::~PublishWatch() { close(); }

void PublishWatch::close() {
  if (thread_ == nullptr) return shared_.reset();
  if (getpid() != pid_) {
    static_cast<void>(thread_.release());  // the parent's, and with it what both share
    return;
  }
  shared_->order.store(end);
  shared_->order.notify_one();
  futex(shared_->word.count, FUTEX_WAKE, INT_MAX, nullptr);  // others look and sleep on; missed, it looks by itself
  thread_->join();
  thread_.reset();
  shared_.reset();
}

void PublishWatch::arm(std::uint32_t before, std::uint64_t until_ns) {
  if (shared_ == nullptr) return;
  if (thread_ == nullptr) {
    if (getpid() != pid_) return;
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);  // signals are for the process's own threads
    try {
      thread_ = std::make_unique<std::thread>([shared = shared_] { shared->run(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &previous, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }
  Shared& shared = *shared_;
  if (shared.order.load() == watch) {
    // What it watches from is older, so that nothing is missed; in case it has just been told, it is told again.
    if (until_ns < shared.until_ns.load()) shared.until_ns.store(until_ns);
  } else {
    shared.before.store(before);
    shared.until_ns.store(until_ns);
  }
  shared.order.store(watch);
  shared.order.notify_one();
  if (until_ns < shared.asleep_until_ns.load()) futex(shared.word.count, FUTEX_WAKE, INT_MAX, nullptr);
}

void PublishWatch::clear() {
  if (shared_ == nullptr) return;
  std::uint64_t count = 0;
  while (::read(shared_->descriptor, &count, sizeof count) > 0) {
  }
}

// Once it has told, it sleeps on at the word: mostly the next demand waits before something is published, and then need
// not wake this thread. Nobody arms it for a while, or something is published while nobody waits: then `order` does.
void PublishWatch::Shared::run() {
  for (;;) {
    order.wait(idle);
    std::uint32_t from = before.load();
    for (;;) {
      const std::uint32_t ordered = order.load();
      if (ordered == end) return;
      const std::uint64_t now = monotonic_ns(), slice = now + kRecheck_ns;
      const std::uint64_t until = ordered == watch ? until_ns.load() : slice;
      asleep_until_ns.store(std::min(until, slice));
      if (now < until && !sleep_slice(word, from, Deadline(static_cast<double>(until - now) * 1e-9))) {
        if (ordered == idle && order.load() == idle) break;
        continue;
      }
      from = seen(word);
      std::uint32_t expected = watch;
      if (!order.compare_exchange_strong(expected, idle)) break;
      const std::uint64_t one = 1;
      if (::write(descriptor, &one, sizeof one) < 0) continue;  // full: it is readable
    }
  }
}

}  // namespace transport::ucp
