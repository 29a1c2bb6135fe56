// Which owners are alive: kernel locks on bytes far beyond the end of the segment's file.
//
// They are open-file-description locks: the kernel drops them with the last descriptor and mapping of
// the description, so whenever its process ends, in whatever way; pids and their namespaces play no part. Two
// attachments of one process are two descriptions and exclude each other. A forked child shares its parent's
// descriptions and would keep a dead parent alive: it closes them before fork() returns in it (Description,
// segment.cpp).
//
//   byte       held by
//   keeper     the process that created the ring or took it over; shared by those that remove its name, for a moment
//   owner i    the owner at place i, or a process that has proven it dead and clears what it left
//   board      a writer of the ports or addresses
//   supervisor the process that keeps the ring's listeners alive
//
// Rule: the pins bit of owner i is changed only by the holder of byte i. A process that claims
// a place clears its leftovers before using it; one that reclaims holds a DeadOwner, which is the lock.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <fcntl.h>

#include "common/error.hpp"
#include "common/fault.hpp"
#include "ring/slot_word.hpp"

namespace transport {

inline constexpr off_t kKeeperByte = off_t{1} << 61;
inline constexpr off_t kOwnerByte = kKeeperByte + 1;
inline constexpr off_t kBoardByte = kOwnerByte + off_t{kMaxOwners};
inline constexpr off_t kSupervisorByte = kKeeperByte + 4096;  // where builds of this layout have it
inline constexpr off_t kLockBytes = kSupervisorByte + 1 - kKeeperByte;  // of all locks together
static_assert(sizeof(off_t) == 8, "lock bytes lie beyond any file");

inline struct flock byte_range(short type, off_t first, off_t count) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = first;
  range.l_len = count;
  return range;
}

// False if another description holds any of the bytes, or for F_RDLCK, has it alone; then none was taken.
inline bool try_lock(int fd, off_t first, off_t count = 1, short type = F_WRLCK) {
  struct flock range = byte_range(type, first, count);
  for (;;) {
    if (fcntl(fd, F_OFD_SETLK, &range) == 0) return true;
    if (errno == EAGAIN || errno == EACCES) return false;
    if (errno != EINTR) fail_errno(errno, "fcntl", "F_OFD_SETLK");
  }
}

inline void unlock(int fd, off_t first, off_t count = 1) {
  struct flock range = byte_range(F_UNLCK, first, count);
  fcntl(fd, F_OFD_SETLK, &range);
}

// By another description, alone.
inline bool held_elsewhere(int fd, off_t first) {
  struct flock range = byte_range(F_RDLCK, first, 1);
  if (fcntl(fd, F_OFD_GETLK, &range) != 0) fail_errno(errno, "fcntl", "F_OFD_GETLK");
  return range.l_type != F_UNLCK;
}

// False if another process keeps the ring, or one that removes its name does not come to its end.
inline bool try_keep(int fd) {
  constexpr int kLooks = 1000;
  for (int look = 0; !try_lock(fd, kKeeperByte); ++look) {
    if (look == kLooks || held_elsewhere(fd, kKeeperByte)) return false;
    FAULT_POINT("create.waits");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// False if a process keeps the ring.
inline bool try_remove(int fd) { return try_lock(fd, kKeeperByte, 1, F_RDLCK); }

// The proof that owner `index` is dead. While the object exists, the place cannot be claimed.
class DeadOwner {
 public:
  static std::optional<DeadOwner> prove(int fd, unsigned index) {
    if (!try_lock(fd, kOwnerByte + off_t{index})) return std::nullopt;
    return DeadOwner(fd, index);
  }
  DeadOwner(DeadOwner&& other) noexcept : fd_(std::exchange(other.fd_, -1)), index_(other.index_) {}
  DeadOwner& operator=(DeadOwner&&) = delete;
  ~DeadOwner() {
    if (fd_ >= 0) unlock(fd_, kOwnerByte + off_t{index_});
  }
  unsigned index() const { return index_; }

 private:
  DeadOwner(int fd, unsigned index) : fd_(fd), index_(index) {}
  int fd_;
  unsigned index_;
};

enum class Role : std::uint32_t { observer = 0, writer = 1, listener = 2, reader = 3 };

// Sums over all owners, in the order of kCounterNames.
enum class Counter : unsigned {
  takes,
  overwrites,
  publishes,
  aborts,
  pins,
  unpins,
  consumes,
  late_finalises,
  discards,
  reclaimed_writing,
  reclaimed_reading,
  stale_pins,
  full_waits,
  bytes_published,
  // Bytes read, by what carried them.
  bytes_mapped,
  bytes_shm,
  bytes_tcp,
  bytes_rdma,
  bytes_cuda,
  torn,
};
inline constexpr std::array<const char*, 20> kCounterNames{"takes",
                                                           "overwrites",
                                                           "publishes",
                                                           "aborts",
                                                           "pins",
                                                           "unpins",
                                                           "consumes",
                                                           "late_finalises",
                                                           "discards",
                                                           "reclaimed_writing",
                                                           "reclaimed_reading",
                                                           "stale_pins",
                                                           "full_waits",
                                                           "bytes_published",
                                                           "bytes_mapped",
                                                           "bytes_shm",
                                                           "bytes_tcp",
                                                           "bytes_rdma",
                                                           "bytes_cuda",
                                                           "torn"};

inline Counter counter_named(const std::string& name) {
  const auto found = std::find(kCounterNames.begin(), kCounterNames.end(), name);
  if (found == kCounterNames.end()) fail(Fault::argument, "no counter is named " + name);
  return static_cast<Counter>(found - kCounterNames.begin());
}

// How long a claim lasts: as long as its holder lives and is heard. `lease_ns` is what the holder asked for, 0: for as
// long as it lives. The one rule for owners of a ring and for connections of a listener, whoever looks.
constexpr bool holder_gone(std::uint64_t heard_ns, std::uint64_t lease_ns, bool alive, std::uint64_t now_ns) {
  return !alive || (lease_ns != 0 && now_ns > heard_ns && now_ns - heard_ns >= lease_ns);
}

// One row of the owner table. Its counters outlive the owner and go on under the next one.
struct alignas(64) OwnerRow {
  std::atomic<std::uint32_t> occupied;  // stays set when the owner dies; cleared by close and reclaim
  std::atomic<std::uint32_t> role;
  std::atomic<std::uint32_t> pid;
  std::atomic<std::uint32_t> port;
  std::atomic<std::uint64_t> started_ns;
  std::atomic<std::uint64_t> heartbeat_ns;
  std::atomic<std::uint64_t> heard_ns;  // CLOCK_MONOTONIC of the last sign of life, kept where there is a lease
  std::atomic<std::uint64_t> lease_ns;  // its claims end after so long without one; 0: with its process
  std::atomic<std::uint32_t> writes;    // a writer that has not said the end of its data
  alignas(64) std::array<std::atomic<std::uint64_t>, kCounterNames.size()> counters;

  void count(Counter which, std::uint64_t amount = 1) {
    counters[static_cast<unsigned>(which)].fetch_add(amount, std::memory_order_relaxed);
  }
};
static_assert(offsetof(OwnerRow, counters) == 64, "looking at heartbeats does not disturb the counters");
static_assert(sizeof(OwnerRow) == 256, "no two owners count on the same cache line");

}  // namespace transport
