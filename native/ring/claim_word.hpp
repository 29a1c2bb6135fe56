// The claim word: whose hands one rank's delivery of a payload is in, and how often it was claimed, in 16 bits.
//
//    15        5 4       0
//   | attempts  | holder  |      holder: none (0), or 1 + the owner's place
//
//   operation   from                 to                        by whom
//   ----------  -------------------  ------------------------  --------------------------------------------------
//   claim       none                 me, attempts + 1          an owner whose pin stands in the slot's word
//   hold        none                 me                        the same; to end the delivery, which is no attempt
//   drop        holder               none                      the process that clears the holder's pin, before it
//   lapse       holder               none                      any owner, of a holder silent for longer than its lease
//   (publish)   anything             none, 0                   the writer, before the slot is READY
//
// So a claim is a pin and this word, and a rank that is not done and held by an owner has that owner's pin beside it:
// no claim is lost, because a process that finds the dead owner's bit finds its claims by it. A rank that is done keeps
// its word until the next publish; it is not read any more.
// A claim that lapses leaves its holder's pin, which protects the memory until the holder asks and is refused; the done
// bit decides between it and the next one.
// The attempts are the fence: (holder, attempts) was never another claim of this generation and rank.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ring/slot_word.hpp"

namespace transport {

struct ClaimWord {
  static constexpr unsigned kHolderBits = 5;
  static constexpr std::uint16_t kHolderMask = (1u << kHolderBits) - 1;
  static constexpr unsigned kMostAttempts = (1u << (16 - kHolderBits)) - 1;

  std::uint16_t bits = 0;

  static constexpr ClaimWord of(unsigned attempts, unsigned holder) {
    return {static_cast<std::uint16_t>(attempts << kHolderBits | holder)};
  }
  constexpr unsigned holder() const { return bits & kHolderMask; }
  constexpr unsigned attempts() const { return bits >> kHolderBits; }
  constexpr bool held() const { return holder() != 0; }
  constexpr bool held_by(unsigned owner) const { return holder() == owner + 1; }

  // The holder that gave it back for the last time that can be counted has the last number; the next holder has it, too.
  constexpr ClaimWord claimed(unsigned me) const { return of(std::min(attempts() + 1, kMostAttempts), me + 1); }
  constexpr ClaimWord ended_by(unsigned me) const { return of(attempts(), me + 1); }
  constexpr ClaimWord dropped() const { return of(attempts(), 0); }

  friend constexpr bool operator==(ClaimWord, ClaimWord) = default;
};
static_assert(kMaxOwners < (1u << ClaimWord::kHolderBits), "a holder is one of the owners, or none");
static_assert(ClaimWord{}.attempts() == 0 && !ClaimWord{}.held(), "a zero-filled segment has no claims");

}  // namespace transport
