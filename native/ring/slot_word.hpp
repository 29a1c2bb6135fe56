// The slot word: which process may do what with a slot, in 64 bits that change only by compare-and-swap.
//
//    63           34  33 32  31          16  15           0
//   | generation 30 | state | done, a bit   | pins, a bit   |
//   |               |       | for each rank | for each owner|
//
//   operation      from                           to                                    refused
//   -------------  -----------------------------  ------------------------------------  -----------------------------
//   take           FREE                           WRITING, generation+1, done=∅,        not FREE
//                                                 pins={me}
//   overwrite      READY                          WRITING, generation+1, done=∅,        an owner pins, or not
//                                                 pins={me}                             published
//   publish        WRITING, pins={me}             READY, done={ranks ≥ readers},        not mine
//                                                 pins=∅
//   abort          WRITING, pins={me}             FREE                                  not mine
//   pin            READY or READING, rank not     READING, pins∪{me}                    stale, or this rank is done
//                  done
//   unpin          READING, I pin                 pins−{me}, settled                    stale, or I do not pin
//   consume        READY or READING, rank not     done∪{rank}, settled                  stale, or this rank is done
//                  done
//   mark_consumed  READING, I pin, rank not done  done∪{rank}, pins−{me}, settled       as consume or unpin
//   discard        READY or READING, some rank    done=all, settled                     stale, or all ranks are done
//                  not done
//   reclaim        the dead owner's bit in pins   WRITING → FREE; READING → pins−{it},  it does not pin
//                                                 settled
//
// "settled": with pins, READING; without, READY, or FREE once every rank is done. Every operation but
// take, overwrite and reclaim names its generation, and another one is refused as stale. READING is
// therefore "published and pinned", and a payload is consumed (done) independently of whether its
// memory is still being read (pins).
//
// Who makes a slot READY again when its reader is killed. Of a reader that maps the ring: the first to call
// `Ring::reclaim`, which is a consumer that claims (`Ring::find_candidates`), a writer that waits for a slot,
// or the next owner of its place; its claims end in the same step (`Ring::clear_slot`). Of a reader over the
// network: the listener, when the connection ends (`Service::end` of ucp/attempts.cpp), which unpins what was
// read and gives back what was claimed. Of a listener that is killed: its supervisor, by `reclaim`.
// A slot that a killed writer was writing is FREE by the same calls of `reclaim`: a consumer's that claims, another
// writer's that waits for a slot, or that of the writer that takes the ring over.
//
// Ranks that a payload was not written for start as done, so "every rank is done" is done == all.
// FREE keeps the done bits of what the slot held last: all set tells a consumed or discarded payload
// from one that was never published. Generation 0 is a slot that was never taken.
//
// Nothing here touches memory: each transition maps an old word to a new one or to a refusal, and
// Ring (ring.cpp) applies it with one compare-and-swap. Nothing else writes a state.
#pragma once

#include <cstdint>

namespace transport {

inline constexpr unsigned kMaxReaders = 16;
inline constexpr unsigned kMaxOwners = 16;

enum class State : std::uint8_t { free = 0, writing = 1, ready = 2, reading = 3 };

enum class Refusal : std::uint8_t {
  none,
  state,     // the slot's state does not allow the operation
  stale,     // another generation, or not published
  done,      // this rank (or every rank) is done
  not_mine,  // this owner does not hold the slot
  pinned,    // another owner reads it
};

struct Word {
  static constexpr unsigned kDoneShift = 16, kStateShift = 32, kGenerationShift = 34;
  static constexpr std::uint16_t kAll = 0xFFFF;
  static constexpr std::uint32_t kGenerationMask = (std::uint32_t{1} << 30) - 1;

  std::uint64_t bits = 0;

  static constexpr Word of(std::uint32_t generation, State state, std::uint16_t done, std::uint16_t pins) {
    return {std::uint64_t{generation & kGenerationMask} << kGenerationShift |
            std::uint64_t{static_cast<std::uint8_t>(state)} << kStateShift | std::uint64_t{done} << kDoneShift |
            std::uint64_t{pins}};
  }
  constexpr std::uint32_t generation() const { return static_cast<std::uint32_t>(bits >> kGenerationShift); }
  constexpr State state() const { return static_cast<State>(bits >> kStateShift & 3); }
  constexpr std::uint16_t done() const { return static_cast<std::uint16_t>(bits >> kDoneShift); }
  constexpr std::uint16_t pins() const { return static_cast<std::uint16_t>(bits); }

  constexpr bool published() const { return state() == State::ready || state() == State::reading; }
  constexpr bool unread() const { return published() && done() != kAll; }  // by a rank that it was written for
  // Length, checksum and the other fields beside the word belong to this generation.
  constexpr bool was_published() const { return published() || (state() == State::free && done() == kAll); }
  constexpr bool pinned_by(unsigned owner) const { return (pins() >> owner & 1) != 0; }

  friend constexpr bool operator==(Word, Word) = default;
};

static_assert(Word::of(Word::kGenerationMask, State::reading, Word::kAll, Word::kAll).bits == ~std::uint64_t{0},
              "the four fields fill the word without gap or overlap");
static_assert(kMaxReaders == 16 && kMaxOwners == 16, "done and pins have sixteen bits each");
static_assert(Word{}.state() == State::free, "a zero-filled segment holds free slots");

struct Step {
  Word next;
  Refusal refusal = Refusal::none;
  constexpr explicit operator bool() const { return refusal == Refusal::none; }
};

namespace slot_word {

constexpr std::uint16_t bit(unsigned index) { return static_cast<std::uint16_t>(1u << index); }

// The done bits a payload is published with: the ranks it was not written for.
constexpr std::uint16_t born_done(unsigned readers) {
  return static_cast<std::uint16_t>(unsigned{Word::kAll} << readers);
}

// Around the circle, since generations wrap: whether `a` came later than `b`.
constexpr bool later(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t distance = (a - b) & Word::kGenerationMask;
  return distance != 0 && distance <= Word::kGenerationMask / 2;
}

// 0 is skipped at the wrap: it means "never taken". `least`: the first one that may be given (reopening.cpp); 0: any.
constexpr std::uint32_t next_generation(Word old, std::uint32_t least) {
  const std::uint32_t next = (old.generation() + 1) & Word::kGenerationMask;
  if (least != 0 && later(least, next)) return least;
  return next == 0 ? 1 : next;
}

constexpr Step refuse(Refusal why) { return {Word{}, why}; }

constexpr Step settled(std::uint32_t generation, std::uint16_t done, std::uint16_t pins) {
  const State state = pins != 0 ? State::reading : done == Word::kAll ? State::free : State::ready;
  return {Word::of(generation, state, done, pins)};
}

constexpr Step take(Word old, unsigned me, std::uint32_t least = 0) {
  if (old.state() != State::free) return refuse(Refusal::state);
  return {Word::of(next_generation(old, least), State::writing, 0, bit(me))};
}

constexpr Step overwrite(Word old, unsigned me, std::uint32_t least = 0) {
  if (old.state() == State::reading) return refuse(Refusal::pinned);
  if (old.state() != State::ready) return refuse(Refusal::state);
  if (old.pins() != 0) return refuse(Refusal::pinned);
  return {Word::of(next_generation(old, least), State::writing, 0, bit(me))};
}

constexpr bool writing_mine(Word old, std::uint64_t generation, unsigned me) {
  return old.state() == State::writing && old.generation() == generation && old.pins() == bit(me);
}

constexpr Step publish(Word old, std::uint64_t generation, unsigned me, unsigned readers) {
  if (!writing_mine(old, generation, me)) return refuse(Refusal::not_mine);
  return {Word::of(old.generation(), State::ready, born_done(readers), 0)};
}

constexpr Step abort(Word old, std::uint64_t generation, unsigned me) {
  if (!writing_mine(old, generation, me)) return refuse(Refusal::not_mine);
  return {Word::of(old.generation(), State::free, 0, 0)};
}

constexpr Step pin(Word old, std::uint64_t generation, unsigned me, unsigned rank) {
  if (old.generation() != generation) return refuse(Refusal::stale);
  if (old.was_published() && (old.done() & bit(rank)) != 0) return refuse(Refusal::done);
  if (!old.published()) return refuse(Refusal::stale);
  return {Word::of(old.generation(), State::reading, old.done(), old.pins() | bit(me))};
}

constexpr Step unpin(Word old, std::uint64_t generation, unsigned me) {
  if (old.generation() != generation || old.state() != State::reading) return refuse(Refusal::stale);
  if (!old.pinned_by(me)) return refuse(Refusal::not_mine);
  return settled(old.generation(), old.done(), old.pins() & static_cast<std::uint16_t>(~bit(me)));
}

constexpr Step consume(Word old, std::uint64_t generation, unsigned rank) {
  if (old.generation() != generation || !old.published()) return refuse(Refusal::stale);
  if ((old.done() & bit(rank)) != 0) return refuse(Refusal::done);
  return settled(old.generation(), old.done() | bit(rank), old.pins());
}

constexpr Step mark_consumed(Word old, std::uint64_t generation, unsigned me, unsigned rank) {
  if (old.generation() != generation || old.state() != State::reading) return refuse(Refusal::stale);
  if (!old.pinned_by(me)) return refuse(Refusal::not_mine);
  if ((old.done() & bit(rank)) != 0) return refuse(Refusal::done);
  return settled(old.generation(), old.done() | bit(rank), old.pins() & static_cast<std::uint16_t>(~bit(me)));
}

constexpr Step discard(Word old, std::uint64_t generation) {
  if (old.generation() != generation || !old.published()) return refuse(Refusal::stale);
  if (old.done() == Word::kAll) return refuse(Refusal::done);
  return settled(old.generation(), Word::kAll, old.pins());
}

constexpr Step reclaim(Word old, unsigned dead) {
  if (!old.pinned_by(dead)) return refuse(Refusal::not_mine);
  if (old.state() == State::writing) {
    if (old.pins() != bit(dead)) return refuse(Refusal::pinned);
    return {Word::of(old.generation(), State::free, 0, 0)};
  }
  if (old.state() != State::reading) return refuse(Refusal::state);
  return settled(old.generation(), old.done(), old.pins() & static_cast<std::uint16_t>(~bit(dead)));
}

}  // namespace slot_word
}  // namespace transport
