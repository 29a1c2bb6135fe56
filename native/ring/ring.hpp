// One attachment of this process to a ring: the transitions of slot_word.hpp applied to a segment.
//
// Every call may be made from any thread, except that close() excludes every other call on the same
// Ring: the Python binding keeps that by holding the GIL, and who calls without it holds an InUse. Memory
// of a slot that is used between two calls is lent: close() leaves such a slot ours, and our place with
// it, until it is returned. The transitions never wait. Attaching may, for 20 ms, when every place is held or being reclaimed; so may
// setting ports or addresses, for 200 ms, when another process was stopped while setting them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ring/segment.hpp"

namespace transport {

struct Lease {
  std::uint32_t slot, generation;
};

// A policy version, where the writer gave one.
inline std::optional<std::int64_t> given_version(std::int64_t version) {
  return version == kNoVersion ? std::nullopt : std::optional(version);
}

struct Publication {
  std::uint64_t length = 0, checksum = 0;
  unsigned readers = 1;
  std::uint64_t deadline_ns = 0;
  std::string_view note = {};
  std::int64_t policy_version = kNoVersion;
};

// What a claimer asks for: `most` payloads, and no more bytes than `most_bytes` unless the first one alone has more.
// Payloads of an older policy than `oldest_version`, or claimed `most_attempts` times in vain (0: no limit), or whose
// deadline has passed, are ended instead and logged.
struct Asked {
  unsigned rank = 0;
  std::size_t most = 1;
  std::uint64_t most_bytes = ~std::uint64_t{0};
  std::int64_t oldest_version = kNoVersion;
  unsigned most_attempts = 0;
  std::string_view consumer = {};  // for the log
};
// Everything a ticket says that is not the same for the whole ring, but the note.
struct Claimed {
  ClaimId id;
  unsigned readers, in_vain;  // the latter: how often before
  std::uint64_t length, checksum, sequence, created_ns, deadline_ns;
  std::int64_t policy_version;
};
inline constexpr unsigned kMostAttemptsAsked = 2047;

// Why a claim comes back: its consumer failed with it, was silent for too long or ended, or never had a look at it.
enum class Return { retried, expired, unread };

enum class PinAnswer : int { ok = 0, stale = 1, done = 2 };

// What a ticket says of a payload, for a reader on this host.
struct Wanted {
  std::uint64_t slot, generation, key, length;
  unsigned rank;
};
// Why a payload is not pinned: what `pin` answers, or what contradicts the ticket.
enum class ReadAnswer : int { ok = 0, stale = 1, done = 2, wrong_key = 3, expired = 4, other_length = 5 };

struct SlotInfo {
  State state;
  std::uint32_t generation;
  std::uint16_t done, pins;
  // Zero unless the generation was published.
  std::uint32_t readers;
  std::uint64_t length, checksum, sequence, created_ns, deadline_ns;
  std::int64_t policy_version;  // kNoVersion: its writer gave none
};

struct OwnerInfo {
  unsigned index;
  bool alive;
  Role role;
  std::uint32_t pid;
  std::uint64_t started_ns, heartbeat_ns, heard_ns, lease_ns;
  std::uint32_t port;
};

class Ring {
 public:
  // In a file (`file`, an absolute path) where `kept` says so. Without `begins` only those attach who ask for a ring
  // that is being set up, until `begin`.
  static std::unique_ptr<Ring> create(const std::string& name, std::uint64_t slot_count, std::uint64_t slot_capacity,
                                      const Bytes16& fingerprint, const std::string& file = {}, Kept kept = Kept::no,
                                      bool begins = true);
  static std::unique_ptr<Ring> attach(const std::string& name, Role role, bool writable_payload, bool set_up = false);
  // Another owner of the same ring over the same mapping, for threads that want places of their own.
  std::unique_ptr<Ring> attach_again(Role role) const;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // close() waits until there is none. What is called in here afterwards throws, as after any close.
  class InUse {
   public:
    explicit InUse(const Ring& ring) : ring_(ring) { ring_.users_.fetch_add(1); }
    ~InUse() { ring_.users_.fetch_sub(1); }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    const Ring& ring_;
  };

  // Memory of a slot that this owner holds is lent to a caller, and comes back. After close() the last return of a slot
  // gives the slot up, and the last of all the place.
  void lend(std::uint64_t slot);
  void loan_ended(std::uint64_t slot) noexcept;
  // At the end of the process: of a ring that was closed, what is lent to be read comes back now.
  void end_reading();
  std::uint64_t lent() const;

  void close();
  // close() that also removes what is no longer needed: the segment goes with the last return, where no other owner is
  // left, and with only_empty no payload either. What others publish after give_up_unread is not given up.
  // give_up_unread: discards what is unread; how many payloads that were.
  unsigned leave(bool give_up_unread, bool only_empty);
  bool closed() const { return closed_ || segment_.description->fd() < 0; }
  // readers_may_stay: for a writer that closes, whose readers keep the memory and need no name. gives_up_to: as
  // Segment::may_go.
  bool unlink_if_last(bool readers_may_stay = false, std::uint64_t gives_up_to = kGivesUpAll);
  bool keeper_alive() const;
  // One supervisor at a time serves a ring. False: another process does.
  bool supervise();
  bool supervised() const;
  // False: closed, or the segment was removed, or its name is another one's now.
  bool still_named() const;

  const std::string& name() const { return segment_.name; }
  // The file that it lies in; empty: it lies in /dev/shm.
  std::string file() const { return segment_.place.file ? segment_.place.path : std::string(); }
  // Payloads that `create` found in the file with other bytes than were published, and freed.
  unsigned torn() const { return torn_; }
  const Identity& identity() const { return segment_.identity; }
  std::uint64_t sequence() const;
  bool taken_over() const { return segment_.taken_over; }
  int owner() const { return me_; }

  // --- transitions -------------------------------------------------------------------------------
  std::optional<Lease> try_take();
  std::optional<Lease> try_overwrite();
  // Both steps of a publication. Of many, `prepare` each and `commit` all: then one sync is for all, where the ring is
  // `synced`. prepare: false if the slot is not ours. commit: how many were ours; where the sync fails it throws, and
  // they are to be aborted.
  bool publish(std::uint64_t slot, std::uint64_t generation, const Publication& publication);
  bool prepare(std::uint64_t slot, std::uint64_t generation, const Publication& publication);
  std::size_t commit(std::span<const Lease> prepared);
  bool synced() const;
  bool abort(std::uint64_t slot, std::uint64_t generation);
  PinAnswer pin(std::uint64_t slot, std::uint64_t generation, unsigned rank);
  // Pins what is wanted if the key is right, the deadline has not passed and the length agrees; else leaves no pin,
  // and an expired payload is discarded.
  ReadAnswer begin_read(const Wanted& wanted);
  bool pin_again(std::uint64_t slot);  // what this owner has pinned; false: it has not
  bool unpin(std::uint64_t slot, std::uint64_t generation);
  bool consume(std::uint64_t slot, std::uint64_t generation, unsigned rank);
  bool mark_consumed(std::uint64_t slot, std::uint64_t generation, unsigned rank);
  bool discard(std::uint64_t slot, std::uint64_t generation);
  unsigned discard_unread();  // how many
  unsigned reclaim();

  // --- the ring as the queue (claims.cpp): a claim is a pin and the rank's claim word ---------------
  // Appends what can be claimed, the oldest first; never waits. How many were appended.
  std::size_t claim(const Asked& asked, std::vector<Claimed>& claimed);
  // Consume decides: true once per delivery, and only while the claim is held. The pin goes in either case, unless
  // `keep_pin`, with which it stays if it is accepted, to be unpinned when the memory is not looked at any more.
  // `taker` of a connection: what becomes of it is noted for `outcome`.
  bool finish(const ClaimId& claim, bool keep_pin = false, int taker = -1);
  // Any consumer may claim it again after the delay. False: it was not held.
  bool give_back(const ClaimId& claim, std::uint64_t delay_ns = 0, Return how = Return::retried);
  // The delivery ends untrained and is logged. False: it was not held, or had been consumed; no pin stays.
  bool end(const ClaimId& claim, Ended how, std::string_view reason, std::string_view consumer = {}, int taker = -1);
  bool holds(const ClaimId& claim) const;
  // Its claims end when this attachment was not heard for so long (0: never); the longest that was asked for counts.
  // Every claim and every end of one is heard, `heard` is a sign of life and nothing else.
  void set_lease(std::uint64_t lease_ns);
  void heard();
  // --- consumers over the network (finishes.hpp) ---
  int open_taker(std::uint64_t token);  // -1: as many connections as have room take from this ring already
  void close_taker(int index);
  void lose_taker(int index);  // its client did not leave, and comes again
  unsigned takers();  // connections of trainers to living listeners, and those that are to come again
  // What it is still to be served for: payloads that are unread; when it is drained, takers, since each leaves when it has
  // heard that.
  std::uint64_t pending();
  // What became of a claim that the connection had finished when it broke. Nothing more is accepted of it afterwards.
  Outcome outcome(std::uint64_t token, const ClaimId& claim);
  // CLOCK_MONOTONIC when the earliest delay ends that the last look for this rank came upon; the largest number: none.
  std::uint64_t next_due_ns(unsigned rank) const;
  struct Depth {
    std::uint64_t ready = 0, claimed = 0;
    std::array<std::uint64_t, kTallyNames.size()> tallies{};
  };
  Depth depth(unsigned rank) const;
  ClaimWord claim_word(std::uint64_t slot, unsigned rank) const;
  std::vector<Failure> failures() const;  // the latest first

  // --- looking -----------------------------------------------------------------------------------
  SlotInfo info(std::uint64_t slot) const;
  std::optional<std::string> note(std::uint64_t slot, std::uint64_t generation) const;
  std::byte* payload(std::uint64_t slot) const;
  const std::shared_ptr<Mapping>& mapping() const { return segment_.mapping; }
  // All payload areas, mapped for writing from now on: an RDMA device is given memory for writes of others, whatever it
  // is used for, and the kernel locks none for it that is mapped for reading only.
  std::span<std::byte> registrable();
  std::array<std::uint64_t, 4> state_counts() const;
  // Payloads that a rank has not consumed. A slot whose payload every rank consumed may still be READING: a view of it.
  std::uint64_t unread() const;
  // Payloads that a rank has not consumed, and slots of which nobody knows yet. Once the writer has ended it only falls.
  std::uint64_t left(unsigned rank) const;
  std::array<std::uint64_t, kCounterNames.size()> counters() const;
  void count(Counter which, std::uint64_t amount);
  // By the owners of this place so far, or by all observers.
  std::uint64_t own_count(Counter which) const;
  std::vector<OwnerInfo> owners() const;
  std::uint32_t own_pins(std::uint64_t slot) const;
  void heartbeat();

  std::vector<std::uint32_t> ports() const;
  void set_ports(const std::vector<std::uint32_t>& ports);
  void set_own_port(std::uint32_t port);
  std::string addresses() const;
  void set_addresses(std::string_view addresses);
  std::string consumers() const;
  void set_consumers(std::string_view consumers);
  std::string schema() const;
  void set_schema(std::string_view schema);

  // --- the data: begun by the writer, ended before it closes; a killed writer says no end ------------
  bool begun() const;  // and so for ever; also when it is closed, by what was known then
  void begin();
  bool ended() const;  // a writer has said it, and no living one has yet to say it
  void end_data();
  void only_serve();  // this owner writes nothing: the end of the data is for others to say
  bool drained() const;  // ended, and every payload is consumed or given up

  // --- waiting: with futex.hpp, on a word that the mapping keeps alive -----------------------------
  EventWord& freed() const;
  EventWord& published() const;
  EventWord& claimed() const;

  // Throws unless the attachment is open, in the process that made it.
  void require_open() const;

 private:
  static constexpr std::size_t kStripes = 64;

  Ring(Segment segment, Role role);

  void claim_place(Role role);
  void require_owner() const;
  void require_slot(std::uint64_t slot) const;
  static void require_rank(unsigned rank);
  Header& header() const { return *reinterpret_cast<Header*>(segment_.mapping->control()); }
  OwnerRow& row(unsigned index) const;
  OwnerRow& row() const;
  SlotControl& control(std::uint64_t slot) const;
  NoteWords& note_words(std::uint64_t slot) const;
  std::mutex& stripe(std::uint64_t slot) const { return stripes_[slot % kStripes]; }
  int fd() const { return segment_.description->fd(); }

  SlotClaim& claims(std::uint64_t slot) const;
  RankCounts& rank_counts(unsigned owner, unsigned rank) const;
  FailureEntry& failure(std::uint64_t position) const;
  void tally(unsigned rank, Tally which);
  void log_failure(const ClaimId& claim, std::uint64_t sequence, Ended how, std::string_view reason,
                   std::string_view consumer);
  enum class Try { claimed, gone, ended, too_large };
  Try try_claim(std::uint64_t slot, std::uint64_t generation, const Asked& asked, std::uint64_t room, Claimed& claimed);
  bool end_held(std::uint64_t slot, std::uint64_t generation, unsigned rank, Ended how, bool whole,
                std::atomic<std::uint64_t>* note = nullptr);
  enum class Hold { none, lapsed, held };
  Hold hold_of(const ClaimId& claim) const;
  bool resolve_lapsed(const ClaimId& claim, bool ends);
  bool begin_end(const ClaimId& claim);
  bool give_back_held(const ClaimId& claim, std::uint64_t delay_ns, Return how);
  bool owner_lives(unsigned index) const;
  TakerEntry& taker(unsigned index) const;
  std::atomic<std::uint64_t>* note_finish(int index, const ClaimId& claim, Asking asking);
  static void decide(std::atomic<std::uint64_t>& note, bool accepted);
  void decide_all(unsigned owner);
  bool consumed_under(FinishNote note, unsigned owner) const;
  void drop_silent(std::uint64_t now_ns);
  bool silent(unsigned owner, std::uint64_t now_ns) const;
  std::uint16_t& own_attempts(std::uint64_t slot, unsigned rank) const {
    return own_attempts_[slot * kMaxReaders + rank];
  }
  bool claimable(std::uint64_t slot) const;
  void find_candidates(const Asked& asked, std::uint64_t now_ns);
  void offer_ready_slots();
  void clear_claims(std::uint64_t slot, std::int64_t policy_version);
  bool drop_claim(std::uint64_t slot, unsigned rank, unsigned owner, bool counts, bool delayed = false);
  unsigned disclaim(std::uint64_t slot, unsigned owner, std::uint16_t done);
  bool plainly_pinned(std::uint64_t slot) const;
  bool drop_pin(std::uint64_t slot, std::uint64_t generation);
  void returned(std::uint64_t slot);

  // Of a file (reopening.cpp).
  std::uint64_t seal_of(std::uint64_t slot, std::uint32_t generation) const;
  bool whole(std::uint64_t slot, std::uint32_t generation) const;
  void reopen();
  void check_slots();
  std::uint32_t least_generation();  // that may be given out; 0: any
  void grant();
  Lease granted(const Lease& taken);

  void offer_free_slots();
  void freed(std::uint64_t slot);
  struct Cleared {
    unsigned writing = 0, reading = 0;
  };
  Cleared clear_bits(unsigned owner);
  void clear_slot(std::uint64_t slot, unsigned owner, Cleared& cleared);
  void give_up(std::uint64_t slot);
  void detach();
  bool remove_name(bool readers_may_stay, std::uint64_t gives_up_to);
  template <std::size_t Capacity>
  void write_board(Board<Capacity>& board, std::string_view text);

  Segment segment_;
  int me_ = -1;
  unsigned torn_ = 0;
  std::atomic<std::uint32_t> granted_ = 0;  // of a file: on disk, as the last generation that we may give out
  // Either a user sees that the ring is closed, or close() sees the user: both sequentially consistent.
  std::atomic<bool> closed_ = false;
  mutable std::atomic<bool> begun_ = false;  // as of the last look
  mutable std::atomic<unsigned> users_ = 0;
  FreeHints hints_;
  ReadyHints ready_;
  // The locks that this description takes for a moment: two threads of it would not exclude each other.
  mutable std::mutex locks_mutex_;
  bool keeper_ = false;  // under locks_mutex_, as the next two
  bool supervisor_ = false;
  bool lease_set_ = false;
  enum class Removal { none, if_empty, always };
  mutable std::mutex loans_mutex_;
  std::unique_ptr<std::uint32_t[]> loans_;  // by slot, under loans_mutex_, as their sum and what the last one does
  std::uint64_t lent_ = 0;
  Removal removal_ = Removal::none;
  bool readers_may_stay_ = false;  // when the name goes with the last loan
  // Invariant: own_pins_[slot] > 0 exactly while this owner's bit stands in the word of a published
  // slot. Each entry under its stripe.
  std::unique_ptr<std::uint32_t[]> own_pins_;
  // Ranks of the slot that this attachment has claimed, each with a pin of its own; likewise under the stripe.
  std::unique_ptr<std::uint16_t[]> own_claims_;
  // The attempts of each of these; zero pages until they are used.
  std::unique_ptr<std::uint16_t[], void (*)(void*)> own_attempts_;
  mutable std::array<std::mutex, kStripes> stripes_;
  // What the last look found for a rank, the oldest first; each is checked again when it is claimed.
  struct Candidate {
    std::uint64_t sequence;
    std::uint32_t slot, generation;
  };
  struct Candidates {
    std::vector<Candidate> found;
    std::size_t next = 0;
    std::uint64_t returned = 0, due_ns = ~std::uint64_t{0};
  };
  mutable std::mutex candidates_mutex_;  // before a stripe
  std::array<Candidates, kMaxReaders> candidates_;
  std::uint64_t repaired_ns_ = 0;
};

}  // namespace transport
