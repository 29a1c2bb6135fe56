// One transition of slot_word.hpp applied to a slot's word.
#pragma once

#include <atomic>
#include <cstdint>

#include "ring/slot_word.hpp"

namespace transport {

struct Change {
  Word before, after;
  Refusal refusal;
  explicit operator bool() const { return refusal == Refusal::none; }
  bool freed() const { return after.state() == State::free; }
};

// SYNC S: every change of a slot word acquires what the changes before it released. So the writer's
// payload is seen by a reader that pins, and the readers' last look is over before the next writer's first
// byte. The chain holds through any mix of operations, since all are read-modify-writes of one word.
template <class Transition>
Change change(std::atomic<std::uint64_t>& word, Transition transition) {
  Word before{word.load(std::memory_order_acquire)};  // SYNC S
  for (;;) {
    const Step step = transition(before);
    if (!step) return {before, before, step.refusal};
    if (word.compare_exchange_weak(before.bits, step.next.bits, std::memory_order_acq_rel,  // SYNC S
                                   std::memory_order_acquire))
      return {before, step.next, Refusal::none};
  }
}

}  // namespace transport
