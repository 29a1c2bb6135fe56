// Threads as owners of one ring, over one mapping so that the thread sanitizer sees every race, doing
// everything the table allows at random. Counted throughout: each rank of each payload is consumed
// exactly once, or the payload was discarded or overwritten, once; what a pin shows is what was written.
//
//   ring_fuzz [seconds] [seed]
#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "common/clock.hpp"

using namespace transport;
using namespace transport::test;

namespace {

constexpr unsigned kRanks = 3;
constexpr std::uint64_t kMaxPayloads = 1 << 20;
constexpr std::uint64_t kCapacity = 1024;

struct Ticket {
  std::uint64_t id = 0, slot = 0, generation = 0;
  unsigned readers = 0;
};

struct Fate {
  std::atomic<std::uint8_t> readers, discarded, overwritten;
  std::array<std::atomic<std::uint8_t>, kRanks> consumed;
};

std::uint64_t mix(std::uint64_t id, std::uint64_t i) {
  return (id + 1) * 0x9E3779B97F4A7C15u ^ i * 0xC2B2AE3D27D4EB4Fu;
}

// A finish through a connection that another thread asks about meanwhile.
struct Question {
  std::uint64_t token = 0;
  ClaimId claim{};
  std::atomic<Outcome> told{Outcome::unknown};
  bool accepted = false;
};

struct World {
  explicit World(std::uint64_t slots, std::uint64_t run_seed)
      : guard{ring_name("fuzz")},
        ring(Ring::create(guard.name, slots, kCapacity, Bytes16{})),
        fates(std::make_unique<Fate[]>(kMaxPayloads)),
        written(slots),
        seed(run_seed) {}

  NameGuard guard;
  std::unique_ptr<Ring> ring;
  std::unique_ptr<Fate[]> fates;
  std::vector<std::uint64_t> written;  // payload id per slot; plain, so that the sanitizer watches the lease
  std::uint64_t seed;
  std::atomic<std::uint64_t> next_id{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::vector<Ticket> tickets;  // under mutex
  std::mutex questions_mutex;
  std::vector<std::shared_ptr<Question>> questions;
  std::atomic<std::uint64_t> consumed{0}, discarded{0}, overwritten{0}, published{0};

  Ticket random_ticket(std::mt19937_64& random) {
    const std::lock_guard hold(mutex);
    if (tickets.empty()) return {};
    const std::size_t window = std::min<std::size_t>(tickets.size(), 2 * written.size());  // half of them stale
    return tickets[tickets.size() - 1 - random() % window];
  }
  void accepted(const Ticket& t, unsigned rank) {
    CHECK(fates[t.id].consumed[rank].fetch_add(1) == 0);
    consumed.fetch_add(1);
  }
};

void fill(World& w, Ring& ring, const Lease& lease, std::uint64_t id, std::uint64_t words) {
  auto* data = reinterpret_cast<std::uint64_t*>(ring.payload(lease.slot));
  data[0] = id;
  for (std::uint64_t i = 1; i < words; ++i) data[i] = mix(id, i);
  w.written[lease.slot] = id;
}

void verify(const World& w, Ring& ring, const Ticket& t) {
  const SlotInfo info = ring.info(t.slot);
  CHECK(info.generation == t.generation && info.state == State::reading);
  CHECK(info.checksum == mix(t.id, 0) && info.readers == t.readers && info.length % 8 == 0);
  const auto* data = reinterpret_cast<const std::uint64_t*>(ring.payload(t.slot));
  CHECK(data[0] == t.id && w.written[t.slot] == t.id);
  for (std::uint64_t i = 1; i < info.length / 8; ++i) CHECK(data[i] == mix(t.id, i));
}

void write(World& w, std::uint64_t salt, bool overwrites) {
  std::mt19937_64 random(w.seed + salt);
  const auto ring = w.ring->attach_again(Role::writer);
  while (!w.stop.load()) {
    const std::uint32_t before = seen(ring->freed());
    auto lease = ring->try_take();
    if (!lease && overwrites && random() % 8 == 0) {
      lease = ring->try_overwrite();
      if (lease) {
        CHECK(w.fates[w.written[lease->slot]].overwritten.fetch_add(1) == 0);
        w.overwritten.fetch_add(1);
      }
    }
    if (!lease) {
      sleep_slice(ring->freed(), before, Deadline(0.01));
      continue;
    }
    if (random() % 16 == 0) {
      CHECK(ring->abort(lease->slot, lease->generation));
      CHECK(!ring->publish(lease->slot, lease->generation, {}));
      continue;
    }
    const std::uint64_t id = w.next_id.fetch_add(1);
    if (id >= kMaxPayloads) return;  // its lease is given up with the attachment
    const std::uint64_t words = 1 + random() % (kCapacity / 8);
    const Ticket ticket{id, lease->slot, lease->generation, static_cast<unsigned>(1 + random() % kRanks)};
    fill(w, *ring, *lease, id, words);
    w.fates[id].readers.store(static_cast<std::uint8_t>(ticket.readers));
    const std::string note = std::to_string(id);
    CHECK(ring->publish(lease->slot, lease->generation, {words * 8, mix(id, 0), ticket.readers, 0, note}));
    CHECK(!ring->abort(lease->slot, lease->generation));
    w.published.fetch_add(1);
    const std::lock_guard hold(w.mutex);
    w.tickets.push_back(ticket);
  }
}

void finish(World& w, Ring& ring, const Ticket& t, unsigned rank, std::uint64_t choice) {
  verify(w, ring, t);
  if (choice % 8 < 4) {
    if (ring.mark_consumed(t.slot, t.generation, rank))
      w.accepted(t, rank);
    else
      CHECK(ring.unpin(t.slot, t.generation));  // refused: consumed elsewhere, and still pinned here
  } else if (choice % 8 < 6) {
    if (ring.consume(t.slot, t.generation, rank)) w.accepted(t, rank);
    verify(w, ring, t);  // consumed or not, what is pinned stays
    CHECK(ring.unpin(t.slot, t.generation));
  } else {
    CHECK(ring.unpin(t.slot, t.generation));
  }
}

void read(World& w, Ring& ring, std::uint64_t salt) {
  std::mt19937_64 random(w.seed + salt);
  std::vector<std::pair<Ticket, unsigned>> held;
  while (!w.stop.load()) {
    if (held.size() > random() % 3) {
      finish(w, ring, held.back().first, held.back().second, random());
      held.pop_back();
      continue;
    }
    const Ticket t = w.random_ticket(random);
    if (t.readers == 0) continue;
    const unsigned rank = static_cast<unsigned>(random() % t.readers);
    switch (random() % 16) {
      case 0:
        if (ring.consume(t.slot, t.generation, rank)) w.accepted(t, rank);
        break;
      case 1:
        if (random() % 4 == 0 && ring.discard(t.slot, t.generation)) {
          CHECK(w.fates[t.id].discarded.fetch_add(1) == 0);
          w.discarded.fetch_add(1);
        }
        break;
      default:
        if (ring.pin(t.slot, t.generation, rank) == PinAnswer::ok) held.emplace_back(t, rank);
    }
  }
  for (const auto& [ticket, rank] : held) finish(w, ring, ticket, rank, random());
}

// Payloads as they come, oldest first, and no tickets.
void claim(World& w, Ring& ring, std::uint64_t salt) {
  std::mt19937_64 random(w.seed + salt);
  std::vector<Claimed> held;
  std::uint64_t token = 0;
  int taker = -1;
  const auto finish_asked_about = [&](const ClaimId& claim) {
    if (taker < 0) taker = ring.open_taker(token = random());
    CHECK(taker >= 0);
    const auto question = std::make_shared<Question>();
    question->token = token;
    question->claim = claim;
    {
      const std::lock_guard hold(w.questions_mutex);
      w.questions.push_back(question);
    }
    question->accepted = ring.finish(claim, false, taker);
    CHECK(ring.outcome(token, claim) == (question->accepted ? Outcome::accepted : Outcome::refused));
    ring.close_taker(std::exchange(taker, -1));  // it is revoked now
    return question->accepted;
  };
  const auto ended = [&](const Claimed& one, std::uint64_t choice) {
    std::uint64_t id = 0;
    const auto* data = reinterpret_cast<const std::uint64_t*>(ring.payload(one.id.slot));
    id = data[0];
    CHECK(one.checksum == mix(id, 0) && w.written[one.id.slot] == id && one.length % 8 == 0);
    for (std::uint64_t i = 1; i < one.length / 8; ++i) CHECK(data[i] == mix(id, i));
    if (choice % 4 == 0) {
      ring.give_back(one.id, choice % 8 * 100'000);
    } else if (choice % 4 == 1 ? finish_asked_about(one.id) : ring.finish(one.id)) {
      CHECK(w.fates[id].consumed[one.id.rank].fetch_add(1) == 0);
      w.consumed.fetch_add(1);
    }
    CHECK(!ring.finish(one.id) && !ring.give_back(one.id) && !ring.holds(one.id));
  };
  while (!w.stop.load()) {
    if (held.size() < 4) {
      Asked asked;
      asked.rank = static_cast<unsigned>(random() % kRanks);
      asked.most = 1 + random() % 3;
      if (random() % 4 == 0) ring.set_lease(1'000'000);
      ring.claim(asked, held);
    }
    if (held.empty() || random() % 2 == 0) continue;
    const std::size_t which = random() % held.size();
    ended(held[which], random());
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
  }
  for (const Claimed& one : held) ended(one, random());
}

// Asks about finishes before, while and after they are made.
void ask(World& w, std::uint64_t salt) {
  std::mt19937_64 random(w.seed + salt);
  const auto ring = w.ring->attach_again(Role::listener);
  while (!w.stop.load()) {
    std::shared_ptr<Question> question;
    {
      const std::lock_guard hold(w.questions_mutex);
      if (w.questions.empty()) continue;
      question = w.questions[w.questions.size() - 1 - random() % std::min<std::size_t>(w.questions.size(), 2)];
    }
    const Outcome told = ring->outcome(question->token, question->claim);
    if (told == Outcome::unknown || told == Outcome::undecided) continue;
    const Outcome before = question->told.exchange(told);
    CHECK(before == Outcome::unknown || before == told);
  }
}

// Attaches, holds something, and detaches: its place and its slots are free for others at once.
void come_and_go(World& w, std::uint64_t salt) {
  std::mt19937_64 random(w.seed + salt);
  while (!w.stop.load()) {
    const auto ring = w.ring->attach_again(Role::listener);
    for (int i = 0; i < 4; ++i) {
      const Ticket t = w.random_ticket(random);
      if (t.readers > 0 && ring->pin(t.slot, t.generation, 0) == PinAnswer::ok) verify(w, *ring, t);
    }
    std::vector<Claimed> claimed;
    if (random() % 2 == 0) ring->claim({}, claimed);
    if (random() % 2 == 0) ring->try_take();
  }
}

void look(World& w, std::uint64_t salt) {
  std::mt19937_64 random(w.seed + salt);
  const auto ring = w.ring->attach_again(Role::observer);
  while (!w.stop.load()) {
    const Ticket t = w.random_ticket(random);
    if (t.readers == 0) continue;
    const SlotInfo info = ring->info(t.slot);
    if (info.generation == t.generation && (info.state == State::ready || info.state == State::reading))
      CHECK(info.checksum == mix(t.id, 0) && info.readers == t.readers);
    if (const auto note = ring->note(t.slot, t.generation)) CHECK(*note == std::to_string(t.id));
    CHECK(ring->reclaim() == 0);  // all owners live
  }
}

void run(std::uint64_t slots, double seconds, std::uint64_t seed) {
  World w(slots, seed);
  const auto shared = w.ring->attach_again(Role::listener);  // one owner, two threads
  const auto own = w.ring->attach_again(Role::reader);
  std::vector<std::thread> threads;
  threads.emplace_back([&] { write(w, 1, false); });
  threads.emplace_back([&] { write(w, 2, true); });
  threads.emplace_back([&] { read(w, *shared, 3); });
  threads.emplace_back([&] { read(w, *shared, 4); });
  threads.emplace_back([&] { read(w, *own, 5); });
  threads.emplace_back([&] { claim(w, *shared, 8); });
  threads.emplace_back([&] { claim(w, *own, 9); });
  threads.emplace_back([&] { come_and_go(w, 6); });
  threads.emplace_back([&] { look(w, 7); });
  threads.emplace_back([&] { ask(w, 10); });
  const auto enough = [&w] { return w.published > 100 && w.consumed > 100; };
  const Deadline end(seconds), patience(60);  // there must be something to account for, however busy the machine
  while (end.left_ns() > 0 || (!enough() && patience.left_ns() > 0)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  w.stop.store(true);
  for (std::thread& thread : threads) thread.join();

  std::array<std::uint64_t, 4> told{};
  for (const auto& question : w.questions) {
    const Outcome answer = question->told.load();
    ++told[static_cast<std::size_t>(answer)];
    if (answer != Outcome::unknown) CHECK((answer == Outcome::accepted) == question->accepted);
  }
  std::printf("%zu finishes asked about: %" PRIu64 " accepted, %" PRIu64 " refused\n", w.questions.size(), told[2], told[3]);

  for (const Ticket& t : w.tickets)  // what is left is consumed now
    for (unsigned rank = 0; rank < t.readers; ++rank)
      if (w.ring->pin(t.slot, t.generation, rank) == PinAnswer::ok) {
        verify(w, *w.ring, t);
        CHECK(w.ring->mark_consumed(t.slot, t.generation, rank));
        w.accepted(t, rank);
      }

  CHECK(w.ring->state_counts()[0] == slots);
  CHECK(w.tickets.size() == w.published.load());
  for (const Ticket& t : w.tickets) {
    const Fate& fate = w.fates[t.id];
    unsigned consumed = 0;
    for (unsigned rank = 0; rank < kRanks; ++rank) consumed += fate.consumed[rank].load();
    CHECK(fate.discarded + fate.overwritten <= 1);
    if (fate.overwritten || fate.discarded)
      CHECK(consumed < t.readers);
    else
      CHECK(consumed == t.readers);
  }
  const auto counters = w.ring->counters();
  const auto sum = [&counters](Counter which) { return counters[static_cast<unsigned>(which)]; };
  CHECK(sum(Counter::publishes) == w.published);
  CHECK(sum(Counter::takes) + sum(Counter::overwrites) == sum(Counter::publishes) + sum(Counter::aborts));
  CHECK(sum(Counter::pins) == sum(Counter::unpins));
  CHECK(sum(Counter::consumes) == w.consumed);
  CHECK(sum(Counter::discards) == w.discarded);
  CHECK(sum(Counter::overwrites) == w.overwritten);
  std::printf("%5" PRIu64 " slots: %" PRIu64 " published, %" PRIu64 " consumed, %" PRIu64 " discarded, %" PRIu64
              " overwritten\n",
              slots, w.published.load(), w.consumed.load(), w.discarded.load(), w.overwritten.load());
  CHECK(enough());
}

// One slot, published again and again; an observer looks at it without a pin, and never sees a mixture.
void run_looks(double seconds) {
  const NameGuard guard{ring_name("looks")};
  const auto ring = Ring::create(guard.name, 1, 8, Bytes16{});
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> infos{0}, notes{0};
  const auto note_of = [](std::uint64_t generation) {
    return std::string(kNoteCapacity, static_cast<char>(mix(generation, 0)));
  };
  std::thread observer([&] {
    const auto eye = ring->attach_again(Role::observer);
    while (!stop.load()) {
      const SlotInfo info = eye->info(0);
      if (info.readers == 0) continue;  // of a generation that is not published
      const std::uint64_t g = info.generation;
      CHECK(info.checksum == mix(g, 1) && info.deadline_ns == mix(g, 2) && info.length == g % 9 &&
            info.readers == 1 + g % 16);
      ++infos;
      const auto note = eye->note(0, g);
      if (!note) continue;
      CHECK(*note == note_of(g));
      ++notes;
    }
  });
  const Deadline end(seconds), patience(60);  // the observer must have looked at something, however busy the machine
  while (end.left_ns() > 0 || ((infos == 0 || notes == 0) && patience.left_ns() > 0)) {
    const Lease lease = *ring->try_take();
    const std::uint64_t g = lease.generation;
    const auto readers = static_cast<unsigned>(1 + g % 16);
    CHECK(ring->publish(0, g, {g % 9, mix(g, 1), readers, mix(g, 2), note_of(g)}));
    for (unsigned rank = 0; rank < readers; ++rank) CHECK(ring->consume(0, g, rank));
  }
  stop.store(true);
  observer.join();
  std::printf("%" PRIu64 " looks, %" PRIu64 " notes, all whole\n", infos.load(), notes.load());
  CHECK(infos > 0 && notes > 0);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 4.0;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1;
  std::printf("ring_fuzz %g %" PRIu64 "\n", seconds, seed);
  run(5, seconds * 0.4, seed);
  run(200, seconds * 0.4, seed + 100);
  run_looks(seconds * 0.2);
  std::printf("ok every rank of every payload is accounted for\n");
}
