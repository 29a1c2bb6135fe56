// The life of an attachment: a place among the owners, taken and given back.
#include "ring/ring.hpp"

#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include <unistd.h>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"

namespace transport {

std::unique_ptr<Ring> Ring::create(const std::string& name, std::uint64_t slot_count, std::uint64_t slot_capacity,
                                   const Bytes16& fingerprint, const std::string& file, Kept kept, bool begins) {
  Segment segment = Segment::create(name, slot_count, slot_capacity, fingerprint, file, kept);
  std::unique_ptr<Ring> ring(new Ring(std::move(segment), Role::observer));
  ring->keeper_ = true;
  try {
    if (ring->taken_over() && !file.empty()) ring->reopen();
    ring->claim_place(Role::writer);
    if (ring->taken_over()) {
      ring->header().sequence.fetch_add(1, std::memory_order_relaxed);  // what is unread has a writer again
      ring->reclaim();
    }
    if (!file.empty()) {
      ring->segment_.enter();  // last: who finds the ring finds its writer
      FAULT_POINT("file.entered");
    }
  } catch (...) {
    if (!file.empty() && !ring->taken_over()) ::unlink(file.c_str());
    throw;
  }
  if (begins) ring->begin();
  return ring;
}

std::unique_ptr<Ring> Ring::attach(const std::string& name, Role role, bool writable_payload, bool set_up) {
  std::unique_ptr<Ring> ring(new Ring(Segment::attach(name, writable_payload), Role::observer));
  const auto find = [&] {
    ring->begun_ = ring->header().data.load(std::memory_order_acquire) != Data::none;
    if (!set_up && !ring->begun_) fail(Fault::not_ready, name + " is being set up");
  };
  find();
  if (role == Role::observer) return ring;
  ring->claim_place(role);
  find();  // its file may have been opened again before this had a place
  return ring;
}

std::unique_ptr<Ring> Ring::attach_again(Role role) const {
  require_open();
  Segment segment = Segment::attach(segment_.name, segment_.mapping->writable(), segment_.mapping);
  if (segment.identity.ring_id != segment_.identity.ring_id)
    fail(Fault::not_found, segment_.name + " now belongs to another ring");
  return std::unique_ptr<Ring>(new Ring(std::move(segment), role));
}

Ring::Ring(Segment segment, Role role)
    : segment_(std::move(segment)),
      hints_(segment_.mapping->control() + segment_.geometry.hints_offset, segment_.identity.slot_count),
      ready_(segment_.mapping->control() + segment_.geometry.ready_offset, segment_.identity.slot_count),
      loans_(std::make_unique<std::uint32_t[]>(segment_.identity.slot_count)),
      own_pins_(std::make_unique<std::uint32_t[]>(segment_.identity.slot_count)),
      own_claims_(std::make_unique<std::uint16_t[]>(segment_.identity.slot_count)),
      own_attempts_(static_cast<std::uint16_t*>(
                        std::calloc(segment_.identity.slot_count * kMaxReaders, sizeof(std::uint16_t))),
                    std::free) {
  if (!own_attempts_) throw std::bad_alloc();
  if (role != Role::observer) claim_place(role);
}

Ring::~Ring() { close(); }

void Ring::claim_place(Role role) {
  FAULT_POINT("attach.found");
  // A process that proves an owner dead locks its place for a moment, so one look is not enough.
  constexpr int kLooks = 20;
  for (int look = 0; me_ < 0; ++look) {
    if (look == kLooks)
      fail(Fault::no_owner, segment_.name + ": all " + std::to_string(kMaxOwners) + " owners are alive");
    if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (unsigned index = 0; index < kMaxOwners && me_ < 0; ++index)
      if (try_lock(fd(), kOwnerByte + off_t{index})) me_ = static_cast<int>(index);
  }
  // A process that removes the name holds every place: after that we hold a place of a ring that cannot be found. It
  // holds the keeper's byte, too, and the name of the keeper's file may be yet to come.
  if (!keeper_ && !segment_.still_named()) fail(Fault::not_found, segment_.name + " was removed");
  FAULT_POINT("attach.locked");
  const Cleared left = clear_bits(static_cast<unsigned>(me_));
  OwnerRow& mine = row();
  mine.role.store(static_cast<std::uint32_t>(role), std::memory_order_relaxed);
  mine.pid.store(static_cast<std::uint32_t>(getpid()), std::memory_order_relaxed);
  mine.port.store(0, std::memory_order_relaxed);
  mine.writes.store(role == Role::writer ? 1 : 0, std::memory_order_relaxed);
  mine.started_ns.store(realtime_ns(), std::memory_order_relaxed);
  mine.heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
  mine.lease_ns.store(0, std::memory_order_relaxed);
  mine.occupied.store(1, std::memory_order_release);  // SYNC O: a process that sees the place occupied sees by whom
  mine.count(Counter::reclaimed_writing, left.writing);
  mine.count(Counter::reclaimed_reading, left.reading);
  FAULT_POINT("attach.claimed");
}

// --- the end -------------------------------------------------------------------------------------

void Ring::lend(std::uint64_t slot) {
  require_owner();
  require_slot(slot);
  const std::lock_guard hold(loans_mutex_);
  ++loans_[slot];
  ++lent_;
}

void Ring::loan_ended(std::uint64_t slot) noexcept {
  const std::lock_guard hold(loans_mutex_);
  if (loans_[slot] == 0) return;  // `end_reading` was faster
  --lent_;
  if (--loans_[slot] > 0 || !closed_ || fd() < 0) return;  // a forked child owns nothing
  give_up(slot);
  if (lent_ == 0) detach();
}

void Ring::end_reading() {
  const std::lock_guard hold(loans_mutex_);
  if (!closed_ || fd() < 0) return;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    if (loans_[slot] == 0 || own_pins_[slot] == 0) continue;
    lent_ -= std::exchange(loans_[slot], 0);
    give_up(slot);
  }
  if (lent_ == 0) detach();
}

std::uint64_t Ring::lent() const {
  const std::lock_guard hold(loans_mutex_);
  return lent_;
}

void Ring::close() {
  if (closed_.exchange(true)) return;
  // In a forked child those are other threads of the parent, whose use never ends here.
  while (users_.load() != 0 && fd() >= 0) std::this_thread::yield();
  const std::lock_guard hold(loans_mutex_);
  if (fd() < 0) {  // a forked child, which owns nothing
    segment_.mapping.reset();
    return;
  }
  if (me_ >= 0) {
    for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot)
      if (loans_[slot] == 0) give_up(slot);
    FAULT_POINT("close.released");
  }
  if (lent_ == 0) return detach();
  const std::lock_guard locks(locks_mutex_);
  if (std::exchange(keeper_, false)) unlock(fd(), kKeeperByte);  // the next keeper need not wait
}

unsigned Ring::leave(bool give_up_unread, bool only_empty) {
  if (closed()) return 0;
  const unsigned given_up = give_up_unread ? discard_unread() : 0;
  removal_ = only_empty || give_up_unread ? Removal::if_empty : Removal::always;
  readers_may_stay_ = give_up_unread;
  close();
  return given_up;
}

// The caller has checked that the slot's memory is not in use on our behalf.
void Ring::give_up(std::uint64_t slot) {
  Cleared left;
  clear_slot(slot, static_cast<unsigned>(me_), left);
  row().count(Counter::aborts, left.writing);
  row().count(Counter::unpins, std::exchange(own_pins_[slot], 0));
}

// The last step of close(), or of the last return after it.
void Ring::detach() {
  try {
    if (removal_ != Removal::none)
      remove_name(readers_may_stay_, removal_ == Removal::always ? kGivesUpAll : kGivesUpNone);
  } catch (const RingFault&) {  // no descriptor left to look with: the name stays, as after a kill
  }
  if (me_ >= 0) row().occupied.store(0, std::memory_order_relaxed);
  segment_.description->close();
  segment_.mapping.reset();
}

}  // namespace transport
