// What the ring and the copies cost on one core, as JSON lines.
#include <sched.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <vector>

#include "check.hpp"
#include "common/clock.hpp"
#include "common/copy.hpp"

using namespace transport;
using namespace transport::test;

namespace {

// The best of several runs: what disturbs a run only makes it longer.
template <class Body>
double best_s(int runs, Body body) {
  double best = 1e9;
  for (int run = 0; run < runs; ++run) {
    const std::uint64_t begin = monotonic_ns();
    body();
    best = std::min(best, static_cast<double>(monotonic_ns() - begin) * 1e-9);
  }
  return best;
}

void cycles(std::uint64_t slots, bool fifo) {
  constexpr int kCycles = 200'000;
  const NameGuard guard{ring_name("bench")};
  const auto ring = Ring::create(guard.name, slots, 4096, Bytes16{});
  const auto reader = ring->attach_again(Role::reader);
  const std::string note(300, 'n');
  std::vector<Lease> waiting(fifo ? slots / 2 : 0);  // half full: slots are taken all over the ring
  std::size_t at = 0;
  const auto write = [&] {
    const auto lease = *ring->try_take();
    CHECK(ring->publish(lease.slot, lease.generation, {4096, 1, 1, 0, note}));
    return lease;
  };
  for (Lease& lease : waiting) lease = write();
  const double seconds = best_s(5, [&] {
    for (int i = 0; i < kCycles; ++i) {
      Lease lease = write();
      if (fifo) {
        std::swap(lease, waiting[at]);
        if (++at == waiting.size()) at = 0;
      }
      CHECK(reader->pin(lease.slot, lease.generation, 0) == PinAnswer::ok);
      CHECK(reader->mark_consumed(lease.slot, lease.generation, 0));
    }
  });
  std::printf("{\"case\": \"take+publish+pin+mark_consumed\", \"slots\": %" PRIu64
              ", \"backlog\": %zu, \"cycles_per_s\": %.0f}\n",
              slots, waiting.size(), kCycles / seconds);
}

void copies(std::size_t size) {
  std::vector<std::byte> source(size, std::byte{7}), target(size, std::byte{1});
  const int repeats = static_cast<int>(std::max<std::size_t>(1, (std::size_t{64} << 20) / size));
  const auto gb_per_s = [&](auto body) {
    return static_cast<double>(size) * repeats * 1e-9 / best_s(7, [&] {
             for (int i = 0; i < repeats; ++i) body();
           });
  };
  volatile std::uint64_t sink = 0;
  const double plain = gb_per_s([&] {
    std::memcpy(target.data(), source.data(), size);
    sink = static_cast<std::uint64_t>(target[size / 2]);
  });
  const double ours = gb_per_s([&] { copy_bytes(target.data(), source.data(), size); });
  const double fused = gb_per_s([&] {
    Checksum checksum;
    copy_and_update(checksum, target.data(), source.data(), size);
    sink = checksum.digest();
  });
  const double twice = gb_per_s([&] {
    std::memcpy(target.data(), source.data(), size);
    sink = checksum(target.data(), size);
  });
  const double hash = gb_per_s([&] { sink = checksum(source.data(), size); });
  std::printf(
      "{\"case\": \"copy\", \"bytes\": %zu, \"memcpy_gb_per_s\": %.2f, \"copy_gb_per_s\": %.2f, "
      "\"copy_and_checksum_gb_per_s\": %.2f, \"memcpy_then_checksum_gb_per_s\": %.2f, \"checksum_gb_per_s\": %.2f}\n",
      size, plain, ours, fused, twice, hash);
}

}  // namespace

int main() try {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof one, &one);
  for (const bool fifo : {false, true})
    for (const std::uint64_t slots : {100, 100'000}) cycles(slots, fifo);
  for (const std::size_t kib : {64, 1024, 16 * 1024, 256 * 1024}) copies(kib * 1024);
} catch (const std::exception& error) {  // a full /dev/shm: its message, not an abort
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
