// What became of the claims that remote consumers finished: so that one whose connection broke between its FINISH and
// the answer can still find out, from any port of the ring, also when the listener was killed. The same of END.
//
// An entry belongs to one connection, which is named by its token, and has its last finishes, one word each. A client
// leaves at most kFinishesKept of them unanswered, so what it may ask about has not been written over.
//
//   entry    EMPTY ──▶ BUILDING ──▶ LIVE ──its client has left──▶ OVER ──▶ BUILDING, for another connection
//                                     └──owner dead or stopped, or the client asked to come again──▶ LOST ──▶ BUILDING
//   finish   noted undecided ──▶ the rank's done bit, the pin stays ──▶ noted accepted or refused ──▶ the pin goes
//
// The client of a LOST entry comes again through another connection, and is expected for kComesAgain_ns.
//
// An owner that dies leaves undecided ones, and its pins. A reclaimer decides them before it clears a pin:
// until then the generation stays, and the slot's word says whether the rank was consumed.
// A question revokes the entry first: a FINISH that is still on its way is refused, so that the answer stays true.
// SYNC V: note then look at `revoked`, and revoke then look at the notes, all sequentially consistent. Either the
// finisher sees that it is revoked, or the asking process sees the note, and waits until it is decided.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ring/claim_word.hpp"

namespace transport {

enum class Outcome : std::uint8_t { unknown = 0, undecided = 1, accepted = 2, refused = 3 };

// What was asked for. A question about one is never answered with another.
enum class Asking : std::uint8_t { finish = 0, end = 1 };

//    63  62       41 40       17 16   13   12     11 0
//   | outcome 2 | generation 21 | slot 24 | rank 4 | asking | attempts 12 |
//
// Of the attempts and of the generation the lower bits: no claim is so old. OUTCOME asks with kEndAsked in the attempts.
inline constexpr unsigned kEndAsked = 1u << 15;

struct FinishNote {
  static constexpr std::uint64_t kGeneration = (std::uint64_t{1} << 21) - 1;
  static constexpr unsigned kAskingShift = 12, kAttempts = (1u << kAskingShift) - 1;

  std::uint64_t bits = 0;

  static constexpr FinishNote of(const ClaimId& claim, Asking asking, Outcome outcome) {
    return {std::uint64_t{static_cast<std::uint8_t>(outcome)} << 62 | (claim.generation & kGeneration) << 41 |
            std::uint64_t{claim.slot} << 17 | std::uint64_t{claim.rank} << 13 |
            std::uint64_t{static_cast<std::uint8_t>(asking)} << kAskingShift | (claim.attempts & kAttempts)};
  }
  constexpr Outcome outcome() const { return static_cast<Outcome>(bits >> 62); }
  constexpr std::uint64_t generation() const { return bits >> 41 & kGeneration; }
  constexpr std::uint64_t slot() const { return bits >> 17 & 0xFFFFFF; }
  constexpr unsigned rank() const { return bits >> 13 & 0xF; }
  constexpr Asking asking() const { return static_cast<Asking>(bits >> kAskingShift & 1); }
  constexpr unsigned attempts() const { return bits & kAttempts; }
  constexpr FinishNote decided(bool accepted) const {
    constexpr std::uint64_t kRest = ~std::uint64_t{0} >> 2;
    return {std::uint64_t{static_cast<std::uint8_t>(accepted ? Outcome::accepted : Outcome::refused)} << 62 |
            (bits & kRest)};
  }
  constexpr bool same_claim(FinishNote other) const { return (bits ^ other.bits) << 2 == 0; }
};
static_assert(kMaxReaders <= 1u << 4 && ClaimWord::kMostAttempts < kEndAsked, "rank and attempts have room");

inline constexpr std::size_t kTakers = 128;        // connections of all listeners of a ring, together
inline constexpr std::size_t kFinishesKept = 256;  // of each
inline constexpr std::uint64_t kComesAgain_ns = 4'000'000'000;  // a listener that was killed is started again by then

struct alignas(64) TakerEntry {
  enum Phase : std::uint8_t { empty = 0, building = 1, live = 2, over = 3, lost = 4 };

  std::atomic<std::uint64_t> state;  // uses so far << 16 | owner << 8 | phase
  std::atomic<std::uint64_t> token;
  std::atomic<std::uint64_t> used_ns;  // CLOCK_MONOTONIC, by its connection; of one that is lost, since when
  std::atomic<std::uint64_t> next;     // finishes so far
  std::atomic<std::uint32_t> revoked;
  alignas(64) std::array<std::atomic<std::uint64_t>, kFinishesKept> notes;

  static constexpr Phase phase_of(std::uint64_t state) { return static_cast<Phase>(state & 0xFF); }
  static constexpr unsigned owner_of(std::uint64_t state) { return state >> 8 & 0xFF; }
  static constexpr std::uint64_t in(std::uint64_t state, Phase phase) { return (state & ~std::uint64_t{0xFF}) | phase; }
  static constexpr std::uint64_t begun(std::uint64_t state, unsigned owner) {
    return ((state >> 16) + 1) << 16 | std::uint64_t{owner} << 8 | building;
  }
};
static_assert(sizeof(TakerEntry) == 64 + 8 * kFinishesKept, "a line, and the notes");

}  // namespace transport
