// How claims end: consumed, given back, ended untrained, or with their holder.
#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "ring/change.hpp"
#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"
#include "ring/ring.hpp"

namespace transport {

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

}  // namespace

// --- claims that go with a pin ------------------------------------------------------------------------

// The caller may clear the owner's pin, and has not yet done so.
bool Ring::drop_claim(std::uint64_t slot, unsigned rank, unsigned owner, bool counts, bool delayed) {
  std::atomic<std::uint32_t>& word = claims(slot).claims[rank];
  std::uint32_t expected = word.load(std::memory_order_relaxed);
  const ClaimWord held{expected};
  // A claim that lapses meanwhile may belong to another owner by now.
  return held.held_by(owner) && word.compare_exchange_strong(expected, held.dropped(counts, delayed).bits,
                                                             std::memory_order_acq_rel, std::memory_order_relaxed);
}

// All claims of an owner whose byte the caller holds; how many.
unsigned Ring::disclaim(std::uint64_t slot, unsigned owner, std::uint16_t done) {
  unsigned dropped = 0;
  for (unsigned rank = 0; rank < kMaxReaders; ++rank) {
    if ((done & slot_word::bit(rank)) != 0 || !drop_claim(slot, rank, owner, true)) continue;
    tally(rank, Tally::expired);
    ++dropped;
  }
  if (dropped > 0) FAULT_POINT("reclaim.disclaimed");
  return dropped;
}

// Pins of this attachment that a call can name by its slot alone: a claim's goes with the claim.
bool Ring::plainly_pinned(std::uint64_t slot) const {
  return own_pins_[slot] > static_cast<unsigned>(std::popcount(own_claims_[slot]));
}

// --- ends of a claim: all under the slot's stripe ---------------------------------------------------

Ring::Hold Ring::hold_of(const ClaimId& claim) const {
  const Word word{control(claim.slot).word.load(std::memory_order_acquire)};  // SYNC S
  if ((own_claims_[claim.slot] & slot_word::bit(claim.rank)) == 0 || word.generation() != claim.generation ||
      own_attempts(claim.slot, claim.rank) != claim.attempts)
    return Hold::none;
  const ClaimWord held{claims(claim.slot).claims[claim.rank].load(std::memory_order_acquire)};
  return held.held_by(static_cast<unsigned>(me_)) && held.attempts() == claim.attempts ? Hold::held : Hold::lapsed;
}

// The claim is held, and nobody takes it back any more: a holder that is stopped before it sets the done bit would set
// that of a rank which another holder has claimed by then.
bool Ring::begin_end(const ClaimId& claim) {
  std::atomic<std::uint32_t>& word = claims(claim.slot).claims[claim.rank];
  std::uint32_t expected = word.load(std::memory_order_acquire);
  const ClaimWord held{expected};
  return held.held_by(static_cast<unsigned>(me_)) && held.attempts() == claim.attempts &&
         word.compare_exchange_strong(expected, held.to_end().bits, std::memory_order_acq_rel, std::memory_order_relaxed);
}

// True if the claim is held. One that lapsed is given up here with its pin; either way the rest is refused.
bool Ring::resolve_lapsed(const ClaimId& claim, bool ends) {
  heard();
  Hold hold = hold_of(claim);
  if (hold == Hold::held && ends && !begin_end(claim)) hold = Hold::lapsed;
  if (hold == Hold::held) return true;
  row().count(Counter::late_finalises);
  if (hold == Hold::lapsed) {
    own_claims_[claim.slot] &= static_cast<std::uint16_t>(~slot_word::bit(claim.rank));
    drop_pin(claim.slot, claim.generation);
  }
  return false;
}

bool Ring::holds(const ClaimId& claim) const {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  const Word word{control(claim.slot).word.load(std::memory_order_acquire)};  // SYNC S
  return hold_of(claim) == Hold::held && (word.done() & slot_word::bit(claim.rank)) == 0;
}

// One of this attachment's pins. True: the slot is still published.
bool Ring::drop_pin(std::uint64_t slot, std::uint64_t generation) {
  std::uint32_t& mine = own_pins_[slot];
  row().count(Counter::unpins);
  if (--mine > 0) return true;
  const Change changed = change(
      control(slot).word, [&](Word old) { return slot_word::unpin(old, generation, static_cast<unsigned>(me_)); });
  FAULT_POINT("unpin.unpinned");
  if (!changed || !changed.freed()) return true;
  freed(slot);
  return false;
}

bool Ring::finish(const ClaimId& claim, bool keep_pin, int taker) {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  if (!resolve_lapsed(claim, true)) return false;
  std::atomic<std::uint64_t>* const note = taker < 0 ? nullptr : note_finish(taker, claim, Asking::finish);
  if (taker >= 0 && note == nullptr) {  // its consumer has asked already, and was told that it is refused
    row().count(Counter::late_finalises);
    give_back_held(claim, 0, Return::retried);
    return false;
  }
  // With a note the pin goes when it is decided: until then the slot cannot be taken anew.
  const bool one_swap = own_pins_[claim.slot] == 1 && !keep_pin && note == nullptr;
  const Change changed = change(control(claim.slot).word, [&](Word old) {
    return one_swap ? slot_word::mark_consumed(old, claim.generation, static_cast<unsigned>(me_), claim.rank)
                    : slot_word::consume(old, claim.generation, claim.rank);
  });
  own_claims_[claim.slot] &= static_cast<std::uint16_t>(~slot_word::bit(claim.rank));
  if (changed) FAULT_POINT("mark_consumed.marked");
  if (note != nullptr) decide(*note, static_cast<bool>(changed));
  if (!changed) {  // consumed by ticket, or discarded
    row().count(Counter::late_finalises);
    drop_pin(claim.slot, claim.generation);
    return false;
  }
  row().count(Counter::consumes);
  tally(claim.rank, Tally::done);
  if (keep_pin) return true;
  if (!one_swap) {
    drop_pin(claim.slot, claim.generation);
    return true;
  }
  --own_pins_[claim.slot];
  row().count(Counter::unpins);
  if (changed.freed()) freed(claim.slot);
  return true;
}

bool Ring::give_back(const ClaimId& claim, std::uint64_t delay_ns, Return how) {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  return resolve_lapsed(claim, false) && give_back_held(claim, delay_ns, how);
}

bool Ring::give_back_held(const ClaimId& claim, std::uint64_t delay_ns, Return how) {
  if (delay_ns > 0) {
    const std::uint64_t now_ns = monotonic_ns();
    claims(claim.slot).not_before_ns[claim.rank].store(now_ns + std::min(delay_ns, kNever - now_ns),
                                                       std::memory_order_release);
  }
  const Word word{control(claim.slot).word.load(std::memory_order_acquire)};  // SYNC S
  const bool open = (word.done() & slot_word::bit(claim.rank)) == 0 &&
                    drop_claim(claim.slot, claim.rank, static_cast<unsigned>(me_), how != Return::unread, delay_ns > 0);
  own_claims_[claim.slot] &= static_cast<std::uint16_t>(~slot_word::bit(claim.rank));
  FAULT_POINT("give_back.dropped");
  const bool published = drop_pin(claim.slot, claim.generation);
  if (!open) return false;
  tally(claim.rank, how == Return::expired ? Tally::expired : Tally::retried);
  if (published) returned(claim.slot);
  return true;
}

bool Ring::end(const ClaimId& claim, Ended how, std::string_view reason, std::string_view consumer, int taker) {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  if (!resolve_lapsed(claim, true)) return false;
  std::atomic<std::uint64_t>* const note = taker < 0 ? nullptr : note_finish(taker, claim, Asking::end);
  if (taker >= 0 && note == nullptr) {  // as in `finish`
    row().count(Counter::late_finalises);
    give_back_held(claim, 0, Return::retried);
    return false;
  }
  const std::uint64_t sequence = control(claim.slot).sequence.load(std::memory_order_acquire);
  if (!end_held(claim.slot, claim.generation, claim.rank, how, false, note)) return false;
  if (how == Ended::dead) tally(claim.rank, Tally::retried);  // given back for the last time
  log_failure(claim, sequence, how, reason, consumer);
  return true;
}

// The rank, or with `whole` the payload, will not be read any more. The pin of the claim goes.
bool Ring::end_held(std::uint64_t slot, std::uint64_t generation, unsigned rank, Ended how, bool whole,
                    std::atomic<std::uint64_t>* note) {
  std::uint32_t& mine = own_pins_[slot];
  const bool one_swap = mine == 1 && !whole && note == nullptr;  // see `finish`
  const Change changed = change(control(slot).word, [&](Word old) {
    return one_swap ? slot_word::mark_consumed(old, generation, static_cast<unsigned>(me_), rank)
           : whole  ? slot_word::discard(old, generation)
                    : slot_word::consume(old, generation, rank);
  });
  own_claims_[slot] &= static_cast<std::uint16_t>(~slot_word::bit(rank));
  if (changed) {
    FAULT_POINT("discard.discarded");
    row().count(Counter::discards);
    const std::uint16_t ended = static_cast<std::uint16_t>(changed.after.done() & ~changed.before.done());
    for (unsigned other = 0; other < kMaxReaders; ++other)
      if ((ended & slot_word::bit(other)) != 0)
        tally(other, how == Ended::dead ? Tally::dead : Tally::discarded);
    if (how == Ended::aged) tally(rank, Tally::aged);
  }
  if (note != nullptr) decide(*note, static_cast<bool>(changed));
  if (!changed || !one_swap) {
    drop_pin(slot, generation);
    return static_cast<bool>(changed);
  }
  --mine;
  row().count(Counter::unpins);
  if (changed.freed()) freed(slot);
  return true;
}

// --- counting and the log --------------------------------------------------------------------------------------

Ring::Depth Ring::depth(unsigned rank) const {
  require_open();
  require_rank(rank);
  Depth depth;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    const Word word{control(slot).word.load(std::memory_order_acquire)};  // SYNC S
    if (!word.published() || (word.done() & slot_word::bit(rank)) != 0) continue;
    ++(ClaimWord{claims(slot).claims[rank].load(std::memory_order_relaxed)}.held() ? depth.claimed : depth.ready);
  }
  for (unsigned owner = 0; owner <= kObserverRow; ++owner)
    for (std::size_t i = 0; i < depth.tallies.size(); ++i)
      depth.tallies[i] += rank_counts(owner, rank).counts[i].load(std::memory_order_relaxed);
  return depth;
}

void Ring::log_failure(const ClaimId& claim, std::uint64_t sequence, Ended how, std::string_view reason,
                       std::string_view consumer) {
  const std::uint64_t position = header().failures.fetch_add(1, std::memory_order_relaxed);
  FAULT_POINT("failure.counted");
  failure(position).write({position, sequence, claim.slot, claim.generation, claim.rank, claim.attempts, how,
                           std::string(reason), std::string(consumer)});
}

std::vector<Failure> Ring::failures() const {
  require_open();
  std::vector<Failure> found;
  for (std::uint64_t position = 0; position < segment_.geometry.failure_count; ++position)
    if (auto entry = failure(position).read()) found.push_back(std::move(*entry));
  std::sort(found.begin(), found.end(), [](const Failure& a, const Failure& b) {
    return std::tie(a.sequence, a.position) > std::tie(b.sequence, b.position);
  });
  return found;
}

}  // namespace transport
