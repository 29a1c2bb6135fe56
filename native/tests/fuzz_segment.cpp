// libFuzzer: a segment whose header, owner table and control blocks hold any bytes. Attaching to it and every operation on
// it ends with an answer or a RingFault; lengths never leave a slot.
//
// Input: two bytes of flags, then pairs of where (two bytes) and what (eight bytes) is written before the payloads;
// then one byte for each operation.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "ring/ring.hpp"

using namespace transport;

namespace {

constexpr std::uint64_t kSlots = 3, kCapacity = 100;

template <typename Call>
void attempt(Call call) {
  try {
    call();
  } catch (const RingFault&) {
  }
}

void operate(Ring& ring, std::uint8_t which) {
  const std::uint64_t slot = which >> 4 & 3;
  const unsigned rank = which >> 6;
  attempt([&] {
    const SlotInfo info = ring.info(slot);
    if (info.length > kCapacity || info.readers > kMaxReaders) std::abort();
    const std::uint64_t generation = info.generation;
    switch (which & 15) {
      case 0: ring.try_take(); break;
      case 1: ring.try_overwrite(); break;
      case 2: ring.publish(slot, generation, {10, 1, 2, 0, "note"}); break;
      case 3: ring.abort(slot, generation); break;
      case 4: ring.pin(slot, generation, rank); break;
      case 5: ring.unpin(slot, generation); break;
      case 6: ring.consume(slot, generation, rank); break;
      case 7: ring.mark_consumed(slot, generation, rank); break;
      case 8: ring.discard(slot, generation); break;
      case 9: ring.reclaim(); break;
      case 10: ring.note(slot, generation); break;
      case 11: ring.owners(); break;
      case 12: ring.ports(); ring.addresses(); ring.counters(); ring.state_counts(); break;
      case 13: {
        std::vector<Claimed> claimed;
        Asked asked;
        asked.rank = rank;
        asked.most = 1 + slot;
        asked.oldest_version = static_cast<std::int64_t>(slot);
        asked.most_attempts = 1 + rank;
        ring.claim(asked, claimed);
        for (const Claimed& one : claimed) {
          if (one.length > kCapacity || one.readers > kMaxReaders) std::abort();
          if (slot == 0) ring.finish(one.id, rank == 1);
          if (slot == 1) ring.give_back(one.id, rank);
          if (slot == 2) ring.end(one.id, Ended::dead, "why", "who");
        }
        break;
      }
      case 14: {
        ring.depth(rank);
        for (const Failure& failure : ring.failures())
          if (failure.reason.size() > kReasonBytes || failure.consumer.size() > kConsumerBytes) std::abort();
        ring.finish({static_cast<std::uint32_t>(slot), info.generation, rank, 1});
        break;
      }
      default: ring.begin_read({slot, generation, info.checksum, info.length, rank}); break;
    }
  });
}

// Most of it into header, owners and slots; the failures are as long as all of these, and all alike.
std::size_t place_of(std::size_t where, const Geometry& geometry) {
  const bool in_slots = (where & 1) != 0, in_failures = (where & 14) == 14;
  where >>= 1;
  if (in_failures) return geometry.failures_offset + where % 4096;
  if (in_slots) return geometry.controls_offset + where % (geometry.payload_offset - 8 - geometry.controls_offset);
  return where % geometry.failures_offset;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  static const std::string name = "/transport-fuzz-" + std::to_string(getpid());
  shm_unlink(name.c_str());
  const auto ring = Ring::create(name, kSlots, kCapacity, {});
  for (int each = 0; each < 2; ++each)
    if (const auto lease = ring->try_take()) ring->publish(lease->slot, lease->generation, {50, 7, 2, 0, "a note"});

  const std::size_t writes = data[0] % 8;
  const bool attach_after = (data[1] & 1) != 0;
  data += 2, size -= 2;
  std::byte* const control = ring->mapping()->control();
  Geometry geometry;
  Geometry::compute(kSlots, kCapacity, static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)), geometry);
  for (std::size_t each = 0; each < writes && size >= 10; ++each, data += 10, size -= 10) {
    std::uint16_t where;
    std::memcpy(&where, data, 2);
    std::memcpy(control + place_of(where, geometry), data + 2, 8);
  }
  if (attach_after)
    attempt([&] {
      const auto other = Ring::attach(name, Role::reader, false);
      for (std::size_t each = 0; each < size && each < 64; ++each) operate(*other, data[each]);
    });
  for (std::size_t each = 0; each < size && each < 64; ++each) operate(*ring, data[each]);
  attempt([&] { ring->close(); });
  shm_unlink(name.c_str());
  return 0;
}
