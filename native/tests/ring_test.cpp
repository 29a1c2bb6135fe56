// Behaviours of one ring that need no second process and no luck.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.hpp"
#include "common/copy.hpp"
#include "common/siphash.hpp"

using namespace transport;
using namespace transport::test;

namespace {

struct Fixture {
  explicit Fixture(const char* what, std::uint64_t slots = 4, std::uint64_t capacity = 100)
      : guard{ring_name(what)}, ring(Ring::create(guard.name, slots, capacity, Bytes16{})) {}
  NameGuard guard;
  std::unique_ptr<Ring> ring;
};

Lease published(Ring& ring, unsigned readers = 1, std::uint64_t deadline_ns = 0) {
  const auto lease = ring.try_take();
  CHECK(lease);
  CHECK(ring.publish(lease->slot, lease->generation,
                     {.length = 8, .checksum = 9, .readers = readers, .deadline_ns = deadline_ns, .note = "n"}));
  return *lease;
}

Wanted wanted(const Ring& ring, Lease lease) {
  return {lease.slot, lease.generation, slot_key(ring.identity().secret, lease.slot, lease.generation), 8, 0};
}

}  // namespace

TEST(an_owner_that_pins_twice_holds_the_slot_until_the_second_unpin) {
  Fixture f("twice");
  const auto reader = f.ring->attach_again(Role::reader);
  const auto [slot, generation] = published(*f.ring, 2);
  CHECK(reader->pin(slot, generation, 0) == PinAnswer::ok);
  CHECK(reader->pin(slot, generation, 1) == PinAnswer::ok);
  CHECK(reader->own_pins(slot) == 2);
  CHECK(reader->mark_consumed(slot, generation, 0));
  CHECK(f.ring->info(slot).state == State::reading);
  CHECK(!reader->mark_consumed(slot, generation, 0));  // refused, and the pin is still there
  CHECK(reader->own_pins(slot) == 1);
  CHECK(reader->mark_consumed(slot, generation, 1));
  CHECK(f.ring->info(slot).state == State::free);
  CHECK(!reader->unpin(slot, generation));
  CHECK(f.ring->counters()[static_cast<unsigned>(Counter::late_finalises)] == 2);
}

TEST(only_the_last_unpin_of_an_owner_leaves_the_slot) {
  Fixture f("count");
  const auto [slot, generation] = published(*f.ring);
  CHECK(f.ring->pin(slot, generation, 0) == PinAnswer::ok);
  CHECK(f.ring->pin(slot, generation, 0) == PinAnswer::ok);
  CHECK(f.ring->unpin(slot, generation));
  CHECK(f.ring->info(slot).state == State::reading);
  CHECK(!f.ring->unpin(slot, generation - 1));
  CHECK(f.ring->unpin(slot, generation));
  CHECK(f.ring->info(slot).state == State::ready);
  CHECK(!f.ring->unpin(slot, generation));
}

TEST(a_read_begins_with_a_pin_or_leaves_none) {
  Fixture f("read");
  const Lease lease = published(*f.ring);
  const Wanted right = wanted(*f.ring, lease);
  Wanted other = right;
  other.key ^= 1;
  CHECK(f.ring->begin_read(other) == ReadAnswer::wrong_key);
  other = right, other.length = 7;
  CHECK(f.ring->begin_read(other) == ReadAnswer::other_length);
  other = right, other.rank = 1;
  CHECK(f.ring->begin_read(other) == ReadAnswer::done);
  for (const std::uint64_t slot : {std::uint64_t{4}, lease.slot + (std::uint64_t{1} << 32)}) {
    other = right, other.slot = slot;
    CHECK(f.ring->begin_read(other) == ReadAnswer::stale);
  }
  other = right, other.generation += std::uint64_t{1} << 32;
  CHECK(f.ring->begin_read(other) == ReadAnswer::stale);
  CHECK(f.ring->begin_read(wanted(*f.ring, {lease.slot, lease.generation + 1})) == ReadAnswer::stale);
  CHECK(f.ring->info(lease.slot).state == State::ready);
  CHECK(f.ring->begin_read(right) == ReadAnswer::ok);
  CHECK(f.ring->own_pins(lease.slot) == 1);
  CHECK(f.ring->mark_consumed(lease.slot, lease.generation, 0));
  CHECK(f.ring->begin_read(right) == ReadAnswer::done);
  CHECK(f.ring->info(lease.slot).state == State::free);
}

TEST(a_read_after_the_deadline_discards) {
  Fixture f("deadline");
  const Lease early = published(*f.ring, 1, 1), late = published(*f.ring, 1, ~std::uint64_t{0});
  CHECK(f.ring->begin_read(wanted(*f.ring, early)) == ReadAnswer::expired);
  CHECK(f.ring->info(early.slot).state == State::free);
  CHECK(f.ring->begin_read(wanted(*f.ring, late)) == ReadAnswer::ok);
}

TEST(a_slot_consumed_by_all_is_free_at_the_last_unpin) {
  Fixture f("last-unpin");
  const auto a = f.ring->attach_again(Role::listener), b = f.ring->attach_again(Role::listener);
  const auto [slot, generation] = published(*f.ring);
  CHECK(a->pin(slot, generation, 0) == PinAnswer::ok);
  CHECK(b->pin(slot, generation, 0) == PinAnswer::ok);
  CHECK(f.ring->consume(slot, generation, 0));  // acknowledged on a connection that pins nothing
  CHECK(a->pin(slot, generation, 0) == PinAnswer::done);
  CHECK(a->unpin(slot, generation));
  CHECK(f.ring->info(slot).state == State::reading);
  CHECK(b->unpin(slot, generation));
  CHECK(f.ring->info(slot).state == State::free);
}

TEST(close_gives_up_pins_and_unpublished_slots) {
  Fixture f("close");
  const auto ready = published(*f.ring);
  auto reader = f.ring->attach_again(Role::reader);
  CHECK(reader->pin(ready.slot, ready.generation, 0) == PinAnswer::ok);
  const auto written = reader->try_take();
  CHECK(written);
  reader->close();
  CHECK(f.ring->info(ready.slot).state == State::ready);
  CHECK(f.ring->info(written->slot).state == State::free);
  CHECK(f.ring->owners().size() == 1);
  CHECK(refused(Fault::detached, [&] { reader->try_take(); }));
}

TEST(the_oldest_payload_that_nobody_pins_is_overwritten_first) {
  Fixture f("overwrite", 3);
  const Lease first = published(*f.ring), second = published(*f.ring, 2), third = published(*f.ring);
  CHECK(f.ring->pin(first.slot, first.generation, 0) == PinAnswer::ok);
  CHECK(f.ring->consume(second.slot, second.generation, 0));
  for (const Lease& next : {second, third}) {
    const auto lease = f.ring->try_overwrite();
    CHECK(lease && lease->slot == next.slot && lease->generation == next.generation + 1);
  }
  CHECK(!f.ring->try_overwrite());
  CHECK(f.ring->pin(second.slot, second.generation, 1) == PinAnswer::stale);
}

TEST(lost_hints_are_found_before_the_ring_is_called_full) {
  for (const std::uint64_t slots : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{65}, std::uint64_t{5000}}) {
    Fixture f("hints", slots, 1);
    Geometry geometry{};
    CHECK(Geometry::compute(slots, 1, f.ring->identity().page_bytes, geometry));
    std::memset(f.ring->mapping()->control() + geometry.hints_offset, 0, FreeHints::bytes_for(slots));
    for (std::uint64_t i = 0; i < slots; ++i) CHECK(f.ring->try_take());
    CHECK(!f.ring->try_take());
  }
}

TEST(hints_that_promise_too_much_do_no_harm) {
  Fixture f("promises", 70, 1);
  Geometry geometry{};
  CHECK(Geometry::compute(70, 1, f.ring->identity().page_bytes, geometry));
  for (int i = 0; i < 70; ++i) CHECK(f.ring->try_take());
  std::memset(f.ring->mapping()->control() + geometry.hints_offset, 0xFF, FreeHints::bytes_for(70));
  CHECK(!f.ring->try_take());
}

TEST(scribbled_controls_lead_to_no_read_out_of_bounds) {
  Fixture f("scribble");
  const auto [slot, generation] = published(*f.ring);
  Geometry geometry{};
  CHECK(Geometry::compute(4, 100, f.ring->identity().page_bytes, geometry));
  auto* control = reinterpret_cast<SlotControl*>(f.ring->mapping()->control() + geometry.controls_offset) + slot;
  control->length = ~std::uint64_t{0};
  control->note_length = ~std::uint32_t{0};
  control->readers = 99;
  CHECK(f.ring->info(slot).length == 100);
  CHECK(f.ring->info(slot).readers == kMaxReaders);
  control->readers = 0;
  CHECK(f.ring->info(slot).readers == 1);
  Wanted huge = wanted(*f.ring, {slot, generation});
  huge.length = ~std::uint64_t{0};
  CHECK(f.ring->begin_read(huge) == ReadAnswer::other_length);
  CHECK(f.ring->note(slot, generation)->size() == kNoteCapacity);
  auto* header = reinterpret_cast<Header*>(f.ring->mapping()->control());
  header->identity.slot_count = 1 << 20;
  CHECK(refused(Fault::argument, [&] { f.ring->info(4); }));
  CHECK(refused(Fault::layout, [&] { f.ring->attach_again(Role::reader); }));
  header->identity.slot_count = 4;
}

TEST(all_sixteen_places_can_be_held_and_are_used_again) {
  Fixture f("places");
  std::vector<std::unique_ptr<Ring>> owners;
  for (unsigned i = 1; i < kMaxOwners; ++i) owners.push_back(f.ring->attach_again(Role::reader));
  CHECK(refused(Fault::no_owner, [&] { f.ring->attach_again(Role::reader); }));
  CHECK(f.ring->attach_again(Role::observer)->owner() == -1);
  owners[6].reset();
  CHECK(f.ring->attach_again(Role::reader)->owner() == 7);
}

TEST(a_proof_of_death_keeps_the_place_from_being_claimed) {
  Fixture f("proof");
  const auto description = Description::open(Place::of(f.guard.name), O_RDWR);
  {
    const auto proof = DeadOwner::prove(description->fd(), 1);
    CHECK(proof);
    CHECK(f.ring->attach_again(Role::reader)->owner() == 2);
    CHECK(!DeadOwner::prove(description->fd(), 0));
  }
  CHECK(f.ring->attach_again(Role::reader)->owner() == 1);
}

TEST(ports_and_addresses_read_as_written) {
  Fixture f("boards");
  CHECK(f.ring->ports().empty() && f.ring->addresses().empty());
  std::vector<std::uint32_t> ports(kMaxPorts, 65535);
  f.ring->set_ports(ports);
  CHECK(f.ring->ports() == ports);
  f.ring->set_ports({7});
  CHECK(f.ring->ports() == std::vector<std::uint32_t>{7});
  f.ring->set_ports({~std::uint32_t{0}});
  CHECK(f.ring->ports() == std::vector<std::uint32_t>{kMostPort});
  f.ring->set_own_port(~std::uint32_t{0});
  CHECK(f.ring->owners().front().port == kMostPort);
  const std::string longest(kAddressCapacity, 'x');
  f.ring->set_addresses(longest);
  CHECK(f.ring->addresses() == longest);
  CHECK(refused(Fault::argument, [&] { f.ring->set_addresses(longest + "x"); }));
  f.ring->set_addresses("10.0.0.1");
  CHECK(f.ring->addresses() == "10.0.0.1");
}

TEST(a_name_is_removed_only_by_the_last) {
  Fixture f("unlink");
  auto reader = f.ring->attach_again(Role::reader);
  CHECK(!f.ring->unlink_if_last());
  CHECK(!reader->unlink_if_last());
  CHECK(!Segment::unlink_if_dead(f.guard.name));
  f.ring->close();
  CHECK(!reader->keeper_alive());
  CHECK(reader->unlink_if_last());
  CHECK(!reader->unlink_if_last());
  CHECK(refused(Fault::not_found, [&] { Ring::attach(f.guard.name, Role::reader, false); }));
  CHECK(reader->try_take());  // the memory outlives the name
  reader->heartbeat();
}

TEST(a_name_goes_with_unread_payloads_only_as_far_as_they_are_given_up) {
  Fixture f("gives-up");
  const auto publish = [](Ring& ring) {
    const auto lease = ring.try_take();
    CHECK(lease && ring.publish(lease->slot, lease->generation, Publication{.length = 1}));
    return *lease;
  };
  const Lease unread = publish(*f.ring);
  const std::uint64_t seen = f.ring->sequence();
  CHECK(!f.ring->unlink_if_last(false, kGivesUpNone));
  f.ring->close();
  CHECK(!Segment::unlink_if_dead(f.guard.name, kGivesUpNone));
  CHECK(!Segment::unlink_if_dead(f.guard.name, seen - 1));

  auto successor = Ring::create(f.guard.name, f.ring->identity().slot_count, f.ring->identity().slot_capacity,
                                f.ring->identity().fingerprint);
  CHECK(successor->taken_over() && successor->sequence() > seen);
  CHECK(!successor->unlink_if_last(false, seen));  // given up only by the process that saw the first writer dead
  CHECK(successor->discard(unread.slot, unread.generation));
  const Lease later = publish(*successor);
  successor->close();
  CHECK(!Segment::unlink_if_dead(f.guard.name, seen + 1));
  auto reader = Ring::attach(f.guard.name, Role::reader, false);
  CHECK(reader->pin(later.slot, later.generation, 0) == PinAnswer::ok);
  CHECK(!reader->unlink_if_last(false, kGivesUpNone));
  CHECK(reader->consume(later.slot, later.generation, 0));
  CHECK(reader->unlink_if_last(false, kGivesUpNone));  // a pin alone is no unread payload
}

TEST(a_writer_that_closes_removes_the_name_beside_readers_and_beside_nobody_else) {
  Fixture f("unlink-beside");
  auto reader = f.ring->attach_again(Role::reader);
  auto listener = f.ring->attach_again(Role::listener);
  CHECK(!f.ring->unlink_if_last(true));
  listener->close();
  auto writer = f.ring->attach_again(Role::writer);
  CHECK(!f.ring->unlink_if_last(true));
  writer->close();
  CHECK(!f.ring->unlink_if_last());
  CHECK(!reader->unlink_if_last(true));  // the ring has a keeper
  CHECK(f.ring->unlink_if_last(true));
  CHECK(refused(Fault::not_found, [&] { Ring::attach(f.guard.name, Role::reader, false); }));
  CHECK(reader->try_take());  // the memory outlives the name
}

TEST(a_forked_child_is_detached_and_does_not_keep_its_parent_alive) {
  Fixture f("fork");
  auto parent = f.ring->attach_again(Role::reader);
  int gate[2];
  CHECK(pipe2(gate, O_CLOEXEC) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const bool detached = parent->closed() && refused(Fault::detached, [&] { parent->try_take(); });
    parent->close();
    char byte = 0;
    ::close(gate[1]);
    if (read(gate[0], &byte, 1) != 0) _exit(2);  // lives until the parent has closed its own attachment
    _exit(detached ? 0 : 1);
  }
  CHECK(f.ring->owners().size() == 2 && f.ring->owners()[1].alive);
  const auto lease = parent->try_take();
  CHECK(lease && parent->abort(lease->slot, lease->generation));
  const int place = parent->owner();
  parent.reset();
  CHECK(f.ring->attach_again(Role::reader)->owner() == place);
  ::close(gate[1]);
  ::close(gate[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

TEST(copies_and_checksums_agree_for_every_size_and_cut) {
  std::vector<std::byte> source(9'000'001), target(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  for (std::size_t size = 0; size < source.size(); size = size < 700 ? size + 1 : size * 5 / 3 + 1) {
    std::fill(target.begin(), target.end(), std::byte{0});
    Checksum whole;
    copy_and_update(whole, target.data(), source.data(), size);
    CHECK(std::memcmp(target.data(), source.data(), size) == 0);
    CHECK(size + 1 > target.size() || target[size] == std::byte{0});
    CHECK(whole.digest() == checksum(source.data(), size));
    CHECK(checksum_kernel_baseline.of(source.data(), size) == checksum(source.data(), size));
    Checksum pieces;
    pieces.update(source.data(), size / 3);
    pieces.update(source.data() + size / 3, size - size / 3);
    CHECK(pieces.digest() == whole.digest());
  }
  // Beyond kStreamBytes, to an address that is not aligned.
  const std::size_t size = source.size() - 11;
  static_assert(9'000'000 - 11 > kStreamBytes);
  copy_bytes(target.data() + 3, source.data() + 1, size);
  CHECK(std::memcmp(target.data() + 3, source.data() + 1, size) == 0);
  std::fill(target.begin(), target.end(), std::byte{0});
  Checksum streamed;
  copy_and_update(streamed, target.data() + 3, source.data() + 1, size);
  CHECK(std::memcmp(target.data() + 3, source.data() + 1, size) == 0);
  CHECK(target[2] == std::byte{0} && target[size + 3] == std::byte{0});
  CHECK(streamed.digest() == checksum(source.data() + 1, size));

  std::copy(source.begin(), source.end(), target.begin());
  copy_bytes(source.data() + 1, source.data(), 1000);  // overlapping, as memmove
  CHECK(std::memcmp(source.data() + 1, target.data(), 1000) == 0);
}

int main(int argc, char** argv) { return run_all(argc, argv); }
