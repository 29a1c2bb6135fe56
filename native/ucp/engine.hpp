// One UCX worker, driven from the thread of one event loop: requests, endpoints, a listener, and when to sleep.
//
//   start ──► UCX ──► done(request, status, length)       exactly once, perhaps before `start` returns
//   drive ──► progress and deferred work until there is something for Python, or nothing to do: then the descriptor
//             is armed, and the loop sleeps on it
//
// Memory rule: what a request was given (`keep`) lives until UCX has completed it. A request that UCX can never
// complete, because its peer died between two fragments, stays here with its memory until the engine ends.
//
// Not thread-safe: everything belongs to the loop's thread. Only `drive`, `abort` and `close` make progress, so that
// `done` and deferred work run inside of them or of the call that starts a request, and never re-enter progress.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/clock.hpp"
#include "ucp/addresses.hpp"
#include "ucp/sockets.hpp"

namespace transport::ucp {

class Endpoint;
class Engine;
class Listener;

// Signed, so that differences may be negative.
inline std::int64_t now_ns() { return static_cast<std::int64_t>(monotonic_ns()); }

// Refused by UCX at once, with its status; never a matter of a peer that is gone, which `done` reports.
class UcxFault : public std::exception {
 public:
  UcxFault(ucs_status_t status, const std::string& doing)
      : status_(status), message_(doing + ": " + ucs_status_string(status)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  ucs_status_t status() const { return status_; }

 private:
  ucs_status_t status_;
  std::string message_;
};

inline void check(ucs_status_t status, const char* doing) {
  if (status != UCS_OK) throw UcxFault(status, doing);
}

// Reports the end of a request. The waiter keeps `self` alive until then.
struct Request {
  using Done = void (*)(void* self, std::uint32_t index, ucs_status_t status, std::size_t length);

  Engine* engine = nullptr;
  Endpoint* endpoint = nullptr;
  void* handle = nullptr;  // UCX's
  Done done = nullptr;
  void* self = nullptr;
  std::uint32_t index = 0;
  bool receives = false;
  bool cancelled = false;
  std::shared_ptr<void> keep;
  Request* previous = nullptr;  // among those of the endpoint
  Request* next = nullptr;
};

// The function that is told, about what.
struct Waiter {
  Request::Done done;
  void* self;
  std::uint32_t index = 0;
};

// Work that must not run inside of a UCX callback; queued at most once at a time.
class Deferred {
 public:
  virtual ~Deferred() = default;
  virtual void run() = 0;
  bool queued() const { return queued_; }

 private:
  friend class Engine;
  bool queued_ = false;
};

// Throws for a text that is no IP address.
inline SocketAddress address_of(const std::string& address, std::uint16_t port) {
  if (const auto found = parsed(address, port)) return *found;
  throw UcxFault(UCS_ERR_INVALID_ADDR, address + " is no IP address");
}

// Something for Python, made without its lock. `token` is an owned reference to the future that waits for it; of a
// listener's events it is borrowed, and they go when the listener is closed.
struct Event {
  void* token = nullptr;
  long outcome = 0;  // a negative ucs_status_t, or what its maker says
  std::unique_ptr<std::vector<long>> outcomes = nullptr;  // in place of `outcome`, where there are several
  std::shared_ptr<Endpoint> endpoint = nullptr;           // a listener's new one, or the one that failed
  bool of_listener = false;
};

class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  // Connecting is lazy: an address without a listener shows as a failure of the first request.
  static std::shared_ptr<Endpoint> connect(Engine& engine, const std::string& address, std::uint16_t port);
  static std::shared_ptr<Endpoint> accept(Engine& engine, ucp_conn_request_h request);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  Engine& engine() const { return *engine_; }
  const std::string& peer() const { return peer_; }
  bool open() const { return handle_ != nullptr; }                            // not aborted by this side
  bool alive() const { return handle_ != nullptr && failure_ == UCS_OK; }     // and the peer is not known to be gone
  ucs_status_t failure() const { return failure_; }
  // A receive failed for want of something on this side. While the endpoint is alive it was not for its peer's end.
  bool refused() const { return refused_ && alive(); }
  std::size_t under_way() const { return under_way_; }

  // On an endpoint that is not alive `done` comes at once. `receive` on a tag of its own on this worker.
  // `registered`: of memory that `data` lies in, or null.
  Request* send(const void* data, std::size_t size, ucp_tag_t tag, Waiter waiter, std::shared_ptr<void> keep = {},
                ucs_memory_type_t memory = UCS_MEMORY_TYPE_HOST, ucp_mem_h registered = nullptr);
  Request* send_pieces(const ucp_dt_iov_t* pieces, std::size_t count, ucp_tag_t tag, Waiter waiter,
                       std::shared_ptr<void> keep = {});
  Request* receive(void* data, std::size_t size, ucp_tag_t tag, Waiter waiter, std::shared_ptr<void> keep = {},
                   ucs_memory_type_t memory = UCS_MEMORY_TYPE_HOST);
  Request* receive_pieces(const ucp_dt_iov_t* pieces, std::size_t count, ucp_tag_t tag, Waiter waiter,
                          std::shared_ptr<void> keep = {});
  // Receive what `Engine::sort_unexpected` has kept.
  Request* receive_kept(void* data, std::size_t size, ucp_tag_message_h message, Waiter waiter,
                        std::shared_ptr<void> keep = {});
  Request* send_stream(const void* data, std::size_t size, Waiter waiter, std::shared_ptr<void> keep = {});
  Request* receive_stream(void* data, std::size_t size, Waiter waiter, std::shared_ptr<void> keep = {});

  // Take back a receive that no message has matched; `done` comes with UCS_ERR_CANCELED. Its tag is not used again.
  void cancel(Request& request);

  // Close at once, telling the peer nothing more. On return UCX is out of all memory of its requests.
  void abort();

  // (transport, device) of each lane, as UCX reports them.
  std::vector<std::pair<std::string, std::string>> transports() const;

  // Sends an empty message that is not received, unless it would have to wait: true if it left, so that every lane stands.
  // Not while UCX may be replacing lanes (see `Endpoint.joined` in transport/wire/ucx.py).
  bool probe();

 private:
  friend class Engine;
  Endpoint(Engine& engine, std::string peer);
  // What UCX's error handler is given; stays when this side has given the connection up.
  struct Tie {
    Endpoint* owner;
  };
  static void failed(void* tie, ucp_ep_h, ucs_status_t status);
  void create(ucp_ep_params_t& params);
  void lost();
  void forget_requests();
  void cancel_receives();
  template <typename Start>
  Request* start(bool receives, Waiter waiter, std::shared_ptr<void> keep, ucp_request_param_t& param, Start start);

  const std::shared_ptr<Engine> engine_;
  const std::string peer_;
  ucp_ep_h handle_ = nullptr;
  std::unique_ptr<Tie> tie_;
  ucs_status_t failure_ = UCS_OK;
  bool refused_ = false;
  bool accepted_ = false, heard_ = false;  // by a listener of ours; something has arrived from the peer
  std::int64_t made_ns_ = 0;
  Request* first_ = nullptr;  // Invariant: all requests of this endpoint that UCX has not completed
  std::size_t under_way_ = 0;
};

class Listener {
 public:
  // `address` "" is all of IPv4, "::" all of IPv6; `port` 0 is assigned. Each new endpoint becomes an event with `token`, and so does the
  // failure to make one. While the engine has `most` endpoints, further clients are refused.
  Listener(Engine& engine, const std::string& address, std::uint16_t port, std::size_t most, void* token);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  std::uint16_t port() const { return port_; }
  // Ends peers without a valid connection request within `patience_ns` (sockets.hpp). True: some still have time.
  bool end_strangers(std::int64_t patience_ns);
  bool shut() const { return door_ != nullptr && door_->gate->shut(); }
  // Admits no peer any more. The port itself goes with the engine: UCX holds on to connections that are being made when
  // a listener is destroyed, and would call it while it makes progress.
  void close();

 private:
  friend class Engine;
  // What UCX knows of it; lives as long as the engine.
  struct Door {
    Engine& engine;
    Listener* owner;  // null: no peer is admitted any more
    ucp_listener_h handle = nullptr;
    std::unique_ptr<Gate> gate = nullptr;
  };
  static void arrived(ucp_conn_request_h request, void* door);
  Engine& engine_;
  std::size_t most_;
  void* token_;  // borrowed from the binding
  Door* door_ = nullptr;
  std::uint16_t port_ = 0;
  std::vector<ucp_conn_request_h> waiting_;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `worker` lives until `close`, of a context with TAG, STREAM and WAKEUP.
  Engine(ucp_context_h context, ucp_worker_h worker);
  virtual ~Engine() { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int descriptor() const { return descriptor_; }

  // True when the descriptor is armed and the loop may sleep, once it has looked at the events; false when it should be
  // called again soon: it has run for as long as one turn of the loop may take, or more is asked behind these events.
  // `spin_most_ns` bounds the wait for an answer that is due; how much of it is used adapts to what answers have taken
  // lately.
  bool drive(std::int64_t spin_most_ns);

  // Whether the descriptor tells of all that is to come: it is armed, and what was asked since has left at once.
  bool armed() const { return armed_ && deferred_.empty() && events_.empty(); }

  // Progress in place, for teardown; returns as soon as `finished`, or after `rounds` rounds.
  // Runs no deferred work, so that deferred work may call it.
  bool progress_until(const std::function<bool()>& finished, unsigned rounds = 10'000);

  // Abort every endpoint, then destroy the listeners; no progress is made afterwards, and the worker should be destroyed
  // at once. What UCX never completed is given up with its memory. In a forked child UCX is left alone: its
  // descriptors are the parent's.
  void close();
  bool foreign() const;
  bool closed() const { return worker_ == nullptr; }
  void require_open() const {
    if (closed()) throw UcxFault(UCS_ERR_CANCELED, "the engine was closed");
  }

  // Registers memory with every device of the context, for as long as the engine is open, which keeps it. Throws where
  // UCX or the kernel refuses.
  ucp_mem_h register_memory(std::span<std::byte> memory, std::shared_ptr<void> keep);

  // Deferred work, now; not from inside of it.
  void settle();

  // UCX keeps any number of messages of any sender that no receive stands for. With this they are taken out of it
  // after each round of progress: who answers true keeps the message, to receive or to drop it; all others are dropped.
  std::function<bool(ucp_tag_t tag, std::size_t length, ucp_tag_message_h message)> sort_unexpected;
  void drop(ucp_tag_message_h message);
  std::uint64_t dropped() const { return dropped_; }  // messages

  void defer(Deferred& work);
  void forget(Deferred& work);  // before it dies
  void emit(Event event) { events_.push_back(std::move(event)); }
  std::vector<Event> take_events() { return std::exchange(events_, {}); }
  // Memory of completed requests, whose owners may need Python's lock to let go of it: dropped by who calls this.
  std::vector<std::shared_ptr<void>> take_garbage() { return std::exchange(garbage_, {}); }
  void release(std::shared_ptr<void> memory) {
    if (memory) garbage_.push_back(std::move(memory));
  }

  // Whether an answer is due; only then is it worth a spin. Counted up and down by those that wait.
  std::size_t expecting = 0;
  // One has just been asked for: the spin counts from here.
  void expect_soon();

  std::size_t abandoned() const { return abandoned_.size(); }  // requests that UCX will never complete
  const std::unordered_set<Endpoint*>& endpoints() const { return endpoints_; }

 private:
  friend class Endpoint;
  friend class Listener;

  unsigned progress();
  void sort();
  unsigned run_deferred();
  Request& take_request();
  void finish(Request& request, ucs_status_t status, std::size_t length);
  static void sent(void* handle, ucs_status_t status, void* request);
  static void received(void* handle, ucs_status_t status, const ucp_tag_recv_info_t* info, void* request);
  static void received_stream(void* handle, ucs_status_t status, std::size_t length, void* request);

  // A connection that this side gave up while it was being made: UCX would call what a forced close has freed.
  struct Postponed {
    ucp_ep_h handle;
    std::unique_ptr<Endpoint::Tie> tie;
    std::int64_t due_ns;
  };
  void close_postponed(std::int64_t now);
  void shut_doors();

  const ucp_context_h context_;
  ucp_worker_h worker_;
  const int pid_;
  std::vector<std::pair<ucp_mem_h, std::shared_ptr<void>>> registered_;
  std::vector<Postponed> postponed_;
  std::vector<std::unique_ptr<Listener::Door>> doors_;
  int descriptor_ = -1;
  std::unordered_set<Endpoint*> endpoints_;
  std::unordered_set<Listener*> listeners_;
  std::vector<Endpoint*> lost_;
  std::vector<Deferred*> deferred_;
  std::vector<Event> events_;
  std::vector<std::shared_ptr<void>> garbage_;
  std::vector<std::unique_ptr<Request>> requests_;  // all that were ever made
  std::vector<Request*> idle_requests_;
  std::vector<Request*> abandoned_;

  std::int64_t spin_ns_ = 20'000;
  std::int64_t active_ns_ = 0;  // when something last happened, or was asked for
  bool asleep_ = false;
  bool armed_ = false;
  bool closing_ = false;
  std::uint64_t dropped_ = 0;
};

}  // namespace transport::ucp
