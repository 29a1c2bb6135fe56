// The transitions. An attachment's life is in ring_life.cpp; looking, telling and removing are in ring_look.cpp.
#include "ring/ring.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <unistd.h>

#include "ring/change.hpp"
#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"
#include "common/siphash.hpp"

namespace transport {

void Ring::require_open() const {
  if (closed()) fail(Fault::detached, segment_.name + (closed_ ? " is closed" : " belongs to the parent process"));
}
void Ring::require_owner() const {
  require_open();
  if (me_ < 0) fail(Fault::argument, "an observer has no owner number: it can neither write nor pin");
}
void Ring::require_slot(std::uint64_t slot) const {
  require_open();
  if (slot >= segment_.identity.slot_count)
    fail(Fault::argument,
         "slot " + std::to_string(slot) + " of a ring of " + std::to_string(segment_.identity.slot_count));
}
void Ring::require_rank(unsigned rank) {
  if (rank >= kMaxReaders) fail(Fault::argument, "rank " + std::to_string(rank) + ", ranks are 0 to 15");
}

OwnerRow& Ring::row(unsigned index) const {
  return reinterpret_cast<OwnerRow*>(segment_.mapping->control() + segment_.geometry.owners_offset)[index];
}
OwnerRow& Ring::row() const { return row(me_ < 0 ? kObserverRow : static_cast<unsigned>(me_)); }
SlotControl& Ring::control(std::uint64_t slot) const {
  return reinterpret_cast<SlotControl*>(segment_.mapping->control() + segment_.geometry.controls_offset)[slot];
}
NoteWords& Ring::note_words(std::uint64_t slot) const {
  return reinterpret_cast<NoteWords*>(segment_.mapping->control() + segment_.geometry.notes_offset)[slot];
}

// --- the writer's transitions --------------------------------------------------------------------

std::optional<Lease> Ring::try_take() {
  require_owner();
  const std::uint32_t least = least_generation();
  for (bool rebuilt = false;; rebuilt = true) {
    while (const auto slot = hints_.claim()) {
      FAULT_POINT("take.hinted");
      const Change changed =
          change(control(*slot).word, [&](Word old) { return slot_word::take(old, static_cast<unsigned>(me_), least); });
      if (!changed) continue;  // a stale hint
      FAULT_POINT("take.taken");
      row().count(Counter::takes);
      return granted({static_cast<std::uint32_t>(*slot), changed.after.generation()});
    }
    if (rebuilt) return std::nullopt;
    offer_free_slots();
  }
}

// Hints that a crash has lost come back here, before the ring is called full.
void Ring::offer_free_slots() {
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot)
    if (Word{control(slot).word.load(std::memory_order_relaxed)}.state() == State::free) hints_.offer_again(slot);
}

std::optional<Lease> Ring::try_overwrite() {
  require_owner();
  const std::uint32_t least = least_generation();
  for (;;) {
    std::optional<std::uint64_t> oldest;
    Word oldest_word;
    std::uint64_t oldest_sequence = ~std::uint64_t{0};
    for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
      const SlotControl& c = control(slot);
      const Word word{c.word.load(std::memory_order_acquire)};                    // SYNC S
      const std::uint64_t sequence = c.sequence.load(std::memory_order_acquire);  // SYNC F: checked by the swap below
      if (sequence >= oldest_sequence || !slot_word::overwrite(word, static_cast<unsigned>(me_))) continue;
      oldest = slot, oldest_word = word, oldest_sequence = sequence;
    }
    if (!oldest) return std::nullopt;
    const Change changed = change(control(*oldest).word, [&](Word old) {
      return old == oldest_word ? slot_word::overwrite(old, static_cast<unsigned>(me_), least)
                                : slot_word::refuse(Refusal::stale);
    });
    if (!changed) continue;  // pinned, consumed or overwritten meanwhile: look for the oldest again
    FAULT_POINT("overwrite.taken");
    row().count(Counter::overwrites);
    return granted({static_cast<std::uint32_t>(*oldest), changed.after.generation()});
  }
}

bool Ring::publish(std::uint64_t slot, std::uint64_t generation, const Publication& p) {
  if (!prepare(slot, generation, p)) return false;
  const Lease prepared{static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(generation)};
  return commit({&prepared, 1}) == 1;
}

bool Ring::prepare(std::uint64_t slot, std::uint64_t generation, const Publication& p) {
  require_owner();
  require_slot(slot);
  if (p.readers < 1 || p.readers > kMaxReaders)
    fail(Fault::argument, std::to_string(p.readers) + " readers, must be 1 to 16");
  if (p.length > segment_.identity.slot_capacity)
    fail(Fault::argument,
         std::to_string(p.length) + " bytes in a slot of " + std::to_string(segment_.identity.slot_capacity));
  if (p.note.size() > kNoteCapacity)
    fail(Fault::argument,
         "note of " + std::to_string(p.note.size()) + " bytes, at most " + std::to_string(kNoteCapacity));

  const auto me = static_cast<unsigned>(me_);
  SlotControl& c = control(slot);
  // While it is WRITING and ours, only we change the word: what holds now holds until the swap.
  if (!slot_word::publish(Word{c.word.load(std::memory_order_relaxed)}, generation, me, p.readers)) return false;
  c.length.store(p.length, std::memory_order_release);  // SYNC F, as all that follow
  c.checksum.store(p.checksum, std::memory_order_release);
  c.readers.store(p.readers, std::memory_order_release);
  c.deadline_ns.store(p.deadline_ns, std::memory_order_release);
  c.created_ns.store(realtime_ns(), std::memory_order_release);
  c.sequence.store(header().sequence.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_release);
  c.note_length.store(static_cast<std::uint32_t>(p.note.size()), std::memory_order_release);
  NoteWords& words = note_words(slot);
  for (std::size_t i = 0; i * 8 < p.note.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, p.note.data() + i * 8, std::min<std::size_t>(8, p.note.size() - i * 8));
    words[i].store(word, std::memory_order_release);
  }
  clear_claims(slot, p.policy_version);
  if (segment_.place.file)
    c.seal.store(seal_of(slot, static_cast<std::uint32_t>(generation)), std::memory_order_release);
  return true;
}

std::size_t Ring::commit(std::span<const Lease> prepared) {
  require_owner();
  FAULT_POINT("publish.written");
  if (synced() && !prepared.empty() && fdatasync(fd()) != 0) {
    const int error = errno;
    for (const Lease& each : prepared) control(each.slot).seal.store(0, std::memory_order_release);
    fail_errno(error, "fdatasync", segment_.place.shown);
  }
  FAULT_POINT("publish.synced");
  std::size_t published = 0;
  for (const Lease& each : prepared) {
    SlotControl& c = control(each.slot);
    const unsigned readers = c.reader_count();
    const std::uint64_t length = c.bytes(segment_.identity.slot_capacity);
    if (!change(c.word, [&](Word old) {
          return slot_word::publish(old, each.generation, static_cast<unsigned>(me_), readers);
        }))
      continue;
    FAULT_POINT("publish.published");
    row().count(Counter::publishes);
    row().count(Counter::bytes_published, length);
    ready_.offer(each.slot);  // SYNC R
    advance(header().published);
    ++published;
  }
  return published;
}

bool Ring::synced() const { return header().kept.load(std::memory_order_relaxed) == Kept::synced; }

bool Ring::abort(std::uint64_t slot, std::uint64_t generation) {
  require_owner();
  require_slot(slot);
  if (!change(control(slot).word,
              [&](Word old) { return slot_word::abort(old, generation, static_cast<unsigned>(me_)); }))
    return false;
  FAULT_POINT("abort.freed");
  row().count(Counter::aborts);
  freed(slot);
  return true;
}

// --- the readers' transitions --------------------------------------------------------------------

PinAnswer Ring::pin(std::uint64_t slot, std::uint64_t generation, unsigned rank) {
  require_owner();
  require_slot(slot);
  require_rank(rank);
  const std::lock_guard hold(stripe(slot));
  const auto transition = [&](Word old) { return slot_word::pin(old, generation, static_cast<unsigned>(me_), rank); };
  std::atomic<std::uint64_t>& word = control(slot).word;
  // Our bit is there already: the memory cannot go, so to look is enough.
  const Refusal refusal = own_pins_[slot] > 0
                              ? transition(Word{word.load(std::memory_order_acquire)}).refusal  // SYNC S
                              : change(word, transition).refusal;
  if (refusal != Refusal::none) {
    row().count(Counter::stale_pins);
    return refusal == Refusal::done ? PinAnswer::done : PinAnswer::stale;
  }
  FAULT_POINT("pin.pinned");
  ++own_pins_[slot];
  row().count(Counter::pins);
  return PinAnswer::ok;
}

ReadAnswer Ring::begin_read(const Wanted& wanted) {
  require_owner();
  if (wanted.slot >= segment_.identity.slot_count || wanted.generation > Word::kGenerationMask)
    return ReadAnswer::stale;  // of a larger ring, or of none
  const auto slot = static_cast<std::uint32_t>(wanted.slot), generation = static_cast<std::uint32_t>(wanted.generation);
  if (wanted.key != slot_key(segment_.identity.secret, slot, generation)) return ReadAnswer::wrong_key;
  const PinAnswer answer = pin(slot, generation, wanted.rank);
  if (answer != PinAnswer::ok) return static_cast<ReadAnswer>(answer);
  const SlotControl& c = control(slot);  // does not change while it is pinned
  const std::uint64_t deadline_ns = c.deadline_ns.load(std::memory_order_acquire);
  if (deadline_ns != 0 && deadline_ns <= realtime_ns()) {
    unpin(slot, generation);
    discard(slot, generation);
    return ReadAnswer::expired;
  }
  if (c.length.load(std::memory_order_acquire) != wanted.length || wanted.length > segment_.identity.slot_capacity) {
    unpin(slot, generation);
    return ReadAnswer::other_length;
  }
  return ReadAnswer::ok;
}

bool Ring::pin_again(std::uint64_t slot) {
  require_owner();
  require_slot(slot);
  const std::lock_guard hold(stripe(slot));
  if (own_pins_[slot] == 0) return false;
  ++own_pins_[slot];
  row().count(Counter::pins);
  return true;
}

bool Ring::unpin(std::uint64_t slot, std::uint64_t generation) {
  require_owner();
  require_slot(slot);
  const std::lock_guard hold(stripe(slot));
  const auto transition = [&](Word old) { return slot_word::unpin(old, generation, static_cast<unsigned>(me_)); };
  std::atomic<std::uint64_t>& word = control(slot).word;
  std::uint32_t& mine = own_pins_[slot];
  const Word now{word.load(std::memory_order_relaxed)};
  const bool last = mine == 1;
  const Change changed = !plainly_pinned(slot) ? Change{now, now, Refusal::not_mine}
                         : last                ? change(word, transition)
                                               : Change{now, now, transition(now).refusal};
  if (!changed) {
    row().count(Counter::late_finalises);
    return false;
  }
  --mine;
  row().count(Counter::unpins);
  if (!last) return true;
  FAULT_POINT("unpin.unpinned");
  if (changed.freed()) freed(slot);
  return true;
}

bool Ring::consume(std::uint64_t slot, std::uint64_t generation, unsigned rank) {
  require_slot(slot);
  require_rank(rank);
  const Change changed =
      change(control(slot).word, [&](Word old) { return slot_word::consume(old, generation, rank); });
  if (!changed) {
    row().count(Counter::late_finalises);
    return false;
  }
  FAULT_POINT("consume.consumed");
  row().count(Counter::consumes);
  tally(rank, Tally::done);
  if (changed.freed()) freed(slot);
  return true;
}

bool Ring::mark_consumed(std::uint64_t slot, std::uint64_t generation, unsigned rank) {
  require_owner();
  require_slot(slot);
  require_rank(rank);
  const std::lock_guard hold(stripe(slot));
  std::uint32_t& mine = own_pins_[slot];
  const auto me = static_cast<unsigned>(me_);
  const Change changed = change(control(slot).word, [&](Word old) {
    return !plainly_pinned(slot) ? slot_word::refuse(Refusal::not_mine)
           : mine == 1           ? slot_word::mark_consumed(old, generation, me, rank)
                                 : slot_word::consume(old, generation, rank);
  });
  if (!changed) {
    row().count(Counter::late_finalises);
    return false;
  }
  FAULT_POINT("mark_consumed.marked");
  --mine;
  row().count(Counter::consumes);
  tally(rank, Tally::done);
  row().count(Counter::unpins);
  if (changed.freed()) freed(slot);
  return true;
}

bool Ring::discard(std::uint64_t slot, std::uint64_t generation) {
  require_slot(slot);
  const Change changed = change(control(slot).word, [&](Word old) { return slot_word::discard(old, generation); });
  if (!changed) return false;
  FAULT_POINT("discard.discarded");
  row().count(Counter::discards);
  for (unsigned rank = 0; rank < kMaxReaders; ++rank)
    if ((changed.before.done() & slot_word::bit(rank)) == 0) tally(rank, Tally::discarded);
  if (changed.freed()) freed(slot);
  return true;
}

unsigned Ring::discard_unread() {
  unsigned discarded = 0;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    const SlotInfo seen = info(slot);
    if (seen.state == State::ready || seen.state == State::reading) discarded += discard(slot, seen.generation);
  }
  return discarded;
}

// Tells of a slot whose word has just become FREE. Dying in here loses a hint, which try_take finds
// again, or a wake-up, which sleepers do without after a re-check interval.
void Ring::freed(std::uint64_t slot) {
  FAULT_POINT("free.unhinted");
  hints_.offer(slot);
  FAULT_POINT("free.unannounced");
  advance(header().freed);
}

// --- death ---------------------------------------------------------------------------------------

// The caller holds the lock on `owner`'s byte: as its owner, or as the one who proved it dead.
Ring::Cleared Ring::clear_bits(unsigned owner) {
  decide_all(owner);
  Cleared cleared;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) clear_slot(slot, owner, cleared);
  return cleared;
}

void Ring::clear_slot(std::uint64_t slot, unsigned owner, Cleared& cleared) {
  std::atomic<std::uint64_t>& word = control(slot).word;
  const Word held{word.load(std::memory_order_acquire)};  // SYNC S: the claims are those of its generation
  if (!held.pinned_by(owner)) return;
  if (held.state() == State::reading) disclaim(slot, owner, held.done());  // before the bit, by which they are found
  const Change changed = change(word, [owner](Word old) { return slot_word::reclaim(old, owner); });
  if (!changed) return;
  FAULT_POINT("reclaim.cleared");
  ++(changed.before.state() == State::writing ? cleared.writing : cleared.reading);
  if (changed.freed())
    freed(slot);
  else if (changed.before.state() == State::reading)
    returned(slot);
}

unsigned Ring::reclaim() {
  require_open();
  std::uint16_t suspects = 0;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot)
    suspects |= Word{control(slot).word.load(std::memory_order_relaxed)}.pins();
  for (unsigned index = 0; index < kMaxOwners; ++index)
    if (row(index).occupied.load(std::memory_order_relaxed) != 0) suspects |= slot_word::bit(index);
  for (unsigned index = 0; index < kTakers; ++index)
    if (const auto state = taker(index).state.load(std::memory_order_relaxed);
        TakerEntry::phase_of(state) == TakerEntry::live && TakerEntry::owner_of(state) < kMaxOwners)
      suspects |= slot_word::bit(TakerEntry::owner_of(state));

  unsigned slots = 0;
  const std::lock_guard hold(locks_mutex_);
  for (unsigned index = 0; index < kMaxOwners; ++index) {
    if (static_cast<int>(index) == me_ || (suspects & slot_word::bit(index)) == 0) continue;
    const auto dead = DeadOwner::prove(fd(), index);
    if (!dead) continue;
    FAULT_POINT("reclaim.proven");
    const Cleared cleared = clear_bits(dead->index());
    row().count(Counter::reclaimed_writing, cleared.writing);
    row().count(Counter::reclaimed_reading, cleared.reading);
    slots += cleared.writing + cleared.reading;
    row(index).occupied.store(0, std::memory_order_relaxed);
    FAULT_POINT("reclaim.vacated");
  }
  return slots;
}

}  // namespace transport
