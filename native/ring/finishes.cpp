// What became of the claims that remote consumers finished (finishes.hpp).
#include "ring/finishes.hpp"

#include "common/clock.hpp"
#include "common/fault.hpp"
#include "ring/ring.hpp"

namespace transport {

TakerEntry& Ring::taker(unsigned index) const {
  return reinterpret_cast<TakerEntry*>(segment_.mapping->control() + segment_.geometry.takers_offset)[index];
}

// --- the connection's side ---------------------------------------------------------------------------

int Ring::open_taker(std::uint64_t token) {
  require_owner();
  for (;;) {  // each turn that ends without an entry is one in which somebody else opened or ended one
    int oldest = -1;
    std::uint64_t oldest_state = 0, oldest_ns = ~std::uint64_t{0};
    for (unsigned index = 0; index < kTakers; ++index) {
      const TakerEntry& entry = taker(index);
      const std::uint64_t state = entry.state.load(std::memory_order_acquire);
      const TakerEntry::Phase phase = TakerEntry::phase_of(state);
      if (phase == TakerEntry::building || phase == TakerEntry::live) continue;
      const std::uint64_t used_ns = phase == TakerEntry::empty ? 0 : entry.used_ns.load(std::memory_order_relaxed);
      if (used_ns >= oldest_ns) continue;
      oldest = static_cast<int>(index), oldest_state = state, oldest_ns = used_ns;
    }
    if (oldest < 0) return -1;
    TakerEntry& entry = taker(static_cast<unsigned>(oldest));
    const std::uint64_t building = TakerEntry::begun(oldest_state, static_cast<unsigned>(me_));
    if (!entry.state.compare_exchange_strong(oldest_state, building, std::memory_order_acq_rel)) continue;
    FAULT_POINT("taker.building");
    entry.token.store(token, std::memory_order_relaxed);
    entry.used_ns.store(monotonic_ns(), std::memory_order_relaxed);
    entry.next.store(0, std::memory_order_relaxed);
    entry.revoked.store(0, std::memory_order_relaxed);
    for (auto& note : entry.notes) note.store(0, std::memory_order_relaxed);
    entry.state.store(TakerEntry::in(building, TakerEntry::live), std::memory_order_release);
    return oldest;
  }
}

void Ring::close_taker(int index) {
  if (index < 0 || closed()) return;
  TakerEntry& entry = taker(static_cast<unsigned>(index));
  entry.state.store(TakerEntry::in(entry.state.load(std::memory_order_relaxed), TakerEntry::over),
                    std::memory_order_release);
}

void Ring::lose_taker(int index) {
  if (index < 0 || closed()) return;
  TakerEntry& entry = taker(static_cast<unsigned>(index));
  std::uint64_t state = entry.state.load(std::memory_order_acquire);
  entry.used_ns.store(monotonic_ns(), std::memory_order_relaxed);
  entry.state.compare_exchange_strong(state, TakerEntry::in(state, TakerEntry::lost), std::memory_order_acq_rel);
}

unsigned Ring::takers() {
  reclaim();  // connections of a listener that died are lost from now on, and not between its death and the next look
  const std::uint64_t now_ns = monotonic_ns();
  unsigned expected = 0;
  for (unsigned index = 0; index < kTakers; ++index) {
    const TakerEntry& entry = taker(index);
    const TakerEntry::Phase phase = TakerEntry::phase_of(entry.state.load(std::memory_order_acquire));
    expected += phase == TakerEntry::live ||
                (phase == TakerEntry::lost &&
                 now_ns < entry.used_ns.load(std::memory_order_relaxed) + kComesAgain_ns);
  }
  return expected;
}

// Under the slot's stripe, by the one thread that serves the connection. Null: it is revoked.
std::atomic<std::uint64_t>* Ring::note_finish(int index, const ClaimId& claim, Asking asking) {
  TakerEntry& entry = taker(static_cast<unsigned>(index));
  const std::uint64_t number = entry.next.load(std::memory_order_relaxed);
  entry.next.store(number + 1, std::memory_order_relaxed);
  entry.used_ns.store(monotonic_ns(), std::memory_order_relaxed);
  std::atomic<std::uint64_t>& note = entry.notes[number % kFinishesKept];
  const FinishNote undecided = FinishNote::of(claim, asking, Outcome::undecided);
  note.store(undecided.bits, std::memory_order_seq_cst);  // SYNC V
  FAULT_POINT("outcome.noted");
  if (entry.revoked.load(std::memory_order_seq_cst) == 0) return &note;  // SYNC V
  note.store(undecided.decided(false).bits, std::memory_order_release);
  return nullptr;
}

void Ring::decide(std::atomic<std::uint64_t>& note, bool accepted) {
  note.store(FinishNote{note.load(std::memory_order_relaxed)}.decided(accepted).bits, std::memory_order_release);
  FAULT_POINT("outcome.decided");
}

// --- the other side ------------------------------------------------------------------------------------

// Called by the holder of the owner's byte, before any of its pins is cleared.
void Ring::decide_all(unsigned owner) {
  for (unsigned index = 0; index < kTakers; ++index) {
    TakerEntry& entry = taker(index);
    std::uint64_t state = entry.state.load(std::memory_order_acquire);
    if (TakerEntry::owner_of(state) != owner) continue;
    if (TakerEntry::phase_of(state) == TakerEntry::building)
      entry.state.compare_exchange_strong(state, TakerEntry::in(state, TakerEntry::empty), std::memory_order_acq_rel);
    if (TakerEntry::phase_of(state) != TakerEntry::live) continue;
    for (auto& note : entry.notes) {
      const FinishNote seen{note.load(std::memory_order_acquire)};
      if (seen.outcome() == Outcome::undecided && seen.slot() < segment_.identity.slot_count)
        decide(note, consumed_under(seen, owner));
    }
    lose_taker(static_cast<int>(index));
  }
}

// Whether a dead owner has consumed what it had noted: its pin keeps the generation. A ticket's reader that consumed
// the same rank in the moment between its note and its death would be taken for it.
bool Ring::consumed_under(FinishNote note, unsigned owner) const {
  const Word word{control(note.slot()).word.load(std::memory_order_acquire)};  // SYNC S
  const ClaimWord claim{claims(note.slot()).claims[note.rank()].load(std::memory_order_acquire)};
  return word.pinned_by(owner) && (word.generation() & FinishNote::kGeneration) == note.generation() &&
         word.state() == State::reading && (word.done() & slot_word::bit(note.rank())) != 0 &&
         claim.held_by(owner) && (claim.attempts() & FinishNote::kAttempts) == note.attempts();
}

Outcome Ring::outcome(std::uint64_t token, const ClaimId& claim) {
  require_open();
  if (claim.slot >= segment_.identity.slot_count || claim.rank >= kMaxReaders) return Outcome::unknown;
  const Asking asking = (claim.attempts & kEndAsked) != 0 ? Asking::end : Asking::finish;
  const FinishNote asked = FinishNote::of(claim, asking, Outcome::unknown);
  Outcome told = Outcome::unknown;
  for (unsigned index = 0; index < kTakers; ++index) {  // it has another one if it was asked to come again, and went on
    TakerEntry& entry = taker(index);
    const std::uint64_t state = entry.state.load(std::memory_order_acquire);
    const TakerEntry::Phase phase = TakerEntry::phase_of(state);
    if (phase == TakerEntry::empty || phase == TakerEntry::building) continue;
    if (entry.token.load(std::memory_order_acquire) != token) continue;
    if (phase == TakerEntry::live) entry.revoked.store(1, std::memory_order_seq_cst);  // SYNC V
    Outcome found = Outcome::refused;  // it never came, or was refused without a note
    for (const auto& note : entry.notes) {
      const FinishNote seen{note.load(std::memory_order_seq_cst)};  // SYNC V
      if (seen.outcome() == Outcome::unknown || !seen.same_claim(asked)) continue;
      found = seen.outcome();
      if (found != Outcome::refused) break;
    }
    if (entry.state.load(std::memory_order_acquire) >> 16 != state >> 16) continue;  // another connection's by now
    if (found != Outcome::refused) return found;
    told = Outcome::refused;
  }
  return told;
}

}  // namespace transport
