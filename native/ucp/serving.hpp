// The listener's side of connections that have been admitted: CONTROL messages in; pins, answers and payloads out.
//
//   Connection   OPEN ──the peer is gone, or broke the protocol──► ENDED ──close──► CLOSED
//                  └──close (idle, late, the listener stops)───────────────────────────┘
//
//   Attempt      SENDING ──UCX has let go──► IDLE ──acknowledged, consumed elsewhere, late, closed──► over, unpinned
//                  └──acknowledged──► ACKNOWLEDGED ──UCX has let go──► over, unpinned
//
// An attempt is one rank's read of one payload through one connection, and holds one pin until it is over. Whatever
// ends a connection, UCX is out of the slots' memory before their pins go. ENDED is told once, by an event; `close` is
// left to the receiver of the event, since it makes progress.
//
// A claim that was answered to a TAKE (taking.cpp) is an attempt, too: over, its payload may be claimed again. A
// connection may hold every claim there is: of each slot and rank there is one at a time.
//
// Not thread-safe: everything belongs to the engine's thread, and nothing in here needs Python's lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ring/ring.hpp"
#include "ucp/engine.hpp"
#include "ucp/frames.hpp"
#include "ucp/publish_watch.hpp"

namespace transport::ucp {

class Connection;

// `status` of the classes in transport/errors.py.
enum class Code : std::uint8_t { accepted = 0, stale = 1, wrong_key = 2, rank = 6, length = 7, busy = 8, unknown = 10, ended = 11 };

// SlotFate of transport/wire/frames.py.
enum class Fate : std::uint8_t { readable = 1, consumed = 2, gone = 3 };

// Outcome of the event that a connection ends with.
enum class End : long { gone = 0, garbage = 1, internal = 2 };

struct Limits {
  std::uint64_t inline_bytes = 8192;  // a payload of at most so many is small
  double slowest_rate = 100e6;        // bytes per second that a client takes at least
  std::size_t most_reads = 4096;      // per connection: one that never acknowledges does not grow the listener
  std::size_t most_unsent = 1024;     // per connection: answers and payloads that its client has not taken yet
  std::uint32_t numbers = kMessageNumbers;
  std::size_t most_ahead = std::size_t{4} << 20;  // per connection: bytes of messages whose turn has not come
  std::size_t most_ahead_of_all = std::size_t{64} << 20;
  std::size_t most_unsent_bytes = std::size_t{64} << 20;  // per connection: copied for answers to its demands
  std::size_t most_waiting = 4;  // per connection: demands that wait
  std::uint64_t most_hashed = std::uint64_t{64} << 20;  // bytes of ranges in one turn of the engine
};

struct Attempt {
  enum class State : std::uint8_t { sending, acknowledged, idle };
  // What goes with its end: a pin, a claim and its pin, or nothing any more.
  enum class Hold : std::uint8_t { pin, claim, nothing };

  Connection* connection = nullptr;
  std::uint32_t slot = 0, generation = 0;
  std::uint8_t rank = 0;
  State state = State::idle;
  double sent_by = 0;  // when its bytes are through at the slowest normal rate, in seconds of the monotonic clock
  Attempt *previous = nullptr, *next = nullptr;  // of the connection
  Attempt *previous_of_slot = nullptr, *next_of_slot = nullptr;
  Hold hold = Hold::pin;
  std::uint16_t tries = 0;  // of a claim: what tells it from others of the same delivery; 0: it is a read
  std::uint64_t delay_ns = 0;  // with which it goes back
  Return back = Return::expired;  // how it goes back
  std::uint32_t answer = 0;       // the demand that it came with
  bool together = false;          // with others; and its client has not shown that it has the answer
  std::uint64_t length = 0;       // of what is sent

  bool idle() const { return state == State::idle; }
  bool is_read() const { return tries == 0; }  // also where a claim that has ended left only its pin: that is none
  ClaimId claim() const { return {slot, generation, rank, tries}; }
};

// A STATUS message under way: header and answers, then the payloads that it carries, straight from their slots.
struct Reply : std::enable_shared_from_this<Reply> {
  explicit Reply(std::shared_ptr<Mapping> slots) : mapping(std::move(slots)) {}

  Connection* connection = nullptr;
  std::size_t joined_count = 0;
  std::array<Attempt*, kMostRecords> joined;
  std::array<ucp_dt_iov_t, 1 + kMostRecords> pieces;
  std::array<std::byte, kStatusBytes> status;
  std::shared_ptr<Mapping> mapping;  // UCX may be left with a send that it never completes
};

// The answer to a TAKE under way: its head, then payloads with zeros in between. Small payloads are copied behind the
// head, since UCX passes few pieces to the kernel at a time; others go straight from their slots.
struct TakeReply : std::enable_shared_from_this<TakeReply> {
  explicit TakeReply(std::shared_ptr<Mapping> slots) : mapping(std::move(slots)) {}

  Connection* connection = nullptr;
  void copy(const std::byte* bytes, std::size_t count);
  void find_copied();  // once all is copied

  std::vector<std::byte> copied;
  std::vector<ucp_dt_iov_t> pieces;  // without an address, until `find_copied`: what comes next in `copied`
  std::vector<Attempt*> joined;
  std::shared_ptr<Mapping> mapping;
};

// A TAKE that has no answer yet.
struct Demand {
  Connection* connection;
  std::uint32_t number;
  Asked asked;
  std::uint32_t told;  // to be left
  std::uint64_t joined_most, since_ns, until_ns;
};

// A payload of an answer.
struct Payload {
  Attempt* attempt;
  std::uint64_t length;
  std::uint32_t index;  // of its record
  std::byte* small;     // its answer, where the payload is small enough to be joined to it
  std::uint64_t offset;  // in the slot
};

// The answer to the message that is due, as far as it has come.
struct Answering {
  std::shared_ptr<Reply> reply;
  std::array<Payload, kMostRecords> payloads;
  std::size_t answers = 0, count = 0;
  std::uint32_t index = 0;  // of its next record
  bool join = true;
  const std::byte* hashing = nullptr;  // of the last of the payloads, which is a range: what is to be hashed
  std::uint64_t unhashed = 0;
  Checksum hashed;
};

// What the connections of a listener share.
class Service {
 public:
  Service(Engine& engine, Ring& ring, const Limits& limits);
  ~Service() { engine_->sort_unexpected = nullptr; }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  Engine& engine() const { return *engine_; }
  std::size_t attempts() const { return attempts_; }
  std::uint64_t inline_limit() const { return limits_.inline_bytes; }

  // Registers the ring's payloads as a whole, so that no read registers any. Throws where that is refused. From then on
  // fewer payloads are joined to answers: UCX copies what is joined, at both ends, and a device reads a message of its
  // own from the slot into the client's memory.
  void register_payloads();

  // An event with `token`, an owned reference, as soon as there is no attempt, or when another one waits.
  void when_quiet(void* token);

  // --- demands (taking.cpp): those that wait are served in the order in which they came -------------
  int demand_descriptor() const { return watch_.descriptor(); }  // readable when `look` should be called
  void look();
  void dismiss();  // tells all who wait that the listener is busy
  void watch_no_more() { watch_.close(); }
  std::size_t waiting() const { return waiting_.size(); }

  bool draining = false;  // what is under way is finished, nothing is begun

 private:
  friend class Connection;

  // Where the bytes that a READ or READ_RANGE asks for begin in the payload.
  static std::uint64_t offset_of(const Record& record) {
    return record.kind == static_cast<std::uint8_t>(Kind::read_range) ? record.joined_most * kRangeUnit : 0;
  }
  bool known(const Record& record) const;
  Code begin(Connection& connection, const Record& record, Attempt*& attempt, Answer& answer);
  Attempt* adopt(Connection& connection, std::uint32_t slot, std::uint32_t generation, std::uint8_t rank,
                 std::uint64_t length);
  void take(Connection& connection, std::uint32_t number, const Record& record);
  // Held up: by what its connection holds, whatever there is to claim.
  enum class Served { answered, nothing, held_up };
  Served serve(Demand& demand);
  void answer(const Demand& demand, Code code, const std::vector<Claimed>& claimed = {});
  void serve_waiting();
  void forget(const Connection& connection);
  void cancel_take(const Connection& connection, std::uint32_t number);
  void cancel_takes(const Connection& connection);
  void arm(std::uint32_t before);
  Attempt* held(const Connection& connection, const Record& record) const;
  Code finish(Connection& connection, const Record& record);
  Code give_back(Connection& connection, const Record& record);
  Code end_untrained(Connection& connection, const Record& record, const std::byte* texts);
  bool end_claim(Attempt& attempt, const std::function<bool(const ClaimId&)>& how);
  Code outcome(const Record& record);
  std::uint32_t left(unsigned rank) const;
  Code nothing() const;
  bool is_news(const Demand& demand, std::uint64_t now) const;
  void end_reads(const Connection& connection, const Record& record);
  void acknowledge(const Record& record);
  std::uint64_t fate(const Record& record) const;
  void sent(Attempt& attempt, ucs_status_t status);
  bool covered(const Attempt& attempt);
  void end(Attempt& attempt);  // gives its pin back, and its claim
  void handed_over(Attempt& attempt);
  void drop(Attempt& attempt);  // its pin is gone
  bool consumed_elsewhere(const Attempt& attempt) const;
  bool keep(ucp_tag_t tag, std::size_t length, ucp_tag_message_h message);
  void tell_quiet();

  std::shared_ptr<Reply> take_reply();
  void give_back(std::shared_ptr<Reply> reply);

  const std::shared_ptr<Engine> engine_;
  Ring& ring_;
  Limits limits_;
  std::shared_ptr<Mapping> mapping_;  // a ring that is closed too early leaves UCX its memory
  ucp_mem_h registered_ = nullptr;    // of the payloads
  std::uint64_t slot_count_;
  std::unordered_map<std::uint32_t, Connection*> of_base_;  // open ones, by the tag base of their requests
  std::size_t ahead_bytes_ = 0;                             // of all of them
  void* quiet_ = nullptr;
  std::size_t attempts_ = 0;
  std::vector<Attempt*> of_slot_;  // Invariant: a pin keeps the generation, so those of a slot are of one generation
  std::deque<Attempt> made_;
  Attempt* free_ = nullptr;
  std::vector<std::shared_ptr<Reply>> replies_;
  std::unique_ptr<Answering> answering_;  // a spare one
  std::deque<Demand> waiting_;
  std::vector<Claimed> claimed_;
  std::vector<std::shared_ptr<TakeReply>> take_replies_;
  bool one_each_ = false;  // an answer of several payloads broke: the next ones bring one, until one is handed over
  PublishWatch watch_;
};

// A client's connection after WELCOME.
class Connection : public Deferred {
 public:
  // `ended` is an owned reference for the event that tells of the end. Receives stand when this returns.
  static std::shared_ptr<Connection> open(std::shared_ptr<Service> service, std::shared_ptr<Endpoint> endpoint,
                                          std::uint32_t tag_base, std::uint32_t client_base,
                                          std::uint64_t lease_ns, bool takes, void* ended);
  ~Connection() override { close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void close();
  void part(bool again);  // its client is asked to close, and is given nothing more; whether it comes again

  std::size_t attempts() const { return attempts_; }
  std::size_t unsent() const { return unsent_; }
  double last_active() const { return static_cast<double>(heard_ns_) * 1e-9; }  // seconds of the monotonic clock
  const char* reason() const { return reason_; }       // why it ended, in words
  void count_as(Counter carried) { carried_ = carried; }
  std::size_t waiting() const { return waiting_; }  // demands

  // End attempts that were acknowledged through other listeners, or whose payload was given up.
  void end_consumed();
  // End reads whose `sent_by` is before `before`, and all claims if their holder is gone by its own lease (`holder_gone`):
  // how many. -1, and nothing ended, when the bytes of one are not through: UCX is in its slot, so that only `close`
  // ends it.
  long expire(double before);

 private:
  friend class Service;

  static constexpr std::size_t kReceives = 2;  // the next request can land while one is being answered
  struct Inbox {
    std::array<std::array<std::byte, kControlBytes>, kReceives> messages;
    std::byte beyond_handshake;
  };
  // A message that came before a receive stood for it.
  struct Ahead {
    ucp_tag_message_h message;
    std::size_t charge;
  };
  struct Arrival {
    bool here = false;
    ucs_status_t status = UCS_OK;
    std::size_t length = 0;
  };

  Connection(std::shared_ptr<Service> service, std::shared_ptr<Endpoint> endpoint, std::uint32_t tag_base,
             std::uint32_t client_base, std::uint64_t lease_ns, bool takes)
      : service_(std::move(service)),
        endpoint_(std::move(endpoint)),
        inbox_(std::make_shared<Inbox>()),
        tag_base_(tag_base),
        client_base_(client_base),
        lease_ns_(lease_ns),
        takes_(takes) {}

  static void received(void* self, std::uint32_t index, ucs_status_t status, std::size_t length);
  static void received_stream(void* self, std::uint32_t index, ucs_status_t status, std::size_t length);
  static void reply_sent(void* self, std::uint32_t index, ucs_status_t status, std::size_t length);
  static void take_sent(void* self, std::uint32_t index, ucs_status_t status, std::size_t length);
  static void payload_sent(void* self, std::uint32_t index, ucs_status_t status, std::size_t length);

  void run() override;
  void join_takers();
  bool has_work() const;
  void post();
  bool keep(std::uint64_t place, std::size_t length, ucp_tag_message_h message);
  Ahead take_ahead();
  bool answer(const std::byte* message);
  bool hash(std::uint64_t& left);
  void finish_reply(const Header& asked);
  void send_reply(std::shared_ptr<Reply> reply, std::uint32_t number, std::size_t pieces);
  void sent(ucs_status_t status);
  void end(End how, const char* reason);
  void expect_no_more();

  std::shared_ptr<Service> service_;
  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<Inbox> inbox_;  // UCX may be left with a receive that it never completes
  std::uint32_t tag_base_, client_base_;
  void* ended_ = nullptr;  // null once it was told
  bool over_ = false, closed_ = false, parts_ = false, again_ = false;
  bool expected_ = true;  // its next message, soon: the engine spins for it
  const char* reason_ = "";
  std::uint32_t due_ = 0, posted_ = 0;  // message numbers
  std::array<Arrival, kReceives> arrivals_;
  std::deque<Ahead> ahead_;  // Invariant: of the numbers from `posted_` on, without a gap
  std::size_t ahead_bytes_ = 0;
  std::size_t unsent_ = 0;
  std::size_t unsent_bytes_ = 0;  // copied for answers to demands
  std::size_t attempts_ = 0;
  std::size_t reads_ = 0;  // of the attempts
  std::size_t waiting_ = 0;
  int taker_ = -1;  // where its finishes are noted
  Attempt* first_ = nullptr;
  const std::uint64_t lease_ns_;  // as OwnerRow's: the client's own, 0: none
  const bool takes_;  // it is a trainer's, who asks for payloads and is to hear the end
  std::uint64_t heard_ns_ = 0;    // CLOCK_MONOTONIC of its last message
  std::unique_ptr<Answering> answering_;  // while it goes on in another turn
  Counter carried_ = Counter::bytes_tcp;  // what its payloads' bytes are counted as
};

}  // namespace transport::ucp
