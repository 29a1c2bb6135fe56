// The ring as the queue: payloads are handed out to claimers. What a claim is stands in claim_word.hpp, and how it is
// taken and ended step by step is modelled in model/takes.pml.
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
// A hint is lost with a process that dies between a word and its hint. Looking at every slot finds it: soon where
// nothing else is found, and now and then where there is always something newer.
constexpr std::uint64_t kRepairIdle_ns = kRecheck_ns;
constexpr std::uint64_t kRepairBusy_ns = 1'000'000'000;

}  // namespace

SlotClaim& Ring::claims(std::uint64_t slot) const {
  return reinterpret_cast<SlotClaim*>(segment_.mapping->control() + segment_.geometry.claims_offset)[slot];
}
RankCounts& Ring::rank_counts(unsigned owner, unsigned rank) const {
  auto* const counts = reinterpret_cast<RankCounts*>(segment_.mapping->control() + segment_.geometry.counts_offset);
  return counts[owner * kMaxReaders + rank];
}
FailureEntry& Ring::failure(std::uint64_t position) const {
  auto* const entries = reinterpret_cast<FailureEntry*>(segment_.mapping->control() + segment_.geometry.failures_offset);
  return entries[position % kFailures];
}

void Ring::tally(unsigned rank, Tally which, std::uint64_t amount) {
  const unsigned owner = me_ < 0 ? kObserverRow : static_cast<unsigned>(me_);
  rank_counts(owner, rank).counts[static_cast<unsigned>(which)].fetch_add(amount, std::memory_order_relaxed);
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
  for (std::uint64_t position = 0; position < kFailures; ++position)
    if (auto entry = failure(position).read()) found.push_back(std::move(*entry));
  std::sort(found.begin(), found.end(), [](const Failure& a, const Failure& b) {
    return std::tie(a.sequence, a.position) > std::tie(b.sequence, b.position);
  });
  return found;
}

// --- the claim words -----------------------------------------------------------------------------

ClaimWord Ring::claim_word(std::uint64_t slot, unsigned rank) const {
  require_slot(slot);
  require_rank(rank);
  return {claims(slot).claims[rank].load(std::memory_order_acquire)};
}

// By the writer, while the slot is WRITING and its own.
void Ring::clear_claims(std::uint64_t slot, std::int64_t policy_version) {
  SlotClaim& c = claims(slot);
  c.policy_version.store(policy_version, std::memory_order_relaxed);  // SYNC S, as the stores that follow
  c.delayed.store(0, std::memory_order_relaxed);
  for (auto& word : c.claims) word.store(0, std::memory_order_relaxed);
}

// The caller may clear the owner's pin, and has not yet done so.
bool Ring::drop_claim(std::uint64_t slot, unsigned rank, unsigned owner) {
  std::atomic<std::uint16_t>& word = claims(slot).claims[rank];
  std::uint16_t expected = word.load(std::memory_order_relaxed);
  const ClaimWord held{expected};
  // A claim that lapses meanwhile may belong to another owner by now.
  return held.held_by(owner) && word.compare_exchange_strong(expected, held.dropped().bits, std::memory_order_acq_rel,
                                                             std::memory_order_relaxed);
}

// All claims of an owner whose byte the caller holds; how many.
unsigned Ring::disclaim(std::uint64_t slot, unsigned owner, std::uint16_t done) {
  unsigned dropped = 0;
  for (unsigned rank = 0; rank < kMaxReaders; ++rank) {
    if ((done & slot_word::bit(rank)) != 0 || !drop_claim(slot, rank, owner)) continue;
    tally(rank, Tally::expired);
    ++dropped;
  }
  if (dropped > 0) FAULT_POINT("reclaim.disclaimed");
  return dropped;
}

unsigned Ring::pins_of_claims(std::uint64_t slot) const {
  return static_cast<unsigned>(std::popcount(own_claims_[slot]));
}

// Called before this attachment drops a pin that is named by its slot alone. Where all its pins on the slot belong to
// claims, one of these claims is dropped with the pin, and then has no holder.
bool Ring::disclaim_own(std::uint64_t slot) {
  if (own_claims_[slot] == 0 || own_pins_[slot] > pins_of_claims(slot)) return false;
  const auto rank = static_cast<unsigned>(std::countr_zero(own_claims_[slot]));
  own_claims_[slot] &= static_cast<std::uint16_t>(~slot_word::bit(rank));
  if (!drop_claim(slot, rank, static_cast<unsigned>(me_))) return false;
  tally(rank, Tally::retried);
  return true;
}

// Tells of a slot with a rank that can be claimed again. As with `freed`, what a death in here loses is found again.
void Ring::returned(std::uint64_t slot) {
  FAULT_POINT("return.unhinted");
  ready_.offer(slot);  // SYNC R
  header().returned.fetch_add(1, std::memory_order_release);
  FAULT_POINT("return.unannounced");
  advance(header().published);
}

// Whether some rank may be claimed, now or after its delay.
bool Ring::claimable(std::uint64_t slot) const {
  const Word word{control(slot).word.load(std::memory_order_acquire)};  // SYNC S
  if (!word.published()) return false;
  for (unsigned rank = 0; rank < kMaxReaders; ++rank)
    if ((word.done() & slot_word::bit(rank)) == 0 &&
        !ClaimWord{claims(slot).claims[rank].load(std::memory_order_acquire)}.held())
      return true;
  return false;
}

// --- finding ---------------------------------------------------------------------------------------

void Ring::offer_ready_slots() {
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot)
    if (Word{control(slot).word.load(std::memory_order_relaxed)}.published() && claimable(slot))
      ready_.offer_again(slot);
}

// Ends claims that any owner has held for too long. The time is written before the word, so a claim that is just
// being taken looks no older than it is; the holder's pin stays until it asks and is refused.
void Ring::lapse(std::uint64_t most_held_ns, std::uint64_t now_ns) {
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    const Word word{control(slot).word.load(std::memory_order_acquire)};  // SYNC S
    if (word.state() != State::reading) continue;
    for (unsigned rank = 0; rank < kMaxReaders; ++rank) {
      if ((word.done() & slot_word::bit(rank)) != 0) continue;
      std::atomic<std::uint16_t>& claim = claims(slot).claims[rank];
      std::uint16_t expected = claim.load(std::memory_order_acquire);
      const ClaimWord held{expected};
      const std::uint64_t since_ns = claims(slot).not_before_ns[rank].load(std::memory_order_acquire);
      if (!held.held() || since_ns >= now_ns || now_ns - since_ns < most_held_ns) continue;
      if (!claim.compare_exchange_strong(expected, held.dropped().bits, std::memory_order_acq_rel,
                                         std::memory_order_relaxed))
        continue;
      tally(rank, Tally::expired);
      returned(slot);
    }
  }
}

// Under candidates_mutex_.
void Ring::find_candidates(const Asked& asked, std::uint64_t now_ns) {
  const unsigned rank = asked.rank;
  Candidates& list = candidates_[rank];
  const auto look = [&] {
    list.found.clear();
    list.next = 0;
    list.due_ns = kNever;
    list.returned = header().returned.load(std::memory_order_acquire);
    ready_.each([&](std::size_t slot) {
      const SlotControl& c = control(slot);
      const Word word{c.word.load(std::memory_order_acquire)};  // SYNC S
      if (!word.published()) {
        ready_.withdraw(slot);
        if (claimable(slot)) ready_.offer(slot);  // SYNC R
        return;
      }
      if ((word.done() & slot_word::bit(rank)) != 0) return;
      const SlotClaim& claim = claims(slot);
      if (ClaimWord{claim.claims[rank].load(std::memory_order_acquire)}.held()) {
        if (claimable(slot)) return;
        ready_.withdraw(slot);
        if (claimable(slot)) ready_.offer(slot);  // SYNC R
        return;
      }
      const bool delayed = (claim.delayed.load(std::memory_order_acquire) & slot_word::bit(rank)) != 0;
      const std::uint64_t due_ns = delayed ? claim.not_before_ns[rank].load(std::memory_order_acquire) : 0;
      if (due_ns > now_ns) {
        list.due_ns = std::min(list.due_ns, due_ns);
        return;
      }
      const std::uint64_t sequence = c.sequence.load(std::memory_order_acquire);  // SYNC F: checked by the claim
      list.found.push_back({sequence, static_cast<std::uint32_t>(slot), word.generation()});
    });
  };
  const auto repair = [&] {
    repaired_ns_ = now_ns;
    if (asked.most_held_ns != 0) lapse(asked.most_held_ns, now_ns);
    offer_ready_slots();
  };
  if (now_ns - repaired_ns_ >= kRepairBusy_ns) repair();
  look();
  if (list.found.empty() && now_ns - repaired_ns_ >= kRepairIdle_ns) {
    repair();
    look();
  }
  std::sort(list.found.begin(), list.found.end(),
            [](const Candidate& a, const Candidate& b) { return a.sequence < b.sequence; });
}

std::uint64_t Ring::next_due_ns(unsigned rank) const {
  require_open();
  require_rank(rank);
  const std::lock_guard hold(candidates_mutex_);
  return candidates_[rank].due_ns;
}

// --- claiming --------------------------------------------------------------------------------------

std::size_t Ring::claim(const Asked& asked, std::vector<Claimed>& claimed) {
  require_owner();
  require_rank(asked.rank);
  if (asked.most_attempts > ClaimWord::kMostAttempts)
    fail(Fault::argument, std::to_string(asked.most_attempts) + " attempts, at most " +
                              std::to_string(ClaimWord::kMostAttempts) + " are counted");
  const std::lock_guard hold(candidates_mutex_);
  Candidates& list = candidates_[asked.rank];
  const std::uint64_t now_ns = monotonic_ns();
  std::size_t got = 0;
  std::uint64_t bytes = 0;
  bool looked = false;
  while (got < asked.most) {
    const bool used_up = list.next == list.found.size();
    const bool older = list.returned != header().returned.load(std::memory_order_acquire) || now_ns >= list.due_ns;
    if (used_up || (older && !looked)) {
      if (std::exchange(looked, true) && used_up) break;
      find_candidates(asked, now_ns);
      if (list.found.empty()) break;
    }
    const Candidate candidate = list.found[list.next];
    Claimed one{};
    const std::uint64_t room = got == 0 ? kNever : asked.most_bytes - std::min(bytes, asked.most_bytes);
    const Try tried = try_claim(candidate.slot, candidate.generation, asked, room, one);
    if (tried == Try::too_large) break;
    ++list.next;
    if (tried != Try::claimed) continue;
    bytes += one.length;
    ++got;
    claimed.push_back(one);
  }
  return got;
}

Ring::Try Ring::try_claim(std::uint64_t slot, std::uint64_t generation, const Asked& asked, std::uint64_t room,
                          Claimed& claimed) {
  const unsigned rank = asked.rank;
  const auto me = static_cast<unsigned>(me_);
  SlotControl& c = control(slot);
  SlotClaim& s = claims(slot);
  const std::lock_guard hold(stripe(slot));
  if ((own_claims_[slot] & slot_word::bit(rank)) != 0) return Try::gone;  // ours, or lapsed and not yet resolved
  const Word seen{c.word.load(std::memory_order_acquire)};  // SYNC S
  if (!slot_word::pin(seen, generation, me, rank) || ClaimWord{s.claims[rank].load(std::memory_order_relaxed)}.held())
    return Try::gone;
  if (own_pins_[slot] == 0 && !change(c.word, [&](Word old) { return slot_word::pin(old, generation, me, rank); }))
    return Try::gone;
  ++own_pins_[slot];
  row().count(Counter::pins);
  FAULT_POINT("claim.pinned");

  // From here on the generation stays, and with it everything that was written before it was published.
  const std::uint64_t length = std::min(c.length.load(std::memory_order_acquire), segment_.identity.slot_capacity);
  const std::uint64_t deadline_ns = c.deadline_ns.load(std::memory_order_acquire);
  const std::int64_t version = s.policy_version.load(std::memory_order_acquire);
  std::atomic<std::uint16_t>& word = s.claims[rank];
  std::uint16_t expected = word.load(std::memory_order_acquire);
  const ClaimWord before{expected};
  // Written by the last holder before it dropped the claim.
  const std::uint64_t now_ns = monotonic_ns();
  const bool delayed = (s.delayed.load(std::memory_order_acquire) & slot_word::bit(rank)) != 0 &&
                       s.not_before_ns[rank].load(std::memory_order_acquire) > now_ns;
  const bool late = deadline_ns != 0 && deadline_ns <= realtime_ns();
  const bool aged = version != kNoVersion && asked.oldest_version != kNoVersion && version < asked.oldest_version;
  const bool dead = asked.most_attempts != 0 && before.attempts() >= asked.most_attempts;
  const bool ends = late || aged || dead;
  const ClaimWord after = ends ? before.ended_by(me) : before.claimed(me);
  const bool too_large = !ends && length > room;
  if (!before.held() && !delayed && !too_large)
    s.not_before_ns[rank].store(now_ns, std::memory_order_release);  // since when it is held; due it is
  if (before.held() || delayed || too_large ||
      !word.compare_exchange_strong(expected, after.bits, std::memory_order_acq_rel, std::memory_order_acquire)) {
    drop_pin(slot, generation);
    return too_large ? Try::too_large : Try::gone;
  }
  own_claims_[slot] |= slot_word::bit(rank);
  own_attempts(slot, rank) = static_cast<std::uint16_t>(after.attempts());
  FAULT_POINT("claim.claimed");

  const ClaimId id{static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(generation), rank, after.attempts()};
  const std::uint64_t sequence = c.sequence.load(std::memory_order_acquire);
  if (ends) {
    const Ended how = late ? Ended::discarded : aged ? Ended::aged : Ended::dead;
    const std::string reason =
        late   ? "its deadline has passed"
        : aged ? "policy version " + std::to_string(version) + " is older than " + std::to_string(asked.oldest_version)
               : "claimed " + std::to_string(before.attempts()) + " times in vain";
    if (end_held(slot, generation, rank, how, late)) log_failure(id, sequence, how, reason, asked.consumer);
    return Try::ended;
  }
  claimed = {id,
             c.readers.load(std::memory_order_acquire),
             length,
             c.checksum.load(std::memory_order_acquire),
             sequence,
             c.created_ns.load(std::memory_order_acquire),
             deadline_ns,
             version};
  if (!claimable(slot)) {  // no other rank is left for others to claim
    ready_.withdraw(slot);
    FAULT_POINT("claim.withdrawn");
    if (claimable(slot)) ready_.offer(slot);  // SYNC R
  }
  return Try::claimed;
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

// True if the claim is held. One that lapsed is given up here with its pin; either way the rest is refused.
bool Ring::resolve_lapsed(const ClaimId& claim) {
  const Hold hold = hold_of(claim);
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

bool Ring::finish(const ClaimId& claim, bool keep_pin, bool arrived) {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  if (!resolve_lapsed(claim)) return false;
  std::uint32_t& mine = own_pins_[claim.slot];
  const Change changed = change(control(claim.slot).word, [&](Word old) {
    return mine == 1 && !keep_pin
               ? slot_word::mark_consumed(old, claim.generation, static_cast<unsigned>(me_), claim.rank)
               : slot_word::consume(old, claim.generation, claim.rank);
  });
  own_claims_[claim.slot] &= static_cast<std::uint16_t>(~slot_word::bit(claim.rank));
  if (!changed) {  // consumed by ticket, or discarded
    row().count(Counter::late_finalises);
    drop_pin(claim.slot, claim.generation);
    return false;
  }
  FAULT_POINT("mark_consumed.marked");
  row().count(Counter::consumes);
  tally(claim.rank, arrived ? Tally::arrived : Tally::done);
  if (keep_pin) return true;
  --mine;
  row().count(Counter::unpins);
  if (changed.freed()) freed(claim.slot);
  return true;
}

bool Ring::renew(const ClaimId& claim) {
  if (!holds(claim)) return false;
  const std::lock_guard hold(stripe(claim.slot));
  if (hold_of(claim) != Hold::held) return false;
  claims(claim.slot).not_before_ns[claim.rank].store(monotonic_ns(), std::memory_order_release);
  return true;
}

void Ring::trained(unsigned rank, std::uint64_t deliveries) {
  require_owner();
  require_rank(rank);
  std::atomic<std::uint64_t>& arrived =
      rank_counts(static_cast<unsigned>(me_), rank).counts[static_cast<unsigned>(Tally::arrived)];
  std::uint64_t now = arrived.load(std::memory_order_relaxed);
  while (now != 0 && !arrived.compare_exchange_weak(now, now - std::min(now, deliveries), std::memory_order_relaxed)) {
  }
  tally(rank, Tally::done, std::min(now, deliveries));
}

// Called by the holder of the owner's byte, when the owner ends. Which payloads they were is no longer known.
void Ring::count_lost(unsigned owner) {
  for (unsigned rank = 0; rank < kMaxReaders; ++rank) {
    const std::uint64_t lost = rank_counts(owner, rank).counts[static_cast<unsigned>(Tally::arrived)].exchange(0);
    if (lost == 0) continue;
    tally(rank, Tally::lost, lost);
    log_failure({~std::uint32_t{0}, 0, rank, 0}, header().sequence.load(std::memory_order_relaxed), Ended::lost,
                std::to_string(lost) + " had arrived at a consumer that ended before it had used them", {});
  }
}

bool Ring::give_back(const ClaimId& claim, std::uint64_t delay_ns) {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  if (!resolve_lapsed(claim)) return false;
  SlotClaim& s = claims(claim.slot);
  if (delay_ns > 0) {
    const std::uint64_t now_ns = monotonic_ns();
    s.not_before_ns[claim.rank].store(now_ns + std::min(delay_ns, kNever - now_ns), std::memory_order_release);
    s.delayed.fetch_or(slot_word::bit(claim.rank), std::memory_order_release);
  } else if ((s.delayed.load(std::memory_order_relaxed) & slot_word::bit(claim.rank)) != 0) {
    s.delayed.fetch_and(static_cast<std::uint16_t>(~slot_word::bit(claim.rank)), std::memory_order_release);
  }
  const Word word{control(claim.slot).word.load(std::memory_order_acquire)};  // SYNC S
  const bool open = (word.done() & slot_word::bit(claim.rank)) == 0 &&
                    drop_claim(claim.slot, claim.rank, static_cast<unsigned>(me_));
  own_claims_[claim.slot] &= static_cast<std::uint16_t>(~slot_word::bit(claim.rank));
  FAULT_POINT("give_back.dropped");
  const bool published = drop_pin(claim.slot, claim.generation);
  if (!open) return false;
  tally(claim.rank, Tally::retried);
  if (published) returned(claim.slot);
  return true;
}

bool Ring::end(const ClaimId& claim, Ended how, std::string_view reason, std::string_view consumer) {
  require_owner();
  require_slot(claim.slot);
  require_rank(claim.rank);
  const std::lock_guard hold(stripe(claim.slot));
  if (!resolve_lapsed(claim)) return false;
  const std::uint64_t sequence = control(claim.slot).sequence.load(std::memory_order_acquire);
  if (!end_held(claim.slot, claim.generation, claim.rank, how, false)) return false;
  if (how == Ended::dead) tally(claim.rank, Tally::retried);  // given back for the last time
  log_failure(claim, sequence, how, reason, consumer);
  return true;
}

// The rank, or with `whole` the payload, will not be read any more. The pin of the claim goes.
bool Ring::end_held(std::uint64_t slot, std::uint64_t generation, unsigned rank, Ended how, bool whole) {
  std::uint32_t& mine = own_pins_[slot];
  const bool one_swap = mine == 1 && !whole;
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
        tally(other, how == Ended::dead ? Tally::dead : how == Ended::lost ? Tally::lost : Tally::discarded);
    if (how == Ended::aged) tally(rank, Tally::aged);
  }
  if (!changed || !one_swap) {
    drop_pin(slot, generation);
    return static_cast<bool>(changed);
  }
  --mine;
  row().count(Counter::unpins);
  if (changed.freed()) freed(slot);
  return true;
}

// --- counting --------------------------------------------------------------------------------------

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

}  // namespace transport
