// What became of finishes: the owner is killed or stopped between any two steps, and the slot is used anew meanwhile.
#include <atomic>
#include <string_view>
#include <thread>
#include <vector>

#include "crash.hpp"

using namespace transport;
using namespace transport::test;

namespace {

constexpr std::uint64_t kToken = 0x1234567890ABCDEF;

struct Shared {
  explicit Shared(const char* what)
      : guard{ring_name(what)}, ring(Ring::create(guard.name, kSlots, kCapacity, Bytes16{})) {}
  NameGuard guard;
  std::unique_ptr<Ring> ring;
};

ClaimId claimed(Ring& ring) {
  std::vector<Claimed> claims;
  CHECK(ring.claim({}, claims) == 1);
  return claims[0].id;
}

ClaimId first_claim_of(const Lease& lease) { return {lease.slot, lease.generation, 0, 1}; }

// As OUTCOME asks about what is no FINISH.
ClaimId about(ClaimId claim, Asking asking) {
  if (asking == Asking::end) claim.attempts |= kEndAsked;
  return claim;
}

void use_anew(Ring& ring, const Lease& lease) {
  std::vector<Lease> taken;
  while (const auto next = ring.try_take()) taken.push_back(*next);
  for (const Lease& each : taken)
    CHECK(publish_text(ring, each, 1, 1) && ring.consume(each.slot, each.generation, 0));
  CHECK(ring.info(lease.slot).generation != lease.generation);
}

}  // namespace

TEST(a_finish_is_told_by_its_token_and_claim_also_when_its_slot_is_used_anew) {
  Shared s("told");
  const auto taker = s.ring->attach_again(Role::listener);
  const int entry = taker->open_taker(kToken);
  CHECK(entry >= 0);
  const Lease lease = published(*s.ring, 1);
  const ClaimId claim = claimed(*taker);
  CHECK(taker->finish(claim, false, entry) && !taker->finish(claim, false, entry));
  use_anew(*s.ring, lease);
  CHECK(s.ring->outcome(kToken, claim) == Outcome::accepted);
  CHECK(s.ring->outcome(kToken, {claim.slot, claim.generation, 0, 2}) == Outcome::refused);
  CHECK(s.ring->outcome(kToken, {claim.slot, claim.generation + 1, 0, 1}) == Outcome::refused);
  CHECK(s.ring->outcome(kToken + 1, claim) == Outcome::unknown);
  CHECK(s.ring->outcome(kToken, {kSlots, 1, 0, 1}) == Outcome::unknown);
  CHECK(s.ring->outcome(kToken, {0, 1, 255, 1}) == Outcome::unknown);
  taker->close_taker(entry);
  CHECK(s.ring->outcome(kToken, claim) == Outcome::accepted);
}

TEST(what_was_asked_about_is_not_accepted_afterwards_and_can_be_claimed_at_once) {
  Shared s("revoked");
  const auto taker = s.ring->attach_again(Role::listener);
  const int entry = taker->open_taker(kToken);
  published(*s.ring, 1);
  const ClaimId claim = claimed(*taker);
  CHECK(s.ring->outcome(kToken, claim) == Outcome::refused);
  CHECK(!taker->finish(claim, false, entry));
  CHECK(s.ring->outcome(kToken, claim) == Outcome::refused);
  const ClaimId again = claimed(*s.ring);
  CHECK(again.attempts == 2 && s.ring->finish(again));
  CHECK(s.ring->outcome(kToken, claim) == Outcome::refused);
}

TEST(what_was_refused_for_another_reason_is_told_so) {
  Shared s("refused");
  const auto taker = s.ring->attach_again(Role::listener);
  const int entry = taker->open_taker(kToken);
  const Lease lease = published(*s.ring, 1);
  const ClaimId claim = claimed(*taker);
  CHECK(s.ring->consume(lease.slot, lease.generation, 0));  // by ticket, beside the claim
  CHECK(!taker->finish(claim, false, entry));
  CHECK(s.ring->outcome(kToken, claim) == Outcome::refused);
  CHECK(s.ring->state_counts()[0] == kSlots);
}

TEST(a_listener_killed_at_any_point_of_a_finish_leaves_one_answer_and_it_is_true) {
  unsigned undecided = 0, accepted = 0, refused = 0;
  for (const bool keep : {false, true})
    for (const std::string_view point : fault::kPoints) {
      Shared s("killed");
      const Lease lease = published(*s.ring, 1);
      const ClaimId claim = first_claim_of(lease);
      const bool was_killed = killed([&] {
        const auto taker = Ring::attach(s.guard.name, Role::listener, false);
        const int entry = taker->open_taker(kToken);
        claimed(*taker);
        fault::set(index_of(point), SIGKILL, 0);
        taker->finish(claim, keep, entry);
        fault::set(index_of(point), 0, 0);
        raise(SIGKILL);
      });
      CHECK(was_killed);
      const Outcome before = s.ring->outcome(kToken, claim);
      undecided += before == Outcome::undecided;
      const auto other = Ring::attach(s.guard.name, Role::reader, false);  // takes the place, and so reclaims it
      const Outcome after = other->outcome(kToken, claim);
      CHECK(after == Outcome::accepted || after == Outcome::refused);
      CHECK(before == Outcome::undecided || before == after);
      const bool consumed = s.ring->info(lease.slot).state == State::free;
      CHECK(consumed == (after == Outcome::accepted));
      (consumed ? accepted : refused) += 1;
      if (!consumed) CHECK(s.ring->consume(lease.slot, lease.generation, 0));
      use_anew(*s.ring, lease);
      CHECK(s.ring->outcome(kToken, claim) == after);
      check_survivors(*s.ring, {0, static_cast<unsigned>(other->owner())});
    }
  CHECK(undecided >= 3 && accepted > 0 && refused > 0);
}

TEST(a_listener_killed_at_any_point_of_an_end_leaves_one_answer_and_it_is_true) {
  unsigned undecided = 0, accepted = 0, refused = 0;
  for (const std::string_view point : fault::kPoints) {
    Shared s("ended");
    const Lease lease = published(*s.ring, 1);
    const ClaimId claim = first_claim_of(lease), asked = about(claim, Asking::end);
    CHECK(killed([&] {
      const auto taker = Ring::attach(s.guard.name, Role::listener, false);
      const int entry = taker->open_taker(kToken);
      claimed(*taker);
      fault::set(index_of(point), SIGKILL, 0);
      taker->end(claim, Ended::dead, "no use", "trainer", entry);
      fault::set(index_of(point), 0, 0);
      raise(SIGKILL);
    }));
    const Outcome before = s.ring->outcome(kToken, asked);
    undecided += before == Outcome::undecided;
    const auto other = Ring::attach(s.guard.name, Role::reader, false);
    const Outcome after = other->outcome(kToken, asked);
    CHECK(before == Outcome::undecided || before == after);
    const bool ended = s.ring->info(lease.slot).state == State::free;
    CHECK(after == (ended ? Outcome::accepted : Outcome::refused));
    CHECK(s.ring->outcome(kToken, claim) == Outcome::refused);  // it was not finished
    (ended ? accepted : refused) += 1;
    if (!ended) CHECK(s.ring->consume(lease.slot, lease.generation, 0));
    use_anew(*s.ring, lease);
    CHECK(s.ring->outcome(kToken, asked) == after);
    check_survivors(*s.ring, {0, static_cast<unsigned>(other->owner())});
  }
  CHECK(undecided >= 2 && accepted > 0 && refused > 0);
}

TEST(an_end_that_was_asked_about_is_refused_afterwards_and_the_payload_can_be_claimed) {
  Shared s("late-end");
  const auto taker = s.ring->attach_again(Role::listener);
  const int entry = taker->open_taker(kToken);
  published(*s.ring, 1);
  const ClaimId claim = claimed(*taker);
  CHECK(s.ring->outcome(kToken, about(claim, Asking::end)) == Outcome::refused);
  CHECK(!taker->end(claim, Ended::dead, "too late", {}, entry));
  CHECK(s.ring->failures().empty());
  const ClaimId again = claimed(*taker);
  CHECK(again.attempts == 2 && taker->end(again, Ended::dead, "without a note", {}));
  CHECK(s.ring->failures().size() == 1);
}

TEST(a_reclaimer_killed_in_between_leaves_the_answer_to_the_next_one) {
  for (const std::string_view point : {"outcome.decided", "reclaim.proven", "reclaim.cleared", "reclaim.disclaimed"})
    for (const std::string_view died : {"outcome.noted", "mark_consumed.marked"}) {
      Shared s("reclaimer");
      const Lease lease = published(*s.ring, 1);
      const ClaimId claim = first_claim_of(lease);
      CHECK(killed([&] {
        const auto taker = Ring::attach(s.guard.name, Role::listener, false);
        const int entry = taker->open_taker(kToken);
        claimed(*taker);
        fault::set(index_of(died), SIGKILL, 0);
        taker->finish(claim, false, entry);
      }));
      killed([&] {
        const auto reclaimer = Ring::attach(s.guard.name, Role::observer, false);
        fault::set(index_of(point), SIGKILL, 0);
        reclaimer->reclaim();
      });
      s.ring->reclaim();
      const bool consumed = died == "mark_consumed.marked";
      CHECK(s.ring->outcome(kToken, claim) == (consumed ? Outcome::accepted : Outcome::refused));
      CHECK((s.ring->info(lease.slot).state == State::free) == consumed);
    }
}

TEST(a_listener_that_is_stopped_in_a_finish_is_waited_for) {
  for (const std::string_view point : {"outcome.noted", "mark_consumed.marked", "outcome.decided"}) {
    Shared s("stopped");
    const Lease lease = published(*s.ring, 1);
    const ClaimId claim = first_claim_of(lease);
    stopped_at(
        point,
        [&] {
          const auto taker = Ring::attach(s.guard.name, Role::listener, false);
          const int entry = taker->open_taker(kToken);
          claimed(*taker);
          taker->finish(claim, false, entry);
        },
        [&] {
          const Outcome meanwhile = s.ring->outcome(kToken, claim);
          CHECK(meanwhile == (point == "outcome.decided" ? Outcome::accepted : Outcome::undecided));
        });
    const bool consumed = point != "outcome.noted";  // it has seen there that it was asked about
    CHECK(s.ring->outcome(kToken, claim) == (consumed ? Outcome::accepted : Outcome::refused));
    CHECK((s.ring->info(lease.slot).state == State::free) == consumed);
  }
}

TEST(a_claim_that_is_being_finished_stays_its_holders_though_that_is_stopped_for_longer_than_its_lease) {
  for (const std::string_view point : {"outcome.noted", "mark_consumed.marked"}) {
    Shared s("ending");
    const Lease lease = published(*s.ring, 1);
    const ClaimId claim = first_claim_of(lease);
    stopped_at(
        point,
        [&] {
          const auto taker = Ring::attach(s.guard.name, Role::listener, false);
          taker->set_lease(20'000'000);
          const int entry = taker->open_taker(kToken);
          claimed(*taker);
          if (!taker->finish(claim, false, entry)) _exit(1);
        },
        [&] {
          std::vector<Claimed> others;
          const Deadline enough(0.25);  // several looks at silent holders
          while (enough.left_ns() > 0) CHECK(s.ring->claim({}, others) == 0);
        });
    CHECK(s.ring->outcome(kToken, claim) == Outcome::accepted);
    CHECK(s.ring->info(lease.slot).state == State::free);
  }
}

TEST(a_payload_that_is_ended_instead_of_claimed_is_nobodys_though_who_ends_it_is_stopped_for_longer_than_its_lease) {
  Shared s("aged");
  const Lease lease = *s.ring->try_take();
  CHECK(s.ring->publish(lease.slot, lease.generation, {.length = 1, .policy_version = 3}));
  stopped_at(
      "claim.claimed",
      [&] {
        const auto trainer = Ring::attach(s.guard.name, Role::reader, false);
        trainer->set_lease(20'000'000);
        std::vector<Claimed> none;
        if (trainer->claim({.oldest_version = 4}, none) != 0) _exit(1);
      },
      [&] {
        std::vector<Claimed> others;
        const Deadline enough(0.25);  // several looks at silent holders
        while (enough.left_ns() > 0) CHECK(s.ring->claim({}, others) == 0);
      });
  CHECK(s.ring->depth(0).tallies[static_cast<unsigned>(Tally::aged)] == 1);
  CHECK(s.ring->info(lease.slot).state == State::free);
}

TEST(the_last_finishes_of_a_connection_are_told_and_its_entry_is_its_own_while_it_lasts) {
  Shared s("entries");
  const auto taker = s.ring->attach_again(Role::listener);
  std::vector<int> entries;
  for (std::uint64_t token = 1; token <= kTakers; ++token) entries.push_back(taker->open_taker(token));
  CHECK(std::set<int>(entries.begin(), entries.end()).size() == kTakers && *std::min_element(entries.begin(), entries.end()) == 0);
  CHECK(s.ring->open_taker(kToken) == -1);
  std::vector<ClaimId> claims;
  for (std::size_t i = 0; i < kFinishesKept + 1; ++i) {
    published(*s.ring, 1);
    claims.push_back(claimed(*taker));
    CHECK(taker->finish(claims.back(), false, entries[7]));
  }
  CHECK(s.ring->outcome(8, claims[0]) == Outcome::refused);  // written over: a client leaves fewer unanswered
  for (std::size_t i = 1; i < claims.size(); ++i) CHECK(s.ring->outcome(8, claims[i]) == Outcome::accepted);
  taker->close_taker(entries[7]);
  taker->close_taker(entries[3]);
  CHECK(s.ring->open_taker(kToken) == entries[3]);  // the one that was used longest ago
  CHECK(s.ring->outcome(8, claims[9]) == Outcome::accepted && s.ring->outcome(4, claims[9]) == Outcome::unknown);
  CHECK(s.ring->open_taker(kToken + 1) == entries[7] && s.ring->outcome(8, claims[9]) == Outcome::unknown);
}

TEST(connections_that_come_at_once_each_get_an_entry_while_some_are_free) {
  Shared s("at_once");
  std::atomic<int> without{0};
  std::vector<std::thread> threads;
  for (std::uint64_t token = 1; token <= 4; ++token)
    threads.emplace_back([&s, &without, token] {
      const auto taker = s.ring->attach_again(Role::listener);
      for (int i = 0; i < 5000; ++i) {
        const int entry = taker->open_taker(token);
        without += entry < 0 ? 1 : 0;
        taker->close_taker(entry);
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(without == 0);
}

TEST(an_owner_killed_while_it_takes_an_entry_leaves_it_to_others) {
  Shared s("building");
  CHECK(killed([&] {
    const auto taker = Ring::attach(s.guard.name, Role::listener, false);
    fault::set(index_of("taker.building"), SIGKILL, 0);
    taker->open_taker(kToken);
  }));
  s.ring->reclaim();
  for (std::uint64_t token = 1; token <= kTakers; ++token) CHECK(s.ring->open_taker(token) >= 0);
}

TEST(a_trainer_whose_listener_dies_is_to_hear_the_end_until_its_time_to_come_again_is_over) {
  for (const bool was_killed : {true, false}) {
    Shared s("lost");
    const Segment segment = Segment::attach(s.guard.name, false);
    auto* const entry = reinterpret_cast<TakerEntry*>(segment.mapping->control() + segment.geometry.takers_offset);
    s.ring->end_data();
    CHECK(killed([&] {
      const auto listener = Ring::attach(s.guard.name, Role::listener, false);
      CHECK(listener->pending() == 0 && listener->open_taker(kToken) == 0);
      entry->used_ns.store(0);  // it rests for long
      CHECK(listener->pending() == 1);
      if (was_killed) raise(SIGKILL);
    }) == was_killed);  // else it leaves its connection open
    CHECK(s.ring->pending() == 1);
    s.ring->reclaim();
    CHECK(s.ring->pending() == 1);
    entry->used_ns.store(0);
    CHECK(s.ring->pending() == 0);
  }
}

TEST(a_connection_that_was_asked_to_come_again_and_claims_once_more_is_told_what_became_of_it) {
  Shared s("again");
  const auto taker = s.ring->attach_again(Role::listener);
  taker->lose_taker(taker->open_taker(kToken));
  published(*s.ring, 1);
  const ClaimId first = claimed(*taker);
  CHECK(taker->finish(first, false, taker->open_taker(kToken)));
  CHECK(s.ring->outcome(kToken, first) == Outcome::accepted);
  published(*s.ring, 1);
  const int last = taker->open_taker(kToken);
  const ClaimId second = claimed(*taker);
  CHECK(s.ring->outcome(kToken, second) == Outcome::refused && !taker->finish(second, false, last));
}

int main(int argc, char** argv) { return run_all(argc, argv); }
