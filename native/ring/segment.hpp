// The segment: how it lies in memory, and how a process gets hold of one.
//
//   header (2 pages) · owner rows (16, and one that observers share) · their counts by rank · failures (64 KiB)
//   · connections that take (264 KiB) · slot controls (64 bytes each) · slot claims (256) · free hints · ready hints · notes (2 KiB per slot)
//   · [page boundary] · payload areas (whole pages each)
//
// SYNC I: everything in the header is written before `initialised` is stored, and read after it was
// loaded. Sizes are validated against the file once, when attaching, and then kept in process memory:
// what another process scribbles into the header later cannot move a pointer of ours.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "ring/board.hpp"
#include "ring/claim_word.hpp"
#include "ring/failure_log.hpp"
#include "ring/finishes.hpp"
#include "ring/hints.hpp"
#include "common/futex.hpp"
#include "ring/owners.hpp"
#include "ring/slot_word.hpp"

namespace transport {

inline constexpr std::uint64_t kMagic = 0x474E49522D505458;  // "XTP-RING"
inline constexpr std::uint32_t kLayoutVersion = 11;
inline constexpr std::size_t kNoteCapacity = 2048;
inline constexpr std::size_t kMaxPorts = 16;
inline constexpr std::uint32_t kMostPort = 65535;
inline constexpr std::size_t kAddressCapacity = 1000;
inline constexpr std::size_t kConsumersCapacity = 400;
inline constexpr std::size_t kSchemaCapacity = 1200;
inline constexpr std::size_t kHeaderBytes = 8192;
inline constexpr std::uint64_t kMaxSlots = std::uint64_t{1} << 24;
inline constexpr std::int64_t kNoVersion = INT64_MIN;  // of a policy: published without one, or any will do
inline constexpr unsigned kObserverRow = kMaxOwners;
// Of a removal: how far the ring's sequence may have come for its unread payloads to be given up with the name.
inline constexpr std::uint64_t kGivesUpAll = ~std::uint64_t{0};
inline constexpr std::uint64_t kGivesUpNone = 0;
inline constexpr char kNamePrefix[] = "/transport-";

using Bytes16 = std::array<std::uint8_t, 16>;

// What a creator decides and an attacher checks.
struct Identity {
  std::uint64_t slot_count, slot_capacity, page_bytes, total_bytes, created_ns;
  Bytes16 ring_id, secret, fingerprint;
};

// What outlives the processes of a ring, by what its writer asked for; each next one with all before it.
enum class Kept : std::uint32_t {
  no = 0,      // it lies in /dev/shm, and ends with the host
  by_file = 1,  // it lies in a file: it outlives every process
  synced = 2,  // and what is published was synced before: it outlives a loss of power
};

// What a ring's writers have said of its data. Until they begin, the ring is being set up and is nobody's source: where
// the set-up fails it never was one. One that takes a ring over has it as it was left until it begins itself, but a file
// that no process has is set up anew (reopening.cpp).
enum class Data : std::uint32_t { none = 0, begun = 1, ended = 2 };

struct Header {
  std::uint64_t magic;  // these three keep their places in every layout version
  std::uint32_t layout_version;
  std::atomic<std::uint32_t> initialised;
  Identity identity;
  std::uint64_t identity_checksum;
  std::atomic<Kept> kept;  // as the last writer asked for
  std::atomic<std::uint32_t> granted;  // of a file: no generation above it was ever given out (reopening.cpp)
  alignas(64) EventWord freed;      // advanced whenever a slot becomes FREE
  alignas(64) EventWord published;  // advanced whenever one becomes READY from WRITING, or can be claimed again
  alignas(64) EventWord claimed;    // advanced by a claim that somebody expects
  alignas(64) std::atomic<std::uint64_t> sequence;  // advanced by each publication and each take-over
  alignas(64) std::atomic<std::uint64_t> returned;  // how often a claim ended with its delivery still to be done
  std::atomic<std::uint64_t> failures;              // entries ever begun in the log
  std::atomic<Data> data;
  alignas(64) Board<4 * kMaxPorts> ports;
  alignas(64) Board<kAddressCapacity> addresses;
  alignas(64) Board<kConsumersCapacity> consumers;  // their names and ranks, by the creator
  alignas(64) Board<kSchemaCapacity> schema;        // encoded, by the creator; empty: none, or a longer one
};
static_assert(sizeof(Header) <= kHeaderBytes, "the header fits its pages");
static_assert(std::is_standard_layout_v<Header>, "offsets mean the same in every process");
static_assert(offsetof(Header, initialised) == 12, "any version can tell that it is not its own");

// SYNC F: the fields are stored after the word became WRITING and before it becomes READY. A reader
// loads the word, the fields, and the word again: a field of a later generation brings the later word
// with it (release and acquire on each field), and the second look fails.
// Invariant: everything but `word` is immutable from publish to the next take or overwrite.
struct alignas(64) SlotControl {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint64_t> length;
  std::atomic<std::uint64_t> checksum;
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> created_ns;
  std::atomic<std::uint64_t> deadline_ns;
  std::atomic<std::uint32_t> readers;
  std::atomic<std::uint32_t> note_length;
  std::atomic<std::uint64_t> seal;  // in a file: reopening.cpp

  // Numbers that bound a loop or a range of memory, as far as they may be: another process may scribble here.
  std::uint64_t bytes(std::uint64_t capacity) const { return std::min(length.load(std::memory_order_acquire), capacity); }
  unsigned reader_count() const { return std::clamp(readers.load(std::memory_order_acquire), 1u, kMaxReaders); }
  std::size_t note_bytes() const {
    return std::min<std::size_t>(note_length.load(std::memory_order_acquire), kNoteCapacity);
  }
};
static_assert(sizeof(SlotControl) == 64 && alignof(SlotControl) == 64, "one slot, one cache line");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "only a lock-free atomic works across processes");

// What claiming needs besides: looked at by claimers only. `policy_version` is immutable as the fields above;
// `not_before_ns` (CLOCK_MONOTONIC, of the ranks whose word is delayed) is written by a rank's holder.
struct alignas(64) SlotClaim {
  std::array<std::atomic<std::uint32_t>, kMaxReaders> claims;  // claim_word.hpp
  alignas(64) std::atomic<std::int64_t> policy_version;
  std::array<std::atomic<std::uint64_t>, kMaxReaders> not_before_ns;
};
static_assert(sizeof(SlotClaim) == 256, "to look for a claim is to look at one cache line");

// Deliveries by what became of them, for one owner and rank; sums over the owners count, as with OwnerRow.
enum class Tally : unsigned { done, discarded, dead, aged, retried, expired };
inline constexpr std::array<const char*, 6> kTallyNames{"done", "discarded", "dead", "aged", "retried", "expired"};
struct alignas(64) RankCounts {
  std::array<std::atomic<std::uint64_t>, kTallyNames.size()> counts;
};
static_assert(sizeof(RankCounts) == 64, "no two owners count on the same cache line");

using NoteWords = std::array<std::atomic<std::uint64_t>, kNoteCapacity / 8>;
static_assert(sizeof(NoteWords) == kNoteCapacity, "notes lie densely");

// Where everything lies. All offsets follow from the three numbers of Identity.
struct Geometry {
  std::uint64_t failure_count;
  std::uint64_t owners_offset, counts_offset, failures_offset, takers_offset, controls_offset, claims_offset, hints_offset,
      ready_offset, notes_offset, payload_offset, payload_stride, total_bytes;

  // False if the sum does not fit into an off_t.
  static bool compute(std::uint64_t slot_count, std::uint64_t slot_capacity, std::uint64_t page_bytes, Geometry& out);
};

// Where a segment lies. One rule: /dev/shm has an entry of its name, which is the segment itself, or a symbolic link of
// this user's to the file that the segment lies in. The entry is made when the segment is whole and its maker holds the
// keeper's byte, so that a segment that nobody keeps has lost its keeper, and a maker that is killed before has left no
// memory. Where the kernel knows no file without a name, as gVisor, a killed maker leaves an entry that is not
// initialised, for whoever comes next to remove.
struct Place {
  std::string path;
  std::string shown;  // in messages: the segment's name, or its file
  bool file = false;

  static Place in_memory(const std::string& name);
  static Place in_file(const std::string& path) { return {path, path, true}; }
  // What the entry says now; where there is none, it would be a segment itself.
  static Place of(const std::string& name);
};

// An open file description of a segment, which carries the locks of owners.hpp and nothing else. In a
// forked child its descriptor is closed before fork() returns, and the locks stay the parent's alone.
// Memory is mapped through descriptions of its own: a mapping keeps its description, and so the locks
// on it, alive in a child that has inherited it.
class Description {
 public:
  // Flags of open; O_CLOEXEC is added. Null with errno set if it refuses.
  static std::unique_ptr<Description> try_open(const Place& place, int flags);
  static std::unique_ptr<Description> open(const Place& place, int flags);
  // Of a new file in /dev/shm that has no name and goes with its last description and mapping; `enter` gives it one. Null
  // with errno set if it refuses.
  static std::unique_ptr<Description> nameless();
  // False if the place is taken.
  bool enter(const Place& place) const;
  ~Description();
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  int fd() const { return fd_.load(std::memory_order_relaxed); }
  void close();
  bool is(const Description& other) const;  // of the same file
  bool still_at(const Place& place) const;
  // Another description of the same file, for the caller to close; -1 with errno set if it refuses.
  int reopen(int flags) const;

 private:
  friend struct OpenDescriptions;
  explicit Description(int fd) : fd_(fd) {}
  std::atomic<int> fd_;
};

// The mapped segment. It lives as long as an attachment or memory exported from it.
class Mapping {
 public:
  Mapping(const Description& description, const Place& place, const Geometry& geometry, bool writable_payload);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* control() const { return control_; }
  std::byte* payload() const { return payload_; }
  std::size_t payload_bytes() const { return payload_bytes_; }
  bool writable() const { return writable_; }
  // Maps the payloads anew at their place, for writing as well.
  void make_writable(const Description& description, const Place& place);

 private:
  std::byte* control_ = nullptr;
  std::byte* payload_ = nullptr;
  std::size_t control_bytes_, payload_bytes_;
  bool writable_;
};

struct Segment {
  std::string name;
  Place place;
  std::unique_ptr<Description> description;
  Identity identity{};
  Geometry geometry{};
  std::shared_ptr<Mapping> mapping;
  bool taken_over = false;

  // The returned description holds the keeper lock. In a file the name leads nowhere yet: `enter`.
  static Segment create(const std::string& name, std::uint64_t slot_count, std::uint64_t slot_capacity,
                        const Bytes16& fingerprint, const std::string& file = {}, Kept kept = Kept::no);
  // `same` may carry a mapping of the same segment, which is then shared instead of mapped again.
  static Segment attach(const std::string& name, bool writable_payload, std::shared_ptr<Mapping> same = nullptr);
  // By the keeper of a file: has this name, and no other one, lead to it; or none.
  void enter() const;
  void forget_names(const std::string& but = {}) const;
  bool still_named() const { return description->still_at(Place::of(name)); }
  // Removes the name, and with it a segment in /dev/shm; never a file.
  static bool unname(const std::string& name);
  // False if its keeper or an owner is alive, or payloads are unread that are not given up (`may_go`).
  static bool unlink_if_dead(const std::string& name, std::uint64_t gives_up_to = kGivesUpAll);
  // Whether the name may go: nothing is unread, or no process has published or taken the ring over since its sequence
  // was `gives_up_to`. The caller holds the locks of keeper and owners, so that this stays so until the name is gone.
  static bool may_go(const Mapping& mapping, const Geometry& geometry, std::uint64_t slot_count,
                     std::uint64_t gives_up_to);
  static std::vector<std::string> list();
};

}  // namespace transport
