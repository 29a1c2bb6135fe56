// The life of an attachment: a place among the owners, taken and given back.
#include "ring.hpp"

#include <chrono>
#include <numeric>
#include <thread>

#include <unistd.h>

#include "clock.hpp"
#include "error.hpp"
#include "fault.hpp"

namespace transport {

std::unique_ptr<Ring> Ring::create(const std::string& name, std::uint64_t slot_count, std::uint64_t slot_capacity,
                                   const Bytes16& fingerprint) {
  Segment segment = Segment::create(name, slot_count, slot_capacity, fingerprint);
  std::unique_ptr<Ring> ring(new Ring(std::move(segment), Role::writer));
  ring->keeper_ = true;
  if (ring->taken_over()) ring->reclaim();
  return ring;
}

std::unique_ptr<Ring> Ring::attach(const std::string& name, Role role, bool writable_payload) {
  return std::unique_ptr<Ring>(new Ring(Segment::attach(name, writable_payload), role));
}

std::unique_ptr<Ring> Ring::attach_again(Role role) const {
  require_open();
  Segment segment = Segment::attach(segment_.name, segment_.mapping->writable(), segment_.mapping);
  if (segment.identity.ring_id != segment_.identity.ring_id)
    fail(Fault::not_found, segment_.name + " is another ring now");
  return std::unique_ptr<Ring>(new Ring(std::move(segment), role));
}

Ring::Ring(Segment segment, Role role)
    : segment_(std::move(segment)),
      hints_(segment_.mapping->control() + segment_.geometry.hints_offset, segment_.identity.slot_count),
      own_pins_(std::make_unique<std::uint32_t[]>(segment_.identity.slot_count)) {
  if (role != Role::observer) claim_place(role);
}

Ring::~Ring() { close(); }

void Ring::claim_place(Role role) {
  FAULT_POINT("attach.found");
  // A place may be locked for a moment by whoever proves its owner dead, so one look is not enough.
  constexpr int kLooks = 20;
  for (int look = 0; me_ < 0; ++look) {
    if (look == kLooks)
      fail(Fault::no_owner, segment_.name + ": all " + std::to_string(kMaxOwners) + " owners are alive");
    if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (unsigned index = 0; index < kMaxOwners && me_ < 0; ++index)
      if (try_lock(fd(), kOwnerByte + off_t{index})) me_ = static_cast<int>(index);
  }
  // Whoever removes the name holds every place: after that we hold a place of a ring that nobody finds.
  if (!segment_.description->still_named(segment_.name)) fail(Fault::not_found, segment_.name + " was removed");
  FAULT_POINT("attach.locked");
  const Cleared left = clear_bits(static_cast<unsigned>(me_));
  OwnerRow& mine = row();
  mine.role.store(static_cast<std::uint32_t>(role), std::memory_order_relaxed);
  mine.pid.store(static_cast<std::uint32_t>(getpid()), std::memory_order_relaxed);
  mine.port.store(0, std::memory_order_relaxed);
  mine.started_ns.store(realtime_ns(), std::memory_order_relaxed);
  mine.heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
  mine.occupied.store(1, std::memory_order_release);  // SYNC O: whoever sees the place occupied sees by whom
  mine.count(Counter::reclaimed_writing, left.writing);
  mine.count(Counter::reclaimed_reading, left.reading);
  FAULT_POINT("attach.claimed");
}

void Ring::close() {
  if (closed_.exchange(true)) return;
  // In a forked child those are other threads of the parent, and nobody ends their use.
  while (users_.load() != 0 && segment_.description->fd() >= 0) std::this_thread::yield();
  if (segment_.description->fd() >= 0 && me_ >= 0) {  // else an observer, or a forked child, which owns nothing
    const Cleared left = clear_bits(static_cast<unsigned>(me_));
    row().count(Counter::aborts, left.writing);
    const std::uint32_t* const pins = own_pins_.get();
    row().count(Counter::unpins, std::accumulate(pins, pins + segment_.identity.slot_count, std::uint64_t{0}));
    FAULT_POINT("close.released");
    row().occupied.store(0, std::memory_order_relaxed);
  }
  segment_.description->close();
  segment_.mapping.reset();
  own_pins_.reset();
}

}  // namespace transport
