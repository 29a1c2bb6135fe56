// The transition table, row by row, and then what must hold for every word and operation.
#include "check.hpp"
#include "ring/claim_word.hpp"
#include "ring/slot_word.hpp"

using namespace transport;
using namespace transport::slot_word;

namespace {

constexpr std::uint32_t g = 7;               // the slot's generation
constexpr std::uint16_t two = born_done(2);  // neither of two readers has consumed
constexpr unsigned me = 3, other = 5;
constexpr std::uint16_t mine = bit(me), theirs = bit(other), both = bit(me) | bit(other);
constexpr std::uint16_t all = Word::kAll;

constexpr Word free_(std::uint16_t done = 0) { return Word::of(g, State::free, done, 0); }
constexpr Word writing(std::uint16_t pins) { return Word::of(g, State::writing, 0, pins); }
constexpr Word ready(std::uint16_t done = two) { return Word::of(g, State::ready, done, 0); }
constexpr Word reading(std::uint16_t pins, std::uint16_t done = two) { return Word::of(g, State::reading, done, pins); }

void allowed(Step step, Word next) {
  CHECK(step);
  CHECK(step.next == next);
}
void refused(Step step, Refusal why) { CHECK(step.refusal == why); }

}  // namespace

TEST(take_begins_a_generation_only_on_a_free_slot) {
  allowed(take(free_(), me), Word::of(g + 1, State::writing, 0, mine));
  allowed(take(free_(all), me), Word::of(g + 1, State::writing, 0, mine));
  for (Word word : {writing(mine), writing(theirs), ready(), reading(mine)}) refused(take(word, me), Refusal::state);
}

TEST(generations_wrap_and_skip_zero) {
  allowed(take(Word::of(Word::kGenerationMask, State::free, 0, 0), me), Word::of(1, State::writing, 0, mine));
}

TEST(a_slot_that_is_behind_what_may_be_given_out_skips_to_it) {
  allowed(take(free_(), me, g + 1), Word::of(g + 1, State::writing, 0, mine));
  allowed(take(free_(), me, 900), Word::of(900, State::writing, 0, mine));
  allowed(take(free_(), me, 2), Word::of(g + 1, State::writing, 0, mine));
  allowed(overwrite(ready(), me, 900), Word::of(900, State::writing, 0, mine));
  allowed(take(Word::of(Word::kGenerationMask - 3, State::free, 0, 0), me, 5), Word::of(5, State::writing, 0, mine));
  allowed(take(free_(), me, Word::kGenerationMask - 3), Word::of(g + 1, State::writing, 0, mine));
}

TEST(overwrite_takes_a_payload_that_nobody_pins_whoever_has_consumed_it) {
  for (const Word word : {ready(), ready(0), ready(two | bit(0)), ready(two | bit(1))})
    allowed(overwrite(word, me), Word::of(g + 1, State::writing, 0, mine));
  refused(overwrite(reading(theirs), me), Refusal::pinned);
  refused(overwrite(reading(mine), me), Refusal::pinned);
  refused(overwrite(free_(), me), Refusal::state);
  refused(overwrite(writing(mine), me), Refusal::state);
}

TEST(publish_is_the_writers_and_marks_absent_ranks_done) {
  for (unsigned readers = 1; readers <= kMaxReaders; ++readers) {
    allowed(publish(writing(mine), g, me, readers), ready(born_done(readers)));
    for (unsigned rank = 0; rank < kMaxReaders; ++rank)
      CHECK(((born_done(readers) & bit(rank)) != 0) == (rank >= readers));
  }
  refused(publish(writing(theirs), g, me, 2), Refusal::not_mine);
  refused(publish(writing(mine), g - 1, me, 2), Refusal::not_mine);
  for (Word word : {free_(), ready(), reading(mine)}) refused(publish(word, g, me, 2), Refusal::not_mine);
}

TEST(abort_is_the_writers_and_frees) {
  allowed(abort(writing(mine), g, me), free_());
  refused(abort(writing(theirs), g, me), Refusal::not_mine);
  refused(abort(writing(mine), g + 1, me), Refusal::not_mine);
  for (Word word : {free_(), ready(), reading(mine)}) refused(abort(word, g, me), Refusal::not_mine);
}

TEST(pin_admits_ranks_that_are_not_done_and_any_number_of_owners) {
  allowed(pin(ready(), g, me, 0), reading(mine));
  allowed(pin(reading(theirs), g, me, 1), reading(both));
  allowed(pin(reading(mine), g, me, 1), reading(mine));
  refused(pin(ready(two | bit(0)), g, me, 0), Refusal::done);
  refused(pin(ready(), g, me, 2), Refusal::done);
  refused(pin(reading(theirs, all), g, me, 0), Refusal::done);
  refused(pin(free_(all), g, me, 0), Refusal::done);
  refused(pin(free_(0), g, me, 0), Refusal::stale);
  refused(pin(writing(mine), g, me, 0), Refusal::stale);
  for (Word word : {ready(), reading(theirs), free_(all)}) {
    refused(pin(word, g - 1, me, 0), Refusal::stale);
    refused(pin(word, g + 1, me, 0), Refusal::stale);
    refused(pin(word, std::uint64_t{g} + (std::uint64_t{1} << 32), me, 0), Refusal::stale);
  }
}

TEST(unpin_returns_to_ready_or_frees_what_everybody_consumed) {
  allowed(unpin(reading(mine), g, me), ready());
  allowed(unpin(reading(both), g, me), reading(theirs));
  allowed(unpin(reading(mine, all), g, me), free_(all));
  allowed(unpin(reading(both, all), g, me), reading(theirs, all));
  refused(unpin(reading(theirs), g, me), Refusal::not_mine);
  refused(unpin(reading(mine), g - 1, me), Refusal::stale);
  for (Word word : {free_(), writing(mine), ready()}) refused(unpin(word, g, me), Refusal::stale);
}

TEST(consume_counts_each_rank_once_with_or_without_a_pin) {
  allowed(consume(ready(), g, 0), ready(two | bit(0)));
  allowed(consume(ready(two | bit(0)), g, 1), free_(all));
  allowed(consume(reading(theirs), g, 0), reading(theirs, two | bit(0)));
  allowed(consume(reading(theirs, two | bit(0)), g, 1), reading(theirs, all));
  refused(consume(ready(two | bit(0)), g, 0), Refusal::done);
  refused(consume(ready(), g, 2), Refusal::done);
  refused(consume(ready(), g + 1, 0), Refusal::stale);
  for (Word word : {free_(), free_(all), writing(mine)}) refused(consume(word, g, 0), Refusal::stale);
}

TEST(mark_consumed_is_consume_and_unpin_at_once) {
  allowed(mark_consumed(reading(mine), g, me, 0), ready(two | bit(0)));
  allowed(mark_consumed(reading(both), g, me, 0), reading(theirs, two | bit(0)));
  allowed(mark_consumed(reading(mine, two | bit(0)), g, me, 1), free_(all));
  refused(mark_consumed(reading(mine, two | bit(0)), g, me, 0), Refusal::done);
  refused(mark_consumed(reading(theirs), g, me, 0), Refusal::not_mine);
  refused(mark_consumed(reading(mine), g - 1, me, 0), Refusal::stale);
  for (Word word : {free_(), writing(mine), ready()}) refused(mark_consumed(word, g, me, 0), Refusal::stale);
}

TEST(discard_ends_a_payload_once_and_waits_for_pins) {
  allowed(discard(ready(), g), free_(all));
  allowed(discard(ready(two | bit(0)), g), free_(all));
  allowed(discard(reading(both), g), reading(both, all));
  refused(discard(reading(both, all), g), Refusal::done);
  refused(discard(ready(), g + 1), Refusal::stale);
  for (Word word : {free_(), free_(all), writing(mine)}) refused(discard(word, g), Refusal::stale);
}

TEST(reclaim_undoes_a_dead_owners_hold_and_nobody_elses) {
  allowed(reclaim(writing(mine), me), free_());
  allowed(reclaim(reading(mine), me), ready());
  allowed(reclaim(reading(both), me), reading(theirs));
  allowed(reclaim(reading(mine, all), me), free_(all));
  for (Word word : {free_(), ready(), writing(theirs), reading(theirs)}) refused(reclaim(word, me), Refusal::not_mine);
}

// Every state, some sets of done and pins that include the impossible, every operation.
TEST(every_result_is_a_valid_word_of_the_same_or_next_generation) {
  const auto valid = [](Word word) {
    switch (word.state()) {
      case State::free:
        return word.pins() == 0;
      case State::writing:
        return word.done() == 0 && word.pins() != 0;
      case State::ready:
        return word.pins() == 0 && word.done() != all;
      case State::reading:
        return word.pins() != 0;
    }
    return false;
  };
  const std::uint16_t sets[] = {0,  bit(0), bit(me), both, two, static_cast<std::uint16_t>(two | bit(0)), born_done(16),
                                all};
  unsigned checked = 0;
  for (unsigned state = 0; state < 4; ++state)
    for (std::uint16_t done : sets)
      for (std::uint16_t pins : sets) {
        const Word old = Word::of(g, static_cast<State>(state), done, pins);
        const Step same_generation[] = {publish(old, g, me, 2), abort(old, g, me),  pin(old, g, me, 0),
                                        unpin(old, g, me),      consume(old, g, 0), mark_consumed(old, g, me, 0),
                                        discard(old, g),        reclaim(old, me)};
        for (const Step& step : same_generation) {
          if (!step) continue;
          ++checked;
          CHECK(valid(step.next));
          CHECK(step.next.generation() == g);
          CHECK(!(step.next == old) || old == pin(old, g, me, 0).next);  // all but a second pin change something
          const std::uint16_t lost = static_cast<std::uint16_t>(old.pins() & ~step.next.pins());
          CHECK(old.state() == State::writing || (lost & ~bit(me)) == 0);
          CHECK(step.next.state() == State::free || old.state() == State::writing || (done & ~step.next.done()) == 0);
        }
        for (const Step& step : {take(old, me), overwrite(old, me)}) {
          if (!step) continue;
          ++checked;
          CHECK(valid(step.next));
          CHECK(step.next.generation() == g + 1 && step.next.pins() == mine && step.next.done() == 0);
        }
      }
  CHECK(checked > 100);
}

TEST(claim_words_count_attempts_and_name_their_holder) {
  ClaimWord word;
  for (unsigned attempt = 1; attempt <= ClaimWord::kMostAttempts + 2; ++attempt) {
    const unsigned owner = attempt % kMaxOwners, before = word.in_vain();
    word = word.claimed(owner);
    CHECK(word.held() && word.attempts() == (attempt - 1) % ClaimWord::kMostAttempts + 1 && !word.delayed());
    for (unsigned any = 0; any < kMaxOwners; ++any) CHECK(word.held_by(any) == (any == owner));
    const bool counts = attempt % 2 != 0, delayed = attempt % 3 == 0;
    word = word.dropped(counts, delayed);
    CHECK(!word.held() && word.delayed() == delayed);
    CHECK(word.in_vain() == std::min(before + counts, ClaimWord::kMostInVain));
    for (unsigned any = 0; any < kMaxOwners; ++any) CHECK(!word.held_by(any));
  }
  const ClaimWord ended = ClaimWord::of(5, 3, 0).ended_by(15);
  CHECK(ended.held_by(15) && ended.ending() && ended.attempts() == 5 && ended.in_vain() == 3);
}

int main(int argc, char** argv) { return transport::test::run_all(argc, argv); }
