// What a ring shows without changing a slot, what its processes tell each other, and its removal.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include <sys/mman.h>

#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"
#include "ring/ring.hpp"

namespace transport {

// --- looking -------------------------------------------------------------------------------------

SlotInfo Ring::info(std::uint64_t slot) const {
  require_slot(slot);
  const SlotControl& c = control(slot);
  for (;;) {
    const Word word{c.word.load(std::memory_order_acquire)};  // SYNC S
    SlotInfo info{word.state(), word.generation(), word.done(), word.pins(), 0, 0, 0, 0, 0, 0, kNoVersion};
    if (word.was_published()) {
      info.readers = c.reader_count();  // SYNC F, as all that follow
      info.length = c.bytes(segment_.identity.slot_capacity);
      info.checksum = c.checksum.load(std::memory_order_acquire);
      info.sequence = c.sequence.load(std::memory_order_acquire);
      info.created_ns = c.created_ns.load(std::memory_order_acquire);
      info.deadline_ns = c.deadline_ns.load(std::memory_order_acquire);
      info.policy_version = claims(slot).policy_version.load(std::memory_order_acquire);
    }
    if (c.word.load(std::memory_order_relaxed) == word.bits) return info;
  }
}

std::optional<std::string> Ring::note(std::uint64_t slot, std::uint64_t generation) const {
  require_slot(slot);
  const SlotControl& c = control(slot);
  const Word before{c.word.load(std::memory_order_acquire)};  // SYNC S
  if (before.generation() != generation || !before.published()) return std::nullopt;
  const std::size_t length = c.note_bytes();  // SYNC F
  std::string note(length, '\0');
  const NoteWords& words = note_words(slot);
  for (std::size_t i = 0; i * 8 < length; ++i) {
    const std::uint64_t word = words[i].load(std::memory_order_acquire);  // SYNC F
    std::memcpy(note.data() + i * 8, &word, std::min<std::size_t>(8, length - i * 8));
  }
  // Pins and acknowledgements may have come and gone; only another generation has another note.
  const Word after{c.word.load(std::memory_order_relaxed)};
  if (after.generation() != generation) return std::nullopt;
  return note;
}

std::span<std::byte> Ring::registrable() {
  require_open();
  segment_.mapping->make_writable(*segment_.description, segment_.place);
  return {segment_.mapping->payload(), segment_.mapping->payload_bytes()};
}

std::byte* Ring::payload(std::uint64_t slot) const {
  require_slot(slot);
  return segment_.mapping->payload() + slot * segment_.geometry.payload_stride;
}

std::array<std::uint64_t, 4> Ring::state_counts() const {
  require_open();
  std::array<std::uint64_t, 4> counts{};
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot)
    ++counts[static_cast<std::size_t>(Word{control(slot).word.load(std::memory_order_relaxed)}.state())];
  return counts;
}

std::uint64_t Ring::unread() const {
  require_open();
  std::uint64_t count = 0;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot)
    count += Word{control(slot).word.load(std::memory_order_relaxed)}.unread() ? 1 : 0;
  return count;
}

std::uint64_t Ring::left(unsigned rank) const {
  require_open();
  require_rank(rank);
  std::uint64_t count = 0;
  for (std::uint64_t slot = 0; slot < segment_.identity.slot_count; ++slot) {
    const Word word{control(slot).word.load(std::memory_order_acquire)};
    count += word.state() == State::writing || (word.published() && (word.done() & slot_word::bit(rank)) == 0) ? 1 : 0;
  }
  return count;
}

std::array<std::uint64_t, kCounterNames.size()> Ring::counters() const {
  require_open();
  std::array<std::uint64_t, kCounterNames.size()> sums{};
  for (unsigned index = 0; index <= kObserverRow; ++index)
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += row(index).counters[i].load(std::memory_order_relaxed);
  return sums;
}

void Ring::count(Counter which, std::uint64_t amount) {
  require_open();
  row().count(which, amount);
}

std::uint64_t Ring::own_count(Counter which) const {
  require_open();
  return row().counters[static_cast<std::size_t>(which)].load(std::memory_order_relaxed);
}

bool Ring::owner_lives(unsigned index) const {
  return static_cast<int>(index) == me_ || held_elsewhere(fd(), kOwnerByte + off_t{index});
}

std::vector<OwnerInfo> Ring::owners() const {
  require_open();
  std::vector<OwnerInfo> owners;
  for (unsigned index = 0; index < kMaxOwners; ++index) {
    const OwnerRow& owner = row(index);
    if (owner.occupied.load(std::memory_order_acquire) == 0) continue;  // SYNC O
    owners.push_back({index, owner_lives(index), static_cast<Role>(owner.role.load(std::memory_order_relaxed)),
                      owner.pid.load(std::memory_order_relaxed), owner.started_ns.load(std::memory_order_relaxed),
                      owner.heartbeat_ns.load(std::memory_order_relaxed), owner.heard_ns.load(std::memory_order_relaxed),
                      owner.lease_ns.load(std::memory_order_relaxed),
                      std::min(owner.port.load(std::memory_order_relaxed), kMostPort)});
  }
  return owners;
}

std::uint32_t Ring::own_pins(std::uint64_t slot) const {
  require_slot(slot);
  const std::lock_guard hold(stripe(slot));
  return own_pins_[slot];
}

EventWord& Ring::freed() const {
  require_open();
  return header().freed;
}
EventWord& Ring::published() const {
  require_open();
  return header().published;
}
EventWord& Ring::claimed() const {
  require_open();
  return header().claimed;
}

// --- telling -------------------------------------------------------------------------------------

void Ring::heartbeat() {
  require_owner();
  row().heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

void Ring::set_own_port(std::uint32_t port) {
  require_owner();
  row().port.store(port, std::memory_order_relaxed);
}

template <std::size_t Capacity>
void Ring::write_board(Board<Capacity>& board, std::string_view text) {
  require_open();
  if (text.size() > Capacity)
    fail(Fault::argument, std::to_string(text.size()) + " bytes, at most " + std::to_string(Capacity));
  const std::lock_guard hold(locks_mutex_);
  constexpr int kTries = 200;  // of a millisecond; a write takes microseconds unless its process is stopped
  for (int tries = 0; !try_lock(fd(), kBoardByte); ++tries) {
    if (tries == kTries)
      fail(Fault::system, segment_.name + ": another process was stopped while it wrote ports or addresses");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  FAULT_POINT("board.locked");
  board.write(text);
  unlock(fd(), kBoardByte);
}

std::vector<std::uint32_t> Ring::ports() const {
  require_open();
  const std::string text = header().ports.read();
  std::vector<std::uint32_t> ports(text.size() / sizeof(std::uint32_t));
  if (!ports.empty()) std::memcpy(ports.data(), text.data(), ports.size() * sizeof(std::uint32_t));
  for (std::uint32_t& port : ports) port = std::min(port, kMostPort);
  return ports;
}

void Ring::set_ports(const std::vector<std::uint32_t>& ports) {
  require_open();
  if (ports.size() > kMaxPorts)
    fail(Fault::argument, std::to_string(ports.size()) + " ports, at most " + std::to_string(kMaxPorts));
  write_board(header().ports, {reinterpret_cast<const char*>(ports.data()), ports.size() * sizeof(std::uint32_t)});
}

std::string Ring::addresses() const {
  require_open();
  return header().addresses.read();
}

void Ring::set_addresses(std::string_view addresses) {
  require_open();
  write_board(header().addresses, addresses);
}

std::string Ring::consumers() const {
  require_open();
  return header().consumers.read();
}

void Ring::set_consumers(std::string_view consumers) {
  require_open();
  write_board(header().consumers, consumers);
}

std::string Ring::schema() const {
  require_open();
  return header().schema.read();
}

void Ring::set_schema(std::string_view schema) {
  require_open();
  write_board(header().schema, schema);
}

// --- the data -------------------------------------------------------------------------------------

bool Ring::begun() const {
  if (!begun_ && !closed()) begun_ = header().data.load(std::memory_order_acquire) != Data::none;
  return begun_;
}

void Ring::begin() {
  require_owner();
  header().data.store(Data::begun, std::memory_order_release);
  begun_ = true;
}

bool Ring::ended() const {
  require_open();
  if (header().data.load(std::memory_order_acquire) != Data::ended) return false;
  for (unsigned index = 0; index < kMaxOwners; ++index) {
    const OwnerRow& owner = row(index);
    if (owner.occupied.load(std::memory_order_acquire) != 0 &&  // SYNC O
        owner.writes.load(std::memory_order_acquire) != 0 && owner_lives(index))
      return false;
  }
  return true;
}

void Ring::end_data() {
  only_serve();
  header().data.store(Data::ended, std::memory_order_release);
  advance(header().published);  // demands that wait are answered
}

void Ring::only_serve() {
  require_owner();
  row().writes.store(0, std::memory_order_release);
}

bool Ring::drained() const {
  return ended() && state_counts()[static_cast<std::size_t>(State::writing)] + unread() == 0;
}

std::uint64_t Ring::pending() {
  const std::uint64_t left = unread();
  return left != 0 || !drained() ? left : takers();
}

// --- keeping and removing ------------------------------------------------------------------------

bool Ring::keeper_alive() const {
  require_open();
  const std::lock_guard hold(locks_mutex_);
  return keeper_ || held_elsewhere(fd(), kKeeperByte);
}

bool Ring::supervise() {
  require_open();
  const std::lock_guard hold(locks_mutex_);
  if (!supervisor_) supervisor_ = try_lock(fd(), kSupervisorByte);
  return supervisor_;
}

bool Ring::supervised() const {
  require_open();
  const std::lock_guard hold(locks_mutex_);
  return supervisor_ || held_elsewhere(fd(), kSupervisorByte);
}

bool Ring::still_named() const {
  return !closed() && segment_.still_named();
}

bool Ring::unlink_if_last(bool readers_may_stay, std::uint64_t gives_up_to) {
  require_open();
  return remove_name(readers_may_stay, gives_up_to);
}

std::uint64_t Ring::sequence() const {
  require_open();
  return header().sequence.load(std::memory_order_acquire);
}

// We hold the keeper's byte and that of every place but those of readers who may stay, so no process can join before
// the name is gone. The row of a place that is being claimed right now may still name its last owner: the claimer finds
// the name gone, or has a ring that no other process finds, like the readers that stay.
bool Ring::remove_name(bool readers_may_stay, std::uint64_t gives_up_to) {
  const std::lock_guard hold(locks_mutex_);
  if (!keeper_ && !try_remove(fd())) return false;
  const auto is_reader = [this](unsigned index) {
    const OwnerRow& owner = row(index);
    return owner.occupied.load(std::memory_order_acquire) != 0 &&  // SYNC O
           owner.role.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(Role::reader);
  };
  std::array<bool, kMaxOwners> locked{};
  bool alone = true;
  for (unsigned index = 0; index < kMaxOwners && alone; ++index) {
    if (static_cast<int>(index) == me_) continue;
    locked[index] = try_lock(fd(), kOwnerByte + off_t{index});
    alone = locked[index] || (readers_may_stay && is_reader(index));
  }
  const bool removed =
      alone && Segment::may_go(*segment_.mapping, segment_.geometry, segment_.identity.slot_count, gives_up_to) &&
      segment_.still_named() && Segment::unname(segment_.name);
  for (unsigned index = 0; index < kMaxOwners; ++index)
    if (locked[index]) unlock(fd(), kOwnerByte + off_t{index});
  if (!keeper_) unlock(fd(), kKeeperByte);
  return removed;
}

}  // namespace transport
