// The ring as the queue: what claimers of one process see. Deaths are in crash_test.cpp, threads in ring_fuzz.cpp.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "common/clock.hpp"

using namespace transport;
using namespace transport::test;

namespace {

struct Fixture {
  explicit Fixture(const char* what, std::uint64_t slots = 8, std::uint64_t capacity = 100)
      : guard{ring_name(what)}, ring(Ring::create(guard.name, slots, capacity, Bytes16{})) {}
  NameGuard guard;
  std::unique_ptr<Ring> ring;

  Lease publish(unsigned readers = 1, std::int64_t version = kNoVersion, std::uint64_t length = 8,
                std::uint64_t deadline_ns = 0) {
    const auto lease = ring->try_take();
    CHECK(lease);
    CHECK(ring->publish(lease->slot, lease->generation,
                        {.length = length,
                         .checksum = 9,
                         .readers = readers,
                         .deadline_ns = deadline_ns,
                         .note = "n",
                         .policy_version = version}));
    return *lease;
  }
};

std::vector<Claimed> claim(Ring& ring, std::size_t most, Asked asked = {}) {
  std::vector<Claimed> claimed;
  asked.most = most;
  CHECK(ring.claim(asked, claimed) == claimed.size());
  return claimed;
}

bool same(const Claimed& claimed, const Lease& lease) {
  return claimed.id.slot == lease.slot && claimed.id.generation == lease.generation;
}

std::uint64_t tallied(const Ring& ring, unsigned rank, Tally which) {
  return ring.depth(rank).tallies[static_cast<unsigned>(which)];
}

}  // namespace

TEST(a_claim_advances_its_event_once_for_who_expects_it) {
  Fixture f("expected");
  for (int i = 0; i < 4; ++i) f.publish();
  EventWord& event = f.ring->claimed();
  CHECK(claim(*f.ring, 1).size() == 1 && seen(event) == 0);
  const std::uint32_t before = expect(event);
  CHECK(claim(*f.ring, 2).size() == 2 && seen(event) == before + 1 && event.waiting.load() == 0);
  CHECK(sleep_slice(event, before, Deadline(0)));
}

TEST(a_claim_wakes_who_sleeps_until_one) {
  Fixture f("sleeper");
  const Lease lease = f.publish();
  const auto taker = f.ring->attach_again(Role::reader);
  std::atomic<bool> begun{false};
  std::thread sleeper([&] {
    EventWord& event = f.ring->claimed();
    for (;;) {
      const std::uint32_t before = expect(event);
      begun.store(true);
      if (f.ring->claim_word(lease.slot, 0).held()) return;
      while (!sleep_slice(event, before, Deadline(60))) {}
    }
  });
  while (!begun.load()) std::this_thread::yield();
  CHECK(claim(*taker, 1).size() == 1);
  sleeper.join();
}

TEST(claims_come_in_the_order_of_publication_and_each_to_one) {
  Fixture f("order");
  const auto a = f.ring->attach_again(Role::reader), b = f.ring->attach_again(Role::reader);
  std::vector<Lease> leases;
  for (int i = 0; i < 5; ++i) leases.push_back(f.publish(1, i));
  const auto first = claim(*a, 2), second = claim(*b, 9);
  CHECK(first.size() == 2 && second.size() == 3);
  for (std::size_t i = 0; i < 5; ++i) {
    const Claimed& one = i < 2 ? first[i] : second[i - 2];
    CHECK(same(one, leases[i]) && one.id.attempts == 1 && one.policy_version == static_cast<std::int64_t>(i));
    CHECK(one.length == 8 && one.checksum == 9 && one.readers == 1);
  }
  CHECK(claim(*a, 1).empty() && claim(*b, 1).empty());
  CHECK(f.ring->depth(0).claimed == 5);
  for (const Claimed& one : first) CHECK(a->finish(one.id) && !a->finish(one.id));
  for (const Claimed& one : second) CHECK(!a->finish(one.id) && b->finish(one.id));
  CHECK(f.ring->state_counts()[0] == 8);
  CHECK(tallied(*f.ring, 0, Tally::done) == 5);
}

TEST(what_is_given_back_is_the_oldest_again_at_once) {
  Fixture f("back");
  const auto a = f.ring->attach_again(Role::reader), b = f.ring->attach_again(Role::reader);
  const Lease oldest = f.publish(), middle = f.publish();
  f.publish();
  const Lease youngest = f.publish();
  const auto taken = claim(*a, 2);
  CHECK(claim(*b, 1).size() == 1);  // b has found the youngest by now
  CHECK(a->give_back(taken[1].id) && a->give_back(taken[0].id));
  CHECK(!a->give_back(taken[0].id) && !a->finish(taken[0].id) && !a->holds(taken[0].id));
  const auto again = claim(*b, 9);
  CHECK(again.size() == 3 && same(again[0], oldest) && same(again[1], middle) && same(again[2], youngest));
  CHECK(again[0].id.attempts == 2);
  CHECK(!a->finish(taken[0].id) && b->finish(again[0].id));
  CHECK(tallied(*f.ring, 0, Tally::retried) == 2);
}

TEST(a_claim_of_this_attachment_is_not_another_of_it) {
  Fixture f("fence");
  f.publish();
  const auto first = claim(*f.ring, 1);
  CHECK(claim(*f.ring, 1).empty());
  CHECK(f.ring->give_back(first[0].id));
  const auto second = claim(*f.ring, 1);
  CHECK(second.size() == 1 && f.ring->holds(second[0].id));
  CHECK(!f.ring->finish(first[0].id) && !f.ring->give_back(first[0].id) && !f.ring->holds(first[0].id));
  CHECK(f.ring->finish(second[0].id));
}

TEST(each_rank_is_claimed_by_one_beside_the_others) {
  Fixture f("ranks");
  const auto a = f.ring->attach_again(Role::reader), b = f.ring->attach_again(Role::reader);
  f.publish(2);
  const auto zero = claim(*a, 1, {.rank = 0});
  CHECK(zero.size() == 1 && claim(*b, 1, {.rank = 0}).empty() && claim(*b, 1, {.rank = 2}).empty());
  const auto one = claim(*a, 1, {.rank = 1});
  CHECK(one.size() == 1 && a->own_pins(one[0].id.slot) == 2);
  CHECK(a->give_back(one[0].id));
  const auto elsewhere = claim(*b, 1, {.rank = 1});
  CHECK(elsewhere.size() == 1 && elsewhere[0].id.attempts == 2);
  CHECK(a->finish(zero[0].id));
  CHECK(f.ring->info(zero[0].id.slot).state == State::reading);
  CHECK(b->finish(elsewhere[0].id));
  CHECK(f.ring->info(zero[0].id.slot).state == State::free);
}

TEST(others_who_look_do_not_keep_a_payload_from_being_claimed) {
  Fixture f("onlooker");
  const auto onlooker = f.ring->attach_again(Role::reader), claimer = f.ring->attach_again(Role::reader);
  const Lease lease = f.publish();
  CHECK(onlooker->pin(lease.slot, lease.generation, 0) == PinAnswer::ok);
  const auto claimed = claim(*claimer, 1);
  CHECK(claimed.size() == 1 && claimer->finish(claimed[0].id));
  CHECK(f.ring->info(lease.slot).state == State::reading);
  CHECK(onlooker->unpin(lease.slot, lease.generation));
  CHECK(f.ring->info(lease.slot).state == State::free);
}

TEST(consumed_by_ticket_or_discarded_a_claim_is_refused_and_leaves_no_pin) {
  Fixture f("elsewhere");
  const Lease consumed = f.publish(), discarded = f.publish();
  const auto claimed = claim(*f.ring, 2);
  CHECK(f.ring->consume(consumed.slot, consumed.generation, 0));
  CHECK(f.ring->discard(discarded.slot, discarded.generation));
  CHECK(f.ring->state_counts()[3] == 2);
  CHECK(!f.ring->holds(claimed[0].id));
  CHECK(!f.ring->finish(claimed[0].id) && !f.ring->give_back(claimed[1].id));
  CHECK(f.ring->state_counts()[0] == 8);
}

TEST(a_finished_payload_stays_in_memory_while_its_pin_is_kept) {
  Fixture f("kept");
  const Lease lease = f.publish();
  const auto claimed = claim(*f.ring, 1);
  CHECK(f.ring->finish(claimed[0].id, true));
  CHECK(f.ring->info(lease.slot).state == State::reading && !f.ring->holds(claimed[0].id));
  CHECK(!f.ring->finish(claimed[0].id));
  CHECK(f.ring->unpin(lease.slot, lease.generation));
  CHECK(f.ring->info(lease.slot).state == State::free);
}

TEST(the_pin_of_a_claim_goes_with_the_claim_and_with_nothing_else) {
  Fixture f("plain");
  f.publish();
  const auto claimed = claim(*f.ring, 1);
  const ClaimId& id = claimed[0].id;
  CHECK(!f.ring->unpin(id.slot, id.generation) && !f.ring->mark_consumed(id.slot, id.generation, 0));
  CHECK(f.ring->holds(id) && f.ring->own_pins(id.slot) == 1 && f.ring->finish(id));
}

TEST(a_reader_by_ticket_and_a_claimer_of_one_attachment_have_a_pin_each) {
  Fixture f("beside");
  const Lease lease = f.publish();
  const auto claimed = claim(*f.ring, 1);
  CHECK(f.ring->pin(lease.slot, lease.generation, 0) == PinAnswer::ok);
  CHECK(f.ring->mark_consumed(lease.slot, lease.generation, 0));
  CHECK(f.ring->own_pins(lease.slot) == 1);
  CHECK(!f.ring->finish(claimed[0].id));
  CHECK(f.ring->state_counts()[0] == 8);
  const Lease next = f.publish();
  const auto again = claim(*f.ring, 1);
  CHECK(f.ring->pin(next.slot, next.generation, 0) == PinAnswer::ok && f.ring->unpin(next.slot, next.generation));
  CHECK(f.ring->holds(again[0].id) && f.ring->finish(again[0].id));
}

TEST(closing_gives_claims_back) {
  Fixture f("close");
  auto a = f.ring->attach_again(Role::reader);
  f.publish(2);
  CHECK(claim(*a, 1, {.rank = 0}).size() == 1 && claim(*a, 1, {.rank = 1}).size() == 1);
  a->close();
  for (const unsigned rank : {0u, 1u}) {
    const auto again = claim(*f.ring, 1, {.rank = rank});
    CHECK(again.size() == 1 && again[0].id.attempts == 2 && f.ring->finish(again[0].id));
    CHECK(tallied(*f.ring, rank, Tally::expired) == 1);
  }
}

TEST(a_delayed_payload_comes_back_in_its_place_when_it_is_due) {
  Fixture f("delay");
  const Lease first = f.publish();
  const auto claimed = claim(*f.ring, 1);
  constexpr std::uint64_t kDelay_ns = 20'000'000;
  CHECK(f.ring->give_back(claimed[0].id, kDelay_ns));
  const std::uint64_t due_ns = monotonic_ns() + kDelay_ns;
  const Lease second = f.publish();
  const auto now = claim(*f.ring, 9);
  CHECK(f.ring->next_due_ns(0) <= due_ns || !now.empty());
  CHECK((now.size() == 1 && same(now[0], second)) || monotonic_ns() >= due_ns);
  std::vector<Claimed> later;
  const Deadline patience(20);
  while (later.empty() && patience.left_ns() > 0) later = claim(*f.ring, 9);
  CHECK(later.size() == 1 && same(later[0], first) && later[0].id.attempts == 2);
}

TEST(claims_stop_at_the_bytes_asked_for_but_give_one_at_least) {
  Fixture f("bytes");
  for (const std::uint64_t length : {60u, 30u, 30u, 100u}) f.publish(1, kNoVersion, length);
  CHECK(claim(*f.ring, 9, {.most_bytes = 10}).size() == 1);
  CHECK(claim(*f.ring, 9, {.most_bytes = 60}).size() == 2);
  CHECK(claim(*f.ring, 9, {.most_bytes = 0}).size() == 1);
}

TEST(what_is_too_old_too_often_claimed_or_late_ends_and_is_logged) {
  Fixture f("ends");
  const Lease old = f.publish(2, 3), unversioned = f.publish(2);
  auto claimed = claim(*f.ring, 9, {.oldest_version = 4, .consumer = "me"});
  CHECK(claimed.size() == 1 && same(claimed[0], unversioned));
  CHECK(f.ring->info(old.slot).done == (slot_word::born_done(2) | 1));
  CHECK(tallied(*f.ring, 0, Tally::discarded) == 1 && tallied(*f.ring, 0, Tally::aged) == 1);
  CHECK(tallied(*f.ring, 1, Tally::aged) == 0);
  CHECK(f.ring->give_back(claimed[0].id));
  CHECK(claim(*f.ring, 9, {.most_attempts = 1}).empty());
  CHECK(tallied(*f.ring, 0, Tally::dead) == 1);
  const Lease late = f.publish(1, kNoVersion, 8, 1);
  CHECK(claim(*f.ring, 9).empty());
  CHECK(f.ring->info(late.slot).state == State::free);
  const auto rejected = f.publish();
  claimed = claim(*f.ring, 1);
  CHECK(f.ring->end(claimed[0].id, Ended::aged, std::string(300, 'x'), "you"));
  CHECK(!f.ring->end(claimed[0].id, Ended::aged, "again"));
  CHECK(f.ring->info(rejected.slot).state == State::free);
  const auto failures = f.ring->failures();
  CHECK(failures.size() == 4);
  CHECK(failures[0].reason == std::string(kReasonBytes, 'x') && failures[0].consumer == "you");
  CHECK(failures[1].reason == "its deadline has passed" && failures[1].generation == late.generation);
  CHECK(failures[2].how == Ended::dead && failures[2].reason == "claimed 1 times in vain" && failures[2].attempts == 1);
  CHECK(failures[3].how == Ended::aged && failures[3].reason == "policy version 3 is older than 4");
  CHECK(failures[3].slot == old.slot && failures[3].rank == 0 && failures[3].attempts == 0 &&
        failures[3].consumer == "me");
  CHECK(claim(*f.ring, 9, {.rank = 1}).size() == 2);  // the other rank's are untouched
}

TEST(the_log_keeps_the_last_failures_and_shows_no_torn_one) {
  Fixture f("log");
  for (unsigned i = 0; i < kLeastFailures + 10; ++i) {
    f.publish();
    CHECK(f.ring->end(claim(*f.ring, 1)[0].id, Ended::dead, std::to_string(i)));
  }
  CHECK(f.ring->failures().size() == kLeastFailures && f.ring->failures()[0].reason == std::to_string(kLeastFailures + 9));
  Geometry geometry{};
  CHECK(Geometry::compute(8, 100, f.ring->identity().page_bytes, geometry));
  f.ring->mapping()->control()[geometry.failures_offset + 40] ^= std::byte{1};
  CHECK(f.ring->failures().size() == kLeastFailures - 1);
}

TEST(lost_ready_hints_are_found_and_those_that_promise_too_much_do_no_harm) {
  for (const std::uint64_t slots : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{65}, std::uint64_t{5000}}) {
    Fixture f("hints", slots, 8);
    Geometry geometry{};
    CHECK(Geometry::compute(slots, 8, f.ring->identity().page_bytes, geometry));
    std::byte* const hints = f.ring->mapping()->control() + geometry.ready_offset;
    std::memset(hints, 0xFF, ReadyHints::bytes_for(slots));
    CHECK(claim(*f.ring, 1).empty());
    for (std::uint64_t i = 0; i < slots; ++i) f.publish();
    std::memset(hints, 0, ReadyHints::bytes_for(slots));
    const auto fresh = f.ring->attach_again(Role::reader);
    const auto claimed = claim(*fresh, slots + 1);
    CHECK(claimed.size() == slots);
    for (std::size_t i = 1; i < claimed.size(); ++i) CHECK(claimed[i - 1].sequence < claimed[i].sequence);
  }
}

TEST(of_slots_that_are_used_again_the_oldest_payload_comes_first) {
  Fixture f("again", 3);
  const Lease first = f.publish(), second = f.publish(), third = f.publish();
  CHECK(f.ring->finish(claim(*f.ring, 1)[0].id));
  const Lease newest = f.publish();
  CHECK(newest.slot == first.slot);
  const auto fresh = f.ring->attach_again(Role::reader);  // which has found nothing before
  const auto claimed = claim(*fresh, 3);
  CHECK(claimed.size() == 3 && same(claimed[0], second) && same(claimed[1], third) && same(claimed[2], newest));
}

TEST(the_numbers_of_claims_begin_again_behind_the_last_one_and_none_is_zero) {
  CHECK(ClaimWord{}.claimed(3).attempts() == 1);
  CHECK(ClaimWord::of(ClaimWord::kMostAttempts - 1, 0, 0).claimed(3).attempts() == ClaimWord::kMostAttempts);
  CHECK(ClaimWord::of(ClaimWord::kMostAttempts, 7, 0).claimed(3) == ClaimWord::of(1, 7, 4));
}

TEST(a_holder_is_gone_when_its_lease_is_over_or_it_is_dead_and_not_before) {
  CHECK(!holder_gone(1000, 500, true, 1499) && holder_gone(1000, 500, true, 1500));
  CHECK(!holder_gone(1000, 500, true, 999));  // heard after the looker has read the clock
  CHECK(!holder_gone(1000, 0, true, 1'000'000'000) && holder_gone(1000, 0, false, 1000));
}

TEST(claims_of_a_silent_holder_are_anothers_and_it_is_refused_and_leaves_no_pin) {
  Fixture f("lapse", 4);
  const auto slow = f.ring->attach_again(Role::reader), other = f.ring->attach_again(Role::reader);
  const Lease lease = f.publish();
  f.publish();
  slow->set_lease(1);  // silent the next nanosecond
  const auto stale = claim(*slow, 2);
  std::vector<Claimed> again;
  const Deadline patience(20);
  Asked asked;
  asked.most = 9;
  while (again.size() < 2 && patience.left_ns() > 0) other->claim(asked, again);
  CHECK(again.size() == 2 && again[0].id.attempts == 2);
  CHECK(f.ring->info(lease.slot).pins == ((1u << slow->owner()) | (1u << other->owner())));
  CHECK(!slow->holds(stale[0].id));
  CHECK(claim(*slow, 9).empty());
  CHECK(!slow->finish(stale[0].id) && !slow->give_back(stale[1].id) && !slow->finish(stale[1].id));
  CHECK(slow->own_pins(lease.slot) == 0);
  CHECK(other->finish(again[0].id) && other->finish(again[1].id));
  CHECK(f.ring->state_counts()[0] == 4);
  CHECK(tallied(*f.ring, 0, Tally::expired) == 2 && tallied(*f.ring, 0, Tally::done) == 2);
}

TEST(a_holder_that_is_heard_keeps_its_claims_and_one_without_a_lease_need_not_be) {
  Fixture f("renewed");
  const auto holder = f.ring->attach_again(Role::reader), mute = f.ring->attach_again(Role::reader),
             other = f.ring->attach_again(Role::reader);
  holder->set_lease(5'000'000'000);
  other->set_lease(1);  // the looker's own lease is nobody else's
  f.publish(), f.publish();
  const auto held = claim(*holder, 1), kept = claim(*mute, 1);
  const Deadline enough(0.25);  // two looks at every slot
  while (enough.left_ns() > 0) {
    holder->heard();
    CHECK(claim(*other, 1).empty());
  }
  CHECK(holder->finish(held[0].id) && mute->finish(kept[0].id));
}

TEST(what_goes_back_is_told_to_those_that_wait) {
  Fixture f("told");
  f.publish();
  const auto claimed = claim(*f.ring, 1);
  const std::uint32_t before = seen(f.ring->published());
  CHECK(f.ring->give_back(claimed[0].id) && seen(f.ring->published()) != before);
}

TEST(what_goes_back_unread_does_not_count_in_vain) {
  Fixture f("unread");
  f.publish();
  const auto once = [&] { return claim(*f.ring, 1, {.most_attempts = 2}); };
  for (unsigned attempt = 1; attempt <= 5; ++attempt) {
    const auto claimed = once();
    CHECK(claimed.size() == 1 && claimed[0].id.attempts == attempt && claimed[0].in_vain == 0);
    CHECK(f.ring->give_back(claimed[0].id, 0, Return::unread));
  }
  for (unsigned before = 0; before < 2; ++before) {
    const auto claimed = once();
    CHECK(claimed.size() == 1 && claimed[0].in_vain == before && f.ring->give_back(claimed[0].id));
  }
  CHECK(once().empty() && tallied(*f.ring, 0, Tally::dead) == 1);
  CHECK(f.ring->failures()[0].reason == "claimed 2 times in vain");
}

TEST(dead_holders_lose_their_claims_while_there_is_always_something_newer) {
  Fixture f("newer");
  const Lease oldest = f.publish();
  const pid_t child = fork();
  if (child == 0) {  // ends with its claim in hand
    const auto reader = Ring::attach(f.guard.name, Role::reader, false);
    std::_Exit(claim(*reader, 1).size() == 1 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  bool found = false;
  for (const Deadline patience(20); !found && patience.left_ns() > 0;) {
    f.publish();
    for (const Claimed& one : claim(*f.ring, 1)) {
      found = found || same(one, oldest);
      CHECK(f.ring->finish(one.id));
    }
  }
  CHECK(found);
}

TEST(the_longest_lease_that_was_asked_for_counts) {
  Fixture f("leases");
  const auto holder = f.ring->attach_again(Role::reader);
  f.publish();
  holder->set_lease(5'000'000'000);
  holder->set_lease(1);
  const auto held = claim(*holder, 1);
  CHECK(claim(*f.ring, 1).empty() && holder->holds(held[0].id));
  holder->set_lease(0);
  holder->set_lease(1);
  CHECK(claim(*f.ring, 1).empty() && holder->finish(held[0].id));
}

TEST(claims_of_another_generation_or_nonsense_are_refused) {
  Fixture f("nonsense");
  f.publish();
  const auto first = claim(*f.ring, 1);
  CHECK(f.ring->finish(first[0].id));
  const Lease next = f.publish();
  CHECK(next.slot == first[0].id.slot);
  const auto second = claim(*f.ring, 1);
  CHECK(second[0].id.attempts == 1);  // anew with the generation
  CHECK(!f.ring->finish(first[0].id) && !f.ring->give_back(first[0].id));
  CHECK(!f.ring->finish({next.slot, next.generation, 1, 1}) && !f.ring->finish({next.slot, next.generation, 0, 2}));
  CHECK(refused(Fault::argument, [&] { f.ring->finish({99, 1, 0, 1}); }));
  CHECK(refused(Fault::argument, [&] { f.ring->give_back({0, 1, 16, 1}); }));
  CHECK(refused(Fault::argument, [&] { claim(*f.ring, 1, {.rank = 16}); }));
  CHECK(refused(Fault::argument, [&] { claim(*f.ring, 1, {.most_attempts = 5000}); }));
  CHECK(refused(Fault::argument, [&] { claim(*f.ring->attach_again(Role::observer), 1); }));
  CHECK(f.ring->finish(second[0].id));
}

int main(int argc, char** argv) { return run_all(argc, argv); }
