// Rings in files: all their processes are killed at each passing of each fault point, and the next one goes on.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/mman.h>

#include "crash.hpp"

using namespace transport;
using namespace transport::test;

namespace {

// A folder for one file, and the name that leads there.
struct FileGuard {
  explicit FileGuard(const char* what) : name(ring_name(what)) {
    char made[] = "/tmp/transport-file-test-XXXXXX";
    CHECK(mkdtemp(made) != nullptr);
    folder = made;
    file = folder + "/ring";
  }
  ~FileGuard() {
    Segment::unname(name);
    std::filesystem::remove_all(folder);
  }
  std::unique_ptr<Ring> ring(std::uint64_t slots = kSlots) const {
    return Ring::create(name, slots, kCapacity, Bytes16{}, file, Kept::synced);
  }
  std::string name, folder, file;
};

std::size_t control_bytes(const Ring& ring) {
  Geometry geometry;
  CHECK(Geometry::compute(ring.identity().slot_count, kCapacity, ring.identity().page_bytes, geometry));
  return geometry.payload_offset;
}

// The values of what is unread; each once.
std::set<std::uint64_t> unread(const Ring& ring) {
  std::set<std::uint64_t> values;
  for (std::uint64_t slot = 0; slot < kSlots; ++slot) {
    const SlotInfo info = ring.info(slot);
    if (info.state == State::ready) CHECK(values.insert(std::stoull(*ring.note(slot, info.generation))).second);
  }
  return values;
}

// What a process that is killed has been told, in memory that outlives it.
struct Told {
  std::atomic<bool> consumed, published;
};

// As writer and trainer in one: the oldest of three is consumed, a fourth is published.
void live(Ring& ring, Told& told) {
  std::vector<Claimed> claimed;
  Asked asked;
  asked.most = 2;
  CHECK(ring.claim(asked, claimed) == 2);
  if (ring.finish(claimed[0].id)) told.consumed.store(true);
  ring.give_back(claimed[1].id);
  const auto aborted = ring.try_take();
  ring.abort(aborted->slot, aborted->generation);
  if (publish_text(ring, *ring.try_take(), 4, 1)) told.published.store(true);
  ring.claim(asked, claimed);  // held at the end
}

}  // namespace

TEST(a_creator_of_a_file_killed_anywhere_leaves_one_that_can_be_created) {
  for (const std::string_view point : points_starting({"create.", "file.entered"}, true)) {
    if (point == "create.found" || point == "create.waits") continue;  // not passed without an older file
    const FileGuard guard("file-creator");
    CHECK(killed([&] {
      fault::set(index_of(point), SIGKILL, 0);
      guard.ring();
    }));
    const bool complete = point == "create.initialised" || point == "file.entered";
    const auto ring = guard.ring();
    CHECK(ring->taken_over() == complete && ring->torn() == 0);
    CHECK(refused(Fault::exists, [&] { guard.ring(); }));
    check_survivors(*ring);
  }
}

TEST(all_processes_of_a_ring_in_a_file_killed_anywhere_lose_and_double_nothing) {
  auto* const told = static_cast<Told*>(mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CHECK(told != MAP_FAILED);
  unsigned kills = 0;
  const auto points = points_starting({"take.", "publish.", "abort.", "claim.claimed", "claim.pinned", "give_back.",
                                       "return.", "mark_consumed.", "free.", "unpin.", "event.", "close."},
                                      true);
  for (const std::string_view point : points) {
    for (unsigned passing = 0;; ++passing) {
      const FileGuard guard("file-killed");
      told->consumed.store(false), told->published.store(false);
      const bool was_killed = killed([&] {
        const auto ring = guard.ring();
        for (std::uint64_t value = 1; value <= 3; ++value) publish_text(*ring, *ring->try_take(), value, 1);
        fault::set(index_of(point), SIGKILL, passing);
        live(*ring, *told);
      });
      const auto ring = guard.ring();
      CHECK(ring->taken_over() && ring->torn() == 0);
      const std::set<std::uint64_t> left = unread(*ring);
      CHECK(left.contains(2) && left.contains(3));
      CHECK(!(told->consumed.load() && left.contains(1)));
      CHECK(left.contains(4) || !told->published.load());
      check_survivors(*ring);
      if (!was_killed) {
        CHECK(passing > 0 && told->consumed.load() && told->published.load());
        break;
      }
      ++kills;
    }
  }
  munmap(told, sizeof(Told));
  std::printf("   %u kills\n", kills);
}

TEST(a_process_killed_while_it_reopens_a_file_leaves_what_was_in_it) {
  for (const char* point : {"file.checked", "file.entered", "reclaim.cleared", "reclaim.disclaimed", "return.unhinted",
                            "create.found", "attach.locked", "attach.claimed"}) {
    const FileGuard guard("file-reopened");
    CHECK(killed([&] {
      const auto ring = guard.ring();
      for (std::uint64_t value = 1; value <= 3; ++value) publish_text(*ring, *ring->try_take(), value, 1);
      std::vector<Claimed> claimed;
      CHECK(ring->claim({}, claimed) == 1);
      ring->try_take();
      std::raise(SIGKILL);
    }));
    CHECK(killed([&] {
      fault::set(index_of(point), SIGKILL, 0);
      guard.ring();
    }));
    const auto ring = guard.ring();
    CHECK(ring->torn() == 0 && unread(*ring) == (std::set<std::uint64_t>{1, 2, 3}));
    check_survivors(*ring);
  }
}

TEST(nobody_attaches_to_a_file_that_is_being_checked) {
  const FileGuard guard("file-checked");
  CHECK(killed([&] {
    const auto ring = guard.ring();
    published(*ring, 1);
    std::raise(SIGKILL);
  }));
  Ring::attach(guard.name, Role::observer, false);  // its killed writer's name
  stopped_at(
      "file.checked", [&] { guard.ring(); },
      [&] { CHECK(refused(Fault::not_found, [&] { Ring::attach(guard.name, Role::reader, false); })); });
  CHECK(Ring::attach(guard.name, Role::observer, false)->state_counts()[2] == 1);
}

TEST(nobody_takes_the_end_of_the_last_writer_of_a_file_for_that_of_the_next_one) {
  const FileGuard guard("file-ended");
  const auto end = [&] {
    const auto ring = guard.ring();
    ring->end_data();
    ring->leave(false, true);
  };
  const auto drained = [](const std::string& name) {
    return Ring::attach(name, Role::observer, false, true)->drained();
  };
  end();
  stopped_at(
      "file.entered", [&] { guard.ring(); },
      [&] {
        CHECK(!drained(guard.name));
        CHECK(refused(Fault::not_ready, [&] { Ring::attach(guard.name, Role::reader, false); }));
      });
  {
    // A reader of the last run that is still there keeps its end; who finds the next one by another name does not.
    std::unique_ptr<Ring> reader;
    {
      const auto ring = guard.ring();
      reader = Ring::attach(guard.name, Role::reader, false);
      ring->end_data();
    }
    CHECK(reader->drained());
    const std::string other = guard.name + "-other";
    stopped_at(
        "file.entered", [&] { Ring::create(other, kSlots, kCapacity, Bytes16{}, guard.file, Kept::synced, false); },
        [&] { CHECK(!drained(other)); });
    Segment::unname(other);
  }
}

TEST(a_payload_that_is_not_as_it_was_published_is_freed_and_counted) {
  for (const unsigned what : {0u, 1u, 2u, 3u}) {
    const FileGuard guard("file-torn");
    {
      const auto ring = guard.ring();
      const Lease torn = published(*ring, 1);
      publish_text(*ring, *ring->try_take(), 7, 1);
      std::byte* const control = ring->mapping()->control();
      const std::uint64_t slots = ring->identity().slot_count;
      Geometry geometry;
      CHECK(Geometry::compute(slots, kCapacity, ring->identity().page_bytes, geometry));
      if (what == 0) ring->payload(torn.slot)[kCapacity - 1] ^= std::byte{1};
      if (what == 1) control[geometry.notes_offset + torn.slot * kNoteCapacity] ^= std::byte{1};
      if (what == 2) reinterpret_cast<SlotControl*>(control + geometry.controls_offset)[torn.slot].length.fetch_sub(1);
      if (what == 3)  // of a word that another page's payload does not belong to
        reinterpret_cast<SlotControl*>(control + geometry.controls_offset)[torn.slot].word.store(
            Word::of(torn.generation + 1, State::ready, slot_word::born_done(1), 0).bits);
    }
    const auto ring = guard.ring();
    CHECK(ring->taken_over() && ring->torn() == 1 && unread(*ring) == std::set<std::uint64_t>{7});
    check_survivors(*ring);
  }
}

// The word is as an older page has it: of a slot that is free, or whose payload is unread.
TEST(no_generation_of_a_file_is_given_out_twice_after_a_loss_of_power) {
  constexpr unsigned kTakes = 40'000;  // of one slot: more than a writer gives out between two syncs
  for (const State old : {State::free, State::ready}) {
    const FileGuard guard("file-generations");
    std::uint32_t last = 0;
    {
      const auto ring = guard.ring(1);
      auto* const header = reinterpret_cast<Header*>(ring->mapping()->control());
      CHECK(publish_text(*ring, *ring->try_take(), 1, 1));
      const std::vector<std::byte> whole(ring->mapping()->control(), ring->mapping()->control() + control_bytes(*ring));
      CHECK(ring->discard(0, 1));
      for (unsigned take = 0; take < kTakes; ++take) {
        const auto lease = ring->try_take();
        CHECK(slot_word::later(lease->generation, last) && !slot_word::later(lease->generation, header->granted.load()));
        last = lease->generation;
        CHECK(ring->abort(0, last));
      }
      std::memcpy(ring->mapping()->control() + kHeaderBytes, whole.data() + kHeaderBytes, whole.size() - kHeaderBytes);
      if (old == State::free) CHECK(ring->discard(0, 1));
    }
    const auto ring = guard.ring(1);
    CHECK(ring->torn() == 0 && ring->info(0).state == old);
    if (old == State::ready) CHECK(ring->discard(0, 1));
    const auto lease = ring->try_take();
    CHECK(slot_word::later(lease->generation, last));
    CHECK(ring->abort(0, lease->generation));
  }
}

// Pages of different moments: a claim without its pin, and a delay by a clock that begins anew with the host.
TEST(claims_and_delays_of_before_a_loss_of_power_hold_nothing_back) {
  const FileGuard guard("file-claims");
  {
    const auto ring = guard.ring();
    const Lease held = published(*ring, 2), delayed = published(*ring, 1);
    std::vector<Claimed> claimed;
    Asked asked;
    asked.most = 2;
    CHECK(ring->claim(asked, claimed) == 2);
    CHECK(ring->give_back(claimed[1].id, std::uint64_t{1} << 60) && claimed[1].id.slot == delayed.slot);
    std::byte* const control = ring->mapping()->control();
    Geometry geometry;
    CHECK(Geometry::compute(kSlots, kCapacity, ring->identity().page_bytes, geometry));
    auto* const word = &reinterpret_cast<SlotControl*>(control + geometry.controls_offset)[held.slot].word;
    word->store(Word::of(held.generation, State::ready, slot_word::born_done(2), 0).bits);
    std::filesystem::rename(guard.file, guard.folder + "/of-the-living");
    std::filesystem::copy_file(guard.folder + "/of-the-living", guard.file);
  }
  const auto ring = guard.ring();
  CHECK(ring->torn() == 0 && ring->depth(0).ready == 2 && ring->depth(0).claimed == 0);
  check_survivors(*ring);
}

int main(int argc, char** argv) { return run_all(argc, argv); }
