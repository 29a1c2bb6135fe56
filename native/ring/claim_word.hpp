// The claim word: whose hands one rank's delivery of a payload is in, and how often it was claimed, in 32 bits.
//
//    31      18 17        6     5     4       0
//   | attempts | in vain   | delayed | holder  |      holder: none (0), or 1 + the owner's place
//
//   operation   from                 to                        by whom
//   ----------  -------------------  ------------------------  --------------------------------------------------
//   claim       none                 me, attempts + 1          an owner whose pin stands in the slot's word
//   hold        none                 me, ending                the same; to end the delivery, which is no attempt
//   drop        holder               none                      the process that clears the holder's pin, before it
//   end         me                   me, ending                the holder, before it sets the rank's done bit
//   lapse       holder, not ending   none                      any owner, of a holder silent for longer than its lease
//   (publish)   anything             none, 0                   the writer, before the slot is READY
//
// So a claim is a pin and this word, and a rank that is not done and held by an owner has that owner's pin beside it:
// no claim is lost, because a process that finds the dead owner's bit finds its claims by it. A rank that is done keeps
// its word until the next publish; it is not read any more.
// A claim that lapses leaves its holder's pin, which protects the memory until the holder asks and is refused; the done
// bit decides between it and the next one.
// The attempts are the fence: (holder, attempts) was not another claim of this generation and rank for 16 000 claims.
// Claims that end count in vain, unless their payload was given back unread. `delayed`: not to be claimed before a time
// that stands beside the word.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ring/slot_word.hpp"

namespace transport {

// One claim: `attempts` tells it from every other of the same delivery.
struct ClaimId {
  std::uint32_t slot, generation;
  unsigned rank, attempts;
};

struct ClaimWord {
  static constexpr unsigned kHolderBits = 5, kVainBits = 12, kAttemptBits = 14;
  static constexpr unsigned kVainShift = kHolderBits + 1, kAttemptShift = kVainShift + kVainBits;
  static constexpr std::uint32_t kHolderMask = (1u << kHolderBits) - 1, kDelayed = 1u << kHolderBits;
  static constexpr unsigned kMostInVain = (1u << kVainBits) - 1, kMostAttempts = (1u << kAttemptBits) - 1;

  std::uint32_t bits = 0;

  static constexpr ClaimWord of(unsigned attempts, unsigned in_vain, unsigned holder, bool delayed = false) {
    return {attempts << kAttemptShift | in_vain << kVainShift | (delayed ? kDelayed : 0) | holder};
  }
  constexpr unsigned holder() const { return bits & kHolderMask; }
  constexpr unsigned attempts() const { return bits >> kAttemptShift; }
  constexpr unsigned in_vain() const { return bits >> kVainShift & kMostInVain; }
  constexpr bool delayed() const { return (bits & kDelayed) != 0; }
  constexpr bool ending() const { return held() && delayed(); }  // the same bit, of a claim
  constexpr bool held() const { return holder() != 0; }
  constexpr bool held_by(unsigned owner) const { return holder() == owner + 1; }

  constexpr ClaimWord claimed(unsigned me) const { return of(attempts() % kMostAttempts + 1, in_vain(), me + 1); }
  constexpr ClaimWord to_end() const { return of(attempts(), in_vain(), holder(), true); }
  constexpr ClaimWord ended_by(unsigned me) const { return of(attempts(), in_vain(), me + 1, true); }
  constexpr ClaimWord dropped(bool counts, bool delayed = false) const {
    return of(attempts(), std::min(in_vain() + counts, kMostInVain), 0, delayed);
  }

  friend constexpr bool operator==(ClaimWord, ClaimWord) = default;
};
static_assert(ClaimWord::kAttemptShift + ClaimWord::kAttemptBits == 32, "the word is full");
static_assert(kMaxOwners < (1u << ClaimWord::kHolderBits), "a holder is one of the owners, or none");
static_assert(ClaimWord{}.attempts() == 0 && !ClaimWord{}.held(), "a zero-filled segment has no claims");

}  // namespace transport
