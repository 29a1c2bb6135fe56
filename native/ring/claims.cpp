// The ring as the queue: payloads are handed out to claimers. What a claim is stands in claim_word.hpp, how it is
// taken step by step is modelled in model/claim.pml; how it ends is in claim_ends.cpp.
#include <algorithm>
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
  return entries[position % segment_.geometry.failure_count];
}

void Ring::tally(unsigned rank, Tally which) {
  const unsigned owner = me_ < 0 ? kObserverRow : static_cast<unsigned>(me_);
  rank_counts(owner, rank).counts[static_cast<unsigned>(which)].fetch_add(1, std::memory_order_relaxed);
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
  for (auto& word : c.claims) word.store(0, std::memory_order_relaxed);
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

void Ring::set_lease(std::uint64_t lease_ns) {
  require_owner();
  const std::lock_guard hold(locks_mutex_);
  OwnerRow& mine = row();
  const std::uint64_t before_ns = mine.lease_ns.load(std::memory_order_relaxed);
  if (std::exchange(lease_set_, true) && (before_ns == 0 || (lease_ns != 0 && lease_ns <= before_ns))) return;
  mine.heard_ns.store(monotonic_ns(), std::memory_order_release);  // before the lease that is counted from it
  mine.lease_ns.store(lease_ns, std::memory_order_release);
}

void Ring::heard() {
  require_owner();
  OwnerRow& mine = row();
  if (mine.lease_ns.load(std::memory_order_relaxed) != 0)
    mine.heard_ns.store(monotonic_ns(), std::memory_order_release);
}

bool Ring::silent(unsigned owner, std::uint64_t now_ns) const {
  const OwnerRow& holder = row(owner);
  const std::uint64_t lease_ns = holder.lease_ns.load(std::memory_order_acquire);
  return holder_gone(holder.heard_ns.load(std::memory_order_acquire), lease_ns, true, now_ns);
}

// Ends the claims of owners that are silent for longer than their own lease; those of dead ones end in `reclaim`. A
// holder is heard before it writes a claim word, so one that claims again after it was stopped is not taken for
// silent. Its pins stay until it asks and is refused.
void Ring::drop_silent(std::uint64_t now_ns) {
  std::uint16_t suspects = 0;
  for (unsigned owner = 0; owner < kMaxOwners; ++owner)
    if (static_cast<int>(owner) != me_ && silent(owner, now_ns)) suspects |= slot_word::bit(owner);
  if (suspects == 0) return;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    const Word word{control(slot).word.load(std::memory_order_acquire)};  // SYNC S
    if (word.state() != State::reading || (word.pins() & suspects) == 0) continue;
    for (unsigned rank = 0; rank < kMaxReaders; ++rank) {
      if ((word.done() & slot_word::bit(rank)) != 0) continue;
      std::atomic<std::uint32_t>& claim = claims(slot).claims[rank];
      std::uint32_t expected = claim.load(std::memory_order_acquire);
      const ClaimWord held{expected};
      if (!held.held() || held.ending() || (suspects & slot_word::bit(held.holder() - 1)) == 0 || !silent(held.holder() - 1, now_ns))
        continue;
      if (!claim.compare_exchange_strong(expected, held.dropped(true).bits, std::memory_order_acq_rel,
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
      const ClaimWord held{claim.claims[rank].load(std::memory_order_acquire)};
      if (held.held()) {
        if (claimable(slot)) return;
        ready_.withdraw(slot);
        if (claimable(slot)) ready_.offer(slot);  // SYNC R
        return;
      }
      const std::uint64_t due_ns = held.delayed() ? claim.not_before_ns[rank].load(std::memory_order_acquire) : 0;
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
    reclaim();
    drop_silent(now_ns);
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
  if (asked.most_attempts > kMostAttemptsAsked)
    fail(Fault::argument, std::to_string(asked.most_attempts) + " attempts, at most " +
                              std::to_string(kMostAttemptsAsked) + " are counted");
  heard();
  const std::lock_guard hold(candidates_mutex_);
  Candidates& list = candidates_[asked.rank];
  const std::uint64_t now_ns = monotonic_ns();
  std::size_t got = 0;
  std::uint64_t bytes = 0;
  bool looked = false;
  while (got < asked.most) {
    const bool used_up = list.next == list.found.size();
    const bool older = list.returned != header().returned.load(std::memory_order_acquire) || now_ns >= list.due_ns ||
                       now_ns - repaired_ns_ >= kRepairBusy_ns;
    if (used_up || (older && !looked)) {
      if (std::exchange(looked, true) && used_up) break;
      find_candidates(asked, now_ns);
      if (list.found.empty()) break;
      claimed.reserve(claimed.size() + std::min(asked.most - got, list.found.size()));  // no claim without its place
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
  const std::uint64_t length = c.bytes(segment_.identity.slot_capacity);
  const std::uint64_t deadline_ns = c.deadline_ns.load(std::memory_order_acquire);
  const std::int64_t version = s.policy_version.load(std::memory_order_acquire);
  std::atomic<std::uint32_t>& word = s.claims[rank];
  std::uint32_t expected = word.load(std::memory_order_acquire);
  const ClaimWord before{expected};
  // Written by the last holder before it dropped the claim.
  const std::uint64_t now_ns = monotonic_ns();
  const bool delayed = before.delayed() && s.not_before_ns[rank].load(std::memory_order_acquire) > now_ns;
  const bool late = deadline_ns != 0 && deadline_ns <= realtime_ns();
  const bool aged = version != kNoVersion && asked.oldest_version != kNoVersion && version < asked.oldest_version;
  const bool dead = asked.most_attempts != 0 && before.in_vain() >= asked.most_attempts;
  const bool ends = late || aged || dead;
  const ClaimWord after = ends ? before.ended_by(me) : before.claimed(me);
  const bool too_large = !ends && length > room;
  if (before.held() || delayed || too_large ||
      !word.compare_exchange_strong(expected, after.bits, std::memory_order_acq_rel, std::memory_order_acquire)) {
    drop_pin(slot, generation);
    return too_large ? Try::too_large : Try::gone;
  }
  own_claims_[slot] |= slot_word::bit(rank);
  own_attempts(slot, rank) = static_cast<std::uint16_t>(after.attempts());
  FAULT_POINT("claim.claimed");
  advance_if_expected(header().claimed);

  const ClaimId id{static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(generation), rank, after.attempts()};
  const std::uint64_t sequence = c.sequence.load(std::memory_order_acquire);
  if (ends) {
    const Ended how = late ? Ended::discarded : aged ? Ended::aged : Ended::dead;
    const std::string reason =
        late   ? "its deadline has passed"
        : aged ? "policy version " + std::to_string(version) + " is older than " + std::to_string(asked.oldest_version)
               : "claimed " + std::to_string(before.in_vain()) + " times in vain";
    if (end_held(slot, generation, rank, how, late)) log_failure(id, sequence, how, reason, asked.consumer);
    return Try::ended;
  }
  claimed = {id,
             c.reader_count(),
             before.in_vain(),
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

}  // namespace transport
