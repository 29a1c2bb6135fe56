// Owners that die in the middle: children are killed at each passing of each fault point, and at random
// under load. The processes left must find a ring that works and a payload for every promise.
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "common/clock.hpp"
#include "crash.hpp"

using namespace transport;
using namespace transport::test;

namespace {

// Everything a process can do with a ring, as writer and as listener. `given` are four payloads, of two readers each.
void live_a_full_life(const std::string& name, const std::array<Lease, 4>& given) {
  const auto ring = Ring::attach(name, Role::listener, true);
  ring->set_ports({1, 2, 3});
  ring->set_addresses("127.0.0.1");
  ring->heartbeat();
  auto [slot, generation] = given[0];
  ring->pin(slot, generation, 0);
  ring->unpin(slot, generation);
  ring->pin(slot, generation, 0);
  ring->pin(slot, generation, 1);
  ring->mark_consumed(slot, generation, 0);
  ring->mark_consumed(slot, generation, 1);  // free
  slot = given[1].slot, generation = given[1].generation;
  ring->pin(slot, generation, 1);
  ring->consume(slot, generation, 0);
  ring->consume(slot, generation, 1);
  ring->unpin(slot, generation);                      // free
  ring->discard(given[2].slot, given[2].generation);  // free
  std::vector<Claimed> claimed;
  const auto claim_given = [&](unsigned rank) {  // given[3] is what is left
    claimed.clear();
    Asked asked;
    asked.rank = rank;
    CHECK(ring->claim(asked, claimed) == 1);
    return claimed[0].id;
  };
  ring->give_back(claim_given(0), 1);
  ring->give_back(claim_given(0));
  ring->end(claim_given(0), Ended::dead, "it is in the way");
  ring->finish(claim_given(1));  // free
  const auto aborted = ring->try_take();
  ring->abort(aborted->slot, aborted->generation);
  const auto kept = ring->try_take();
  publish_text(*ring, *kept, 77, 3);
  while (const auto filled = ring->try_take()) publish_text(*ring, *filled, 78, 1);
  const auto over = ring->try_overwrite();
  publish_text(*ring, *over, 79, 1);
  const auto second = ring->try_overwrite();
  ring->pin(kept->slot, kept->generation, 2);
  CHECK(second);
  ring->claim({}, claimed);
  ring->close();  // holding a slot being written, a pin and claims
}

}  // namespace

TEST(an_owner_killed_at_any_passing_of_any_point_is_reclaimed) {
  unsigned kills = 0;
  const auto points = points_starting(
      {"create.", "file.", "unlink.", "reclaim.proven", "reclaim.vacated", "serve.", "demand.", "finish.", "taker.", "outcome.",
       "read."},
      false);
  for (const std::string_view point : points) {
    unsigned passing = 0;
    for (;; ++passing) {
      const NameGuard guard{ring_name("owner")};
      const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      std::array<Lease, 4> given{};
      for (Lease& lease : given) lease = published(*ring, 2);
      const bool was_killed = killed([&] {
        fault::set(index_of(point), SIGKILL, passing);
        live_a_full_life(guard.name, given);
      });
      ring->reclaim();
      check_survivors(*ring);
      ring->set_ports({9});  // the board's lock died with its holder
      CHECK(ring->ports() == std::vector<std::uint32_t>{9});
      if (!was_killed) break;
      ++kills;
    }
    if (passing == 0)
      std::fprintf(stderr, "point %.*s was never passed\n", static_cast<int>(point.size()), point.data());
    CHECK(passing > 0);
  }
  std::printf("   %u kills\n", kills);
}

// Claimed by one that is killed while another one reclaims: each payload is claimed by exactly one of them.
TEST(a_claim_of_a_killed_owner_is_claimed_again_by_its_reclaimer_and_counts_its_attempts) {
  const NameGuard guard{ring_name("claimed")};
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
  for (int i = 0; i < 3; ++i) published(*ring, 2);
  for (unsigned attempt = 1; attempt <= 3; ++attempt) {
    CHECK(killed([&] {
      const auto claimer = Ring::attach(guard.name, Role::reader, false);
      std::vector<Claimed> claimed;
      for (const unsigned rank : {0u, 1u}) {
        Asked asked;
        asked.rank = rank;
        asked.most = kSlots;
        CHECK(claimer->claim(asked, claimed) == 3);
      }
      for (const Claimed& one : claimed) CHECK(one.id.attempts == attempt);
      std::raise(SIGKILL);
    }));
    CHECK(ring->depth(0).claimed == 3 && ring->depth(1).claimed == 3);
    CHECK(ring->reclaim() == 3);
    CHECK(ring->depth(0).ready == 3 && ring->depth(1).ready == 3);
  }
  CHECK(ring->depth(1).tallies[static_cast<unsigned>(Tally::expired)] == 9);
  std::vector<Claimed> none;
  Asked asked;
  asked.most_attempts = 3;
  CHECK(ring->claim(asked, none) == 0);
  CHECK(ring->depth(0).tallies[static_cast<unsigned>(Tally::dead)] == 3);
  check_survivors(*ring);
}

TEST(a_reclaimer_killed_in_reclaiming_is_reclaimed_with_what_it_found) {
  for (const char* point :
       {"reclaim.proven", "reclaim.disclaimed", "reclaim.cleared", "reclaim.vacated", "free.unhinted",
        "free.unannounced", "return.unhinted", "return.unannounced"}) {
    for (unsigned passing = 0;; ++passing) {
      const NameGuard guard{ring_name("reclaimer")};
      const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
      const Lease first = published(*ring, 1), second = published(*ring, 1);
      CHECK(killed([&] {
        const auto reader = Ring::attach(guard.name, Role::reader, true);
        reader->pin(first.slot, first.generation, 0);
        reader->pin(second.slot, second.generation, 0);
        reader->consume(second.slot, second.generation, 0);
        std::vector<Claimed> claimed;
        reader->claim({}, claimed);
        reader->try_take();
        std::raise(SIGKILL);
      }));
      const bool was_killed = killed([&] {
        const auto reclaimer = Ring::attach(guard.name, Role::observer, false);
        fault::set(index_of(point), SIGKILL, passing);
        reclaimer->reclaim();
      });
      ring->reclaim();
      check_survivors(*ring);
      if (was_killed) continue;
      CHECK(passing > 0);
      break;
    }
  }
}

TEST(the_next_owner_of_a_dead_ones_place_does_not_inherit_its_slots) {
  const NameGuard guard{ring_name("heir")};
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
  const Lease lease = published(*ring, 1);
  CHECK(killed([&] {
    const auto reader = Ring::attach(guard.name, Role::reader, true);
    reader->pin(lease.slot, lease.generation, 0);
    reader->try_take();
    std::raise(SIGKILL);
  }));
  CHECK(ring->info(lease.slot).pins == 2);
  const auto heir = Ring::attach(guard.name, Role::reader, false);
  CHECK(heir->owner() == 1);
  CHECK(ring->info(lease.slot).state == State::ready);
  CHECK(ring->state_counts()[1] == 0);
  CHECK(ring->reclaim() == 0);
}

TEST(a_place_is_not_claimed_while_its_dead_owner_is_being_reclaimed) {
  const NameGuard guard{ring_name("busy")};
  const auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});
  CHECK(killed([&] {
    const auto writer = Ring::attach(guard.name, Role::writer, true);
    writer->try_take();
    std::raise(SIGKILL);
  }));
  stopped_at(
      "reclaim.proven", [&] { CHECK(Ring::attach(guard.name, Role::observer, false)->reclaim() == 1); },
      [&] {
        CHECK(ring->reclaim() == 0);  // the stopped one is at it
        CHECK(Ring::attach(guard.name, Role::reader, false)->owner() == 2);
      });
  check_survivors(*ring);
}

TEST(a_sleeper_notices_a_slot_whose_wake_up_died_with_its_sender) {
  for (const char* point : {"free.unhinted", "free.unannounced", "event.advanced"}) {
    const NameGuard guard{ring_name("sleeper")};
    const auto ring = Ring::create(guard.name, 1, kCapacity, Bytes16{});
    const Lease lease = published(*ring, 1);
    std::atomic<bool> asleep{false};
    std::thread sleeper([&] {
      const auto writer = ring->attach_again(Role::writer);
      for (;;) {
        const std::uint32_t before = seen(writer->freed());
        if (writer->try_take()) return;
        asleep.store(true);
        sleep_slice(writer->freed(), before, Deadline(10));
      }
    });
    while (!asleep.load()) std::this_thread::yield();
    CHECK(killed([&] {
      const auto reader = Ring::attach(guard.name, Role::reader, false);
      fault::set(index_of(point), SIGKILL, 0);
      reader->consume(lease.slot, lease.generation, 0);
    }));
    sleeper.join();
  }
}

// Children do everything at random and are killed at random; what they were told is written down in memory
// that outlives them. A kill between an answer and its record loses the record, never invents one.
TEST(under_random_kills_no_rank_consumes_twice_and_nothing_is_stuck) {
  constexpr int kChildren = 5, kKills = 150;
  constexpr std::uint64_t kBetweenKills = 200;
  constexpr std::uint64_t kPayloads = kBetweenKills * (kKills + 1) + kChildren;
  constexpr unsigned kRanks = 2;
  struct Log {
    std::atomic<std::uint64_t> next, allowed, published, consumed_now;
    std::atomic<std::uint8_t> consumed[kPayloads][kRanks];
  };
  void* memory = mmap(nullptr, sizeof(Log), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  Log& log = *static_cast<Log*>(memory);
  const NameGuard guard{ring_name("storm")};
  auto ring = Ring::create(guard.name, kSlots, kCapacity, Bytes16{});

  const auto live = [&](std::uint64_t seed) {  // until it is killed
    std::mt19937_64 random(seed);
    const auto mine = Ring::attach(guard.name, Role::reader, true);
    for (;;) {
      if (random() % 4 == 0 && log.next.load() < log.allowed.load()) {
        const auto lease = mine->try_take();
        if (!lease) {
          mine->reclaim();
          continue;
        }
        const std::uint64_t id = log.next.fetch_add(1);
        CHECK(id < kPayloads);
        std::memcpy(mine->payload(lease->slot), &id, sizeof id);
        mine->publish(lease->slot, lease->generation, {sizeof id, id, kRanks, 0, ""});
        log.published.fetch_add(1);
        continue;
      }
      const unsigned rank = static_cast<unsigned>(random() % kRanks);
      if (random() % 2 == 0) {
        std::vector<Claimed> claimed;
        Asked asked;
        asked.rank = rank;
        asked.most = 1 + random() % 3;
        mine->claim(asked, claimed);
        if (claimed.empty()) mine->reclaim();
        for (const Claimed& one : claimed) {
          std::uint64_t id = 0;
          std::memcpy(&id, mine->payload(one.id.slot), sizeof id);
          CHECK(id == one.checksum);
          if (random() % 4 == 0)
            mine->give_back(one.id, random() % 2 * 1000);
          else if (mine->finish(one.id)) {
            CHECK(log.consumed[id][rank].fetch_add(1) == 0);
            log.consumed_now.fetch_add(1);
          }
        }
        continue;
      }
      const std::uint64_t slot = random() % kSlots;
      const SlotInfo info = mine->info(slot);
      if (mine->pin(slot, info.generation, rank) != PinAnswer::ok) continue;
      std::uint64_t id = 0;
      std::memcpy(&id, mine->payload(slot), sizeof id);
      CHECK(id == mine->info(slot).checksum);  // never another generation's bytes
      if (random() % 3 == 0) {
        CHECK(mine->unpin(slot, info.generation));
      } else if (mine->mark_consumed(slot, info.generation, rank)) {
        CHECK(log.consumed[id][rank].fetch_add(1) == 0);
        log.consumed_now.fetch_add(1);
      } else {
        CHECK(mine->unpin(slot, info.generation));
      }
    }
  };

  std::mt19937_64 random(7);
  std::array<pid_t, kChildren> children{};
  const auto start = [&](pid_t& child) {
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      live(random());
    }
    random.discard(1);
  };
  for (pid_t& child : children) start(child);
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    const std::uint64_t goal = log.allowed.fetch_add(kBetweenKills) + random() % kBetweenKills;
    const Deadline patience(20);  // a watchdog: the survivors must get on with it
    while (log.next.load() < goal) {
      CHECK(patience.left_ns() > 0);
      std::this_thread::yield();
    }
    pid_t& child = children[random() % kChildren];
    int status = 0;
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    start(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  }
  ring->reclaim();
  for (std::uint64_t slot = 0; slot < kSlots; ++slot) {
    const SlotInfo info = ring->info(slot);
    CHECK(info.pins == 0 && (info.state == State::free || info.state == State::ready));
    if (info.state != State::ready) continue;
    for (unsigned rank = 0; rank < kRanks; ++rank)
      if (ring->consume(slot, info.generation, rank)) CHECK(log.consumed[info.checksum][rank].fetch_add(1) == 0);
  }
  std::uint64_t unrecorded = 0;
  for (std::uint64_t id = 0; id < log.next.load(); ++id)
    for (unsigned rank = 0; rank < kRanks; ++rank) unrecorded += log.consumed[id][rank].load() == 0;
  // A kill loses at most one payload's record (never published: two ranks) or one answer's.
  CHECK(unrecorded <= kRanks * (kKills + kChildren));
  check_survivors(*ring);
  std::printf("   %llu published, %llu consumed, %d kills, %llu without a record\n",
              static_cast<unsigned long long>(log.published.load()),
              static_cast<unsigned long long>(log.consumed_now.load()), kKills + kChildren,
              static_cast<unsigned long long>(unrecorded));
  munmap(memory, sizeof(Log));
}

int main(int argc, char** argv) { return run_all(argc, argv); }
