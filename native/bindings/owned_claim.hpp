// A claim that owns its delivery: what becomes of it is kept, and what nothing became of goes back with the object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "ring/ring.hpp"

namespace transport::python {

enum class Verdict : int { open = 0, consumed = 1, refused = 2, given_back = 3, ended = 4 };

// Used with the GIL, as every transition (ring.hpp). The ring object outlives it; closed or inherited by a forked
// child, it holds nothing. Its end is asked for once: the first answer is kept, and every later call has it.
class OwnedClaim {
 public:
  OwnedClaim(Ring& ring, const Claimed& claimed) : ring_(&ring), claimed_(claimed) {}
  OwnedClaim(OwnedClaim&& other) noexcept
      : ring_(std::exchange(other.ring_, nullptr)),
        claimed_(other.claimed_),
        verdict_(other.verdict_),
        how_(other.how_),
        pinned_(other.pinned_),
        lent_(std::exchange(other.lent_, false)) {}
  OwnedClaim& operator=(OwnedClaim&& other) noexcept {
    if (this == &other) return *this;
    std::destroy_at(this);
    return *std::construct_at(this, std::move(other));
  }
  ~OwnedClaim() { release(); }

  const Claimed& claimed() const { return claimed_; }
  const ClaimId& id() const { return claimed_.id; }
  bool pinned() const { return pinned_; }  // the memory is this claim's: it is open, or consumed and kept
  bool consumed() const { return verdict_ == Verdict::consumed; }
  bool held() const { return verdict_ == Verdict::open && ring_->holds(claimed_.id); }

  bool finish(bool keep_pin) {
    if (verdict_ == Verdict::open) {
      const bool accepted = ring_->finish(claimed_.id, keep_pin);
      ended(accepted ? Verdict::consumed : Verdict::refused, accepted && keep_pin);
    }
    return verdict_ == Verdict::consumed;
  }
  bool give_back(double delay_s, bool in_vain) {
    if (verdict_ == Verdict::open)
      ended(ring_->give_back(claimed_.id, duration_ns(delay_s), in_vain ? Return::retried : Return::unread)
                ? Verdict::given_back
                : Verdict::refused);
    return verdict_ == Verdict::given_back;
  }
  bool end(Ended how, const std::string& reason, const std::string& consumer) {
    if (verdict_ == Verdict::open) {
      how_ = how;
      ended(ring_->end(claimed_.id, how, reason, consumer) ? Verdict::ended : Verdict::refused);
    }
    return verdict_ == Verdict::ended && how_ == how;
  }
  // Close leaves the slot to this claim until it ends, since something looks into it.
  void lend() {
    if (!pinned_ || lent_) return;
    ring_->lend(claimed_.id.slot);
    lent_ = true;
  }
  // Gives back what is open, and lets kept memory go.
  void release(double delay_s = 0.0, bool in_vain = false) noexcept {
    if (ring_ == nullptr || !pinned_) return;
    try {
      if (ring_->closed()) {  // it is given up with the last loan, or was with the ring
        if (verdict_ == Verdict::open) verdict_ = Verdict::given_back;
      } else if (verdict_ == Verdict::open) {
        give_back(delay_s, in_vain);
      } else {
        ring_->unpin(claimed_.id.slot, claimed_.id.generation);
      }
    } catch (const RingFault&) {  // closed since we looked
    }
    unpinned();
  }

 private:
  void ended(Verdict verdict, bool stays_pinned = false) {
    verdict_ = verdict;
    if (!stays_pinned) unpinned();
  }
  void unpinned() noexcept {
    pinned_ = false;
    if (std::exchange(lent_, false)) ring_->loan_ended(claimed_.id.slot);
  }

  Ring* ring_;
  Claimed claimed_;
  Verdict verdict_ = Verdict::open;
  Ended how_{};  // of the verdict
  bool pinned_ = true, lent_ = false;
};

}  // namespace transport::python
