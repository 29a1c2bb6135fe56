// A ring in a file that no process has mapped: its processes have ended, and perhaps the host has, with its boot id, its
// process numbers and its monotonic clock. The locks of owners.hpp are a kernel's, so all of its owners count as dead.
//
// After a loss of power each page is as it was at some moment since it was synced last, each at its own. Nothing is
// believed of a payload but what its seal covers: the seal is a checksum of all that a publication stores, and of its
// generation. A slot was published if its seal fits its generation and the checksum its payload, whatever its word says:
// with `Kept::synced` both are on disk before the word becomes READY, and the word may not be.
//
//   word              whole                                   not whole
//   WRITING           READY: its writer was killed, or the    FREE, as by `reclaim`
//                     word was not on disk yet
//   READY, READING    READY, without claims                   FREE, counted as torn
//   FREE              FREE: it was consumed, or never published
//
// A payload that was consumed can be READY again after a loss of power. Its generation has not changed then, so the
// trainer's record (ConsumedRecord) refuses it. The word of a slot can be an older one, and no generation that a reader
// may have seen is given to another payload: a writer gives out only those up to `Header::granted`, which is on disk
// before the first of them is, and each writer begins above what it finds there.
#include <algorithm>
#include <array>
#include <cerrno>

#include <sys/mman.h>

#include "common/checksum.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"
#include "ring/change.hpp"
#include "ring/ring.hpp"

namespace transport {

namespace {
// Generations of each slot between two syncs of the header. A slot that was taken less often than others skips some.
constexpr std::uint32_t kGrant = 1 << 14;
}  // namespace

std::uint32_t Ring::least_generation() {
  if (!segment_.place.file) return 0;
  if (granted_.load(std::memory_order_relaxed) == 0) grant();
  return std::max(1u, (granted_.load(std::memory_order_relaxed) - kGrant + 1) & Word::kGenerationMask);
}

void Ring::grant() {
  const std::uint32_t granted = header().granted.fetch_add(kGrant, std::memory_order_relaxed) + kGrant;
  if (msync(segment_.mapping->control(), kHeaderBytes, MS_SYNC) != 0) fail_errno(errno, "msync", segment_.place.shown);
  granted_.store(granted, std::memory_order_relaxed);
}

// Nobody has seen the generation of a slot that is WRITING.
Lease Ring::granted(const Lease& taken) {
  if (!segment_.place.file || !slot_word::later(taken.generation, granted_.load(std::memory_order_relaxed)))
    return taken;
  try {
    grant();
  } catch (...) {
    abort(taken.slot, taken.generation);
    throw;
  }
  return taken;
}

std::uint64_t Ring::seal_of(std::uint64_t slot, std::uint32_t generation) const {
  constexpr std::size_t kFields = 9;
  const SlotControl& c = control(slot);
  const NoteWords& note = note_words(slot);
  const std::size_t note_bytes = c.note_bytes();
  const std::size_t note_count = (note_bytes + 7) / 8;
  std::array<std::uint64_t, kFields + kNoteCapacity / 8> words{
      slot,
      generation,
      c.length.load(std::memory_order_acquire),
      c.checksum.load(std::memory_order_acquire),
      c.sequence.load(std::memory_order_acquire),
      c.created_ns.load(std::memory_order_acquire),
      c.deadline_ns.load(std::memory_order_acquire),
      std::uint64_t{c.readers.load(std::memory_order_acquire)} << 32 | note_bytes,
      static_cast<std::uint64_t>(claims(slot).policy_version.load(std::memory_order_acquire))};
  for (std::size_t i = 0; i < note_count; ++i) words[kFields + i] = note[i].load(std::memory_order_acquire);
  return checksum(words.data(), (kFields + note_count) * sizeof(std::uint64_t));
}

bool Ring::whole(std::uint64_t slot, std::uint32_t generation) const {
  const SlotControl& c = control(slot);
  const std::uint64_t length = c.length.load(std::memory_order_acquire);
  return length <= segment_.identity.slot_capacity && c.readers.load(std::memory_order_acquire) == c.reader_count() &&
         c.seal.load(std::memory_order_acquire) == seal_of(slot, generation) &&
         c.checksum.load(std::memory_order_acquire) == checksum(payload(slot), length);
}

// By the keeper. Where an owner lives, the host has not gone, and the pages are as the processes left them.
void Ring::reopen() {
  if (!try_lock(fd(), kOwnerByte, off_t{kMaxOwners})) return;
  header().data.store(Data::none, std::memory_order_release);  // from here on nobody finds it before it begins
  segment_.forget_names();
  check_slots();
  FAULT_POINT("file.checked");
  for (unsigned owner = 0; owner < kMaxOwners; ++owner) {
    clear_bits(owner);
    row(owner).occupied.store(0, std::memory_order_relaxed);
  }
  // Claims whose pins another page had, and delays until a time of another boot's clock.
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    SlotControl& c = control(slot);
    const Word word{c.word.load(std::memory_order_relaxed)};
    if (!word.published()) continue;
    for (auto& claim : claims(slot).claims) {
      const ClaimWord held{claim.load(std::memory_order_relaxed)};
      claim.store(held.dropped(held.held()).bits, std::memory_order_relaxed);
    }
    change(c.word, [](Word now) { return slot_word::settled(now.generation(), now.done(), 0); });
  }
  unlock(fd(), kOwnerByte, off_t{kMaxOwners});
}

void Ring::check_slots() {
  std::uint64_t sequence = header().sequence.load(std::memory_order_relaxed);
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    SlotControl& c = control(slot);
    const Word word{c.word.load(std::memory_order_relaxed)};
    if (word.state() != State::writing && !word.unread()) continue;
    const std::uint32_t generation = word.generation();
    if (!whole(slot, generation)) {
      if (word.state() == State::writing)
        row().count(Counter::reclaimed_writing);
      else
        ++torn_;
      change(c.word, [&](Word) { return Step{Word::of(generation, State::free, 0, 0)}; });
      continue;
    }
    sequence = std::max(sequence, c.sequence.load(std::memory_order_relaxed));
    if (word.state() != State::writing) continue;
    row().count(Counter::publishes);
    const std::uint16_t done = slot_word::born_done(c.reader_count());
    change(c.word, [&](Word) { return Step{Word::of(generation, State::ready, done, 0)}; });
  }
  header().sequence.store(sequence, std::memory_order_relaxed);
  row().count(Counter::torn, torn_);
}

}  // namespace transport
