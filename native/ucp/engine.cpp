#include "engine.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>

namespace transport::ucp {

namespace {

constexpr std::int64_t kLongestTurnNs = 2'000'000;  // then the loop's other work has its turn
constexpr std::int64_t kConnectingNs = 1'000'000'000;  // by then a connection is made, or has failed
constexpr std::int64_t kQuietNs = 5'000'000;
constexpr std::int64_t kShortestSpinNs = 5'000;
constexpr std::int64_t kGatherNs = 20'000;  // what comes with an event is handed over with it

std::int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

sockaddr_in address_of(const std::string& address, std::uint16_t port) {
  sockaddr_in found{};
  found.sin_family = AF_INET;
  found.sin_port = htons(port);
  found.sin_addr.s_addr = INADDR_ANY;
  if (!address.empty() && inet_pton(AF_INET, address.c_str(), &found.sin_addr) != 1)
    throw UcxFault(UCS_ERR_INVALID_ADDR, address + " is not an IPv4 address");
  return found;
}

std::string text_of(const sockaddr_storage& address) {
  if (address.ss_family != AF_INET) return "client";
  const auto& found = reinterpret_cast<const sockaddr_in&>(address);
  char text[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &found.sin_addr, text, sizeof text);
  return std::string(text) + ":" + std::to_string(ntohs(found.sin_port));
}

void nobody(void*, std::uint32_t, ucs_status_t, std::size_t) {}

ucs_status_ptr_t force_close(ucp_ep_h handle) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  return ucp_ep_close_nbx(handle, &param);
}

}  // namespace

// --- endpoint: connecting and failing -----------------------------------------------------------------------
std::shared_ptr<Endpoint> Endpoint::connect(Engine& engine, const std::string& address, std::uint16_t port) {
  const sockaddr_in to = address_of(address, port);
  engine.require_open();
  std::shared_ptr<Endpoint> endpoint(new Endpoint(engine, address + ":" + std::to_string(port)));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&to);
  params.sockaddr.addrlen = sizeof to;
  endpoint->create(params);
  return endpoint;
}

std::shared_ptr<Endpoint> Endpoint::accept(Engine& engine, ucp_conn_request_h request) {
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  const bool known = ucp_conn_request_query(request, &attributes) == UCS_OK;
  std::shared_ptr<Endpoint> endpoint(new Endpoint(engine, known ? text_of(attributes.client_address) : "client"));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  endpoint->accepted_ = true;
  endpoint->create(params);
  return endpoint;
}

Endpoint::Endpoint(Engine& engine, std::string peer) : engine_(engine.shared_from_this()), peer_(std::move(peer)) {}

void Endpoint::create(ucp_ep_params_t& params) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  tie_ = std::make_unique<Tie>(this);
  params.err_handler = {&Endpoint::failed, tie_.get()};
  check(ucp_ep_create(engine_->worker_, &params, &handle_), "making an endpoint");
  made_ns_ = now_ns();
  engine_->endpoints_.insert(this);
}

Endpoint::~Endpoint() { abort(); }

void Endpoint::failed(void* self, ucp_ep_h, ucs_status_t status) {
  if (static_cast<Tie*>(self)->owner == nullptr) return;
  auto& endpoint = *static_cast<Tie*>(self)->owner;
  if (endpoint.failure_ != UCS_OK) return;
  endpoint.failure_ = status == UCS_OK ? UCS_ERR_CONNECTION_RESET : status;
  endpoint.engine_->lost_.push_back(&endpoint);
}

// UCX ends the sends of a failed endpoint. Its receives belong to the worker and would wait for ever: those that no
// message has matched can be cancelled, the others may be missing fragments that will not come. So whoever waits is
// told now, and `abort` sees to the memory.
void Endpoint::lost() {
  const auto keep = shared_from_this();  // whoever is told may let go of it
  cancel_receives();
  std::vector<Request*> matched;
  for (Request* each = first_; each != nullptr; each = each->next)
    if (each->receives) matched.push_back(each);
  for (Request* each : matched) std::exchange(each->done, &nobody)(each->self, each->index, failure_, 0);
  if (on_lost) std::exchange(on_lost, nullptr)(failure_);
}

// UCX tells whoever waits from inside of a cancellation, and they may cancel others: from the begin after each.
void Endpoint::cancel_receives() {
  for (Request* each = first_; each != nullptr;) {
    if (each->receives && each->handle != nullptr && !each->cancelled) {
      cancel(*each);
      each = first_;
    } else {
      each = each->next;
    }
  }
}

void Endpoint::abort() {
  if (handle_ == nullptr) return;
  const ucp_ep_h handle = std::exchange(handle_, nullptr);
  if (failure_ == UCS_OK) failure_ = UCS_ERR_CANCELED;
  on_lost = nullptr;
  engine_->endpoints_.erase(this);
  std::erase(engine_->lost_, this);
  if (engine_->foreign()) return;
  cancel_receives();
  if (accepted_ && !heard_ && !engine_->closing_ && now_ns() - made_ns_ < kConnectingNs) {
    tie_->owner = nullptr;
    engine_->postponed_.push_back({handle, std::move(tie_), made_ns_ + kConnectingNs});
    forget_requests();
    return;
  }
  const ucs_status_ptr_t closing = force_close(handle);
  bool closed = !UCS_PTR_IS_PTR(closing);
  engine_->progress_until([&] {
    if (!closed) closed = ucp_request_check_status(closing) != UCS_INPROGRESS;
    return closed && first_ == nullptr;
  });
  if (UCS_PTR_IS_PTR(closing)) ucp_request_free(closing);
  forget_requests();
}

// Fragments of their messages will never come, or UCX is to be left alone: waiters are told, memory stays.
void Endpoint::forget_requests() {
  while (first_ != nullptr) {
    Request& stuck = *first_;
    const auto done = std::exchange(stuck.done, &nobody);
    first_ = stuck.next;
    if (first_ != nullptr) first_->previous = nullptr;
    --under_way_;
    stuck.endpoint = nullptr;
    stuck.previous = stuck.next = nullptr;
    engine_->abandoned_.push_back(&stuck);
    done(stuck.self, stuck.index, UCS_ERR_CANCELED, 0);
  }
}

std::vector<std::pair<std::string, std::string>> Endpoint::transports() const {
  std::vector<std::pair<std::string, std::string>> found;
  if (handle_ == nullptr) return found;
  std::vector<ucp_transport_entry_t> lanes(16);
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = lanes.data();
  attributes.transports.num_entries = static_cast<unsigned>(lanes.size());
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  check(ucp_ep_query(handle_, &attributes), "asking which transports an endpoint uses");
  for (unsigned lane = 0; lane < attributes.transports.num_entries; ++lane)
    found.emplace_back(lanes[lane].transport_name ? lanes[lane].transport_name : "",
                       lanes[lane].device_name ? lanes[lane].device_name : "");
  return found;
}

// --- endpoint: requests -------------------------------------------------------------------------------------
template <typename Start>
Request* Endpoint::start(bool receives, Waiter waiter, std::shared_ptr<void> keep, ucp_request_param_t& param,
                         Start start) {
  if (!alive()) {
    engine_->release(std::move(keep));
    waiter.done(waiter.self, waiter.index, failure_ == UCS_OK ? UCS_ERR_CANCELED : failure_, 0);
    return nullptr;
  }
  Request& request = engine_->take_request();
  request.engine = engine_.get();
  request.endpoint = this;
  request.done = waiter.done;
  request.self = waiter.self;
  request.index = waiter.index;
  request.receives = receives;
  request.cancelled = false;
  request.keep = std::move(keep);
  request.previous = nullptr;
  request.next = first_;
  if (first_ != nullptr) first_->previous = &request;
  first_ = &request;
  ++under_way_;

  std::size_t length = 0;
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.user_data = &request;
  const ucs_status_ptr_t started = start(param, length);
  if (UCS_PTR_IS_PTR(started)) {
    request.handle = started;
    return &request;
  }
  engine_->finish(request, UCS_PTR_STATUS(started), length);
  return nullptr;
}

namespace {

// Without it UCX looks up the kind of every buffer.
void set_memory(ucp_request_param_t& param, ucs_memory_type_t memory) {
  if (memory == UCS_MEMORY_TYPE_UNKNOWN) return;
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = memory;
}

void set_pieces(ucp_request_param_t& param) {
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
  param.datatype = ucp_dt_make_iov();
  set_memory(param, UCS_MEMORY_TYPE_HOST);
}

}  // namespace

Request* Endpoint::send(const void* data, std::size_t size, ucp_tag_t tag, Waiter waiter, std::shared_ptr<void> keep,
                        ucs_memory_type_t memory) {
  ucp_request_param_t param{};
  set_memory(param, memory);
  param.cb.send = &Engine::sent;
  return start(false, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    length = size;
    return ucp_tag_send_nbx(handle_, data, size, tag, &with);
  });
}

Request* Endpoint::send_pieces(const ucp_dt_iov_t* pieces, std::size_t count, ucp_tag_t tag, Waiter waiter,
                               std::shared_ptr<void> keep) {
  ucp_request_param_t param{};
  set_pieces(param);
  param.cb.send = &Engine::sent;
  return start(false, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t&) {
    return ucp_tag_send_nbx(handle_, pieces, count, tag, &with);
  });
}

Request* Endpoint::receive(void* data, std::size_t size, ucp_tag_t tag, Waiter waiter, std::shared_ptr<void> keep,
                           ucs_memory_type_t memory) {
  ucp_request_param_t param{};
  set_memory(param, memory);
  ucp_tag_recv_info_t info{};
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
  param.recv_info.tag_info = &info;
  param.cb.recv = &Engine::received;
  return start(true, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    const auto started = ucp_tag_recv_nbx(engine_->worker_, data, size, tag, ~ucp_tag_t{0}, &with);
    length = info.length;
    return started;
  });
}

Request* Endpoint::receive_pieces(const ucp_dt_iov_t* pieces, std::size_t count, ucp_tag_t tag, Waiter waiter,
                                  std::shared_ptr<void> keep) {
  ucp_request_param_t param{};
  set_pieces(param);
  ucp_tag_recv_info_t info{};
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
  param.recv_info.tag_info = &info;
  param.cb.recv = &Engine::received;
  return start(true, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    const auto started = ucp_tag_recv_nbx(engine_->worker_, const_cast<ucp_dt_iov_t*>(pieces), count, tag,
                                          ~ucp_tag_t{0}, &with);
    length = info.length;
    return started;
  });
}

Request* Endpoint::receive_kept(void* data, std::size_t size, ucp_tag_message_h message, Waiter waiter,
                                std::shared_ptr<void> keep) {
  if (!alive()) engine_->drop(message);  // `start` says the rest
  ucp_request_param_t param{};
  set_memory(param, UCS_MEMORY_TYPE_HOST);
  ucp_tag_recv_info_t info{};
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
  param.recv_info.tag_info = &info;
  param.cb.recv = &Engine::received;
  return start(true, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    const auto started = ucp_tag_msg_recv_nbx(engine_->worker_, data, size, message, &with);
    length = info.length;
    return started;
  });
}

Request* Endpoint::send_stream(const void* data, std::size_t size, Waiter waiter, std::shared_ptr<void> keep) {
  ucp_request_param_t param{};
  param.cb.send = &Engine::sent;
  return start(false, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    length = size;
    return ucp_stream_send_nbx(handle_, data, size, &with);
  });
}

Request* Endpoint::receive_stream(void* data, std::size_t size, Waiter waiter, std::shared_ptr<void> keep) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_STREAM_RECV_FLAG_WAITALL;
  param.cb.recv_stream = &Engine::received_stream;
  return start(true, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    return ucp_stream_recv_nbx(handle_, data, size, &length, &with);
  });
}

void Endpoint::cancel(Request& request) {
  if (request.endpoint != this || request.handle == nullptr || request.cancelled) return;
  request.cancelled = true;
  ucp_request_cancel(engine_->worker_, request.handle);
}

// --- listener -----------------------------------------------------------------------------------------------
Listener::Listener(Engine& engine, const std::string& address, std::uint16_t port, std::size_t most, void* token)
    : engine_(engine), most_(most), token_(token) {
  const sockaddr_in at = address_of(address, port);
  engine.require_open();
  auto door = std::make_unique<Door>(engine, this);
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&at);
  params.sockaddr.addrlen = sizeof at;
  params.conn_handler = {&Listener::arrived, door.get()};
  check(ucp_listener_create(engine.worker_, &params, &door->handle), "listening");
  door_ = engine.doors_.emplace_back(std::move(door)).get();
  engine.listeners_.insert(this);
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  const ucs_status_t status = ucp_listener_query(door_->handle, &attributes);
  if (status != UCS_OK) {
    close();
    throw UcxFault(status, "asking for the port");
  }
  port_ = ntohs(reinterpret_cast<const sockaddr_in&>(attributes.sockaddr).sin_port);
}

Listener::~Listener() { close(); }

void Listener::arrived(ucp_conn_request_h request, void* self) {
  const auto& door = *static_cast<const Door*>(self);
  Engine& engine = door.engine;
  if (door.owner != nullptr &&
      engine.endpoints_.size() + engine.postponed_.size() + door.owner->waiting_.size() < door.owner->most_) {
    door.owner->waiting_.push_back(request);
    return;
  }
  ++engine.turned_away_;
  ucp_listener_reject(door.handle, request);
}

void Listener::close() {
  if (door_ == nullptr) return;
  Door& door = *std::exchange(door_, nullptr);
  door.owner = nullptr;
  engine_.listeners_.erase(this);
  if (!engine_.foreign())
    for (const ucp_conn_request_h request : waiting_) ucp_listener_reject(door.handle, request);
  waiting_.clear();
  std::erase_if(engine_.events_, [this](const Event& event) { return event.token == token_; });
}

// --- engine -------------------------------------------------------------------------------------------------
bool Engine::foreign() const { return getpid() != pid_; }

Engine::Engine(ucp_worker_h worker) : worker_(worker), pid_(getpid()) {
  check(ucp_worker_get_efd(worker, &descriptor_), "asking for the worker's descriptor");
  active_ns_ = now_ns();
}

Request& Engine::take_request() {
  if (idle_requests_.empty()) {
    requests_.push_back(std::make_unique<Request>());
    return *requests_.back();
  }
  Request& request = *idle_requests_.back();
  idle_requests_.pop_back();
  return request;
}

void Engine::finish(Request& request, ucs_status_t status, std::size_t length) {
  Endpoint* const endpoint = request.endpoint;
  if (request.handle != nullptr) ucp_request_free(std::exchange(request.handle, nullptr));
  if (endpoint == nullptr) {  // one that had been given up after all
    std::erase(abandoned_, &request);
  } else {
    (request.previous != nullptr ? request.previous->next : endpoint->first_) = request.next;
    if (request.next != nullptr) request.next->previous = request.previous;
    --endpoint->under_way_;
    request.endpoint = nullptr;
  }
  release(std::move(request.keep));
  request.keep = nullptr;
  const auto [done, self, index] = Waiter{request.done, request.self, request.index};
  idle_requests_.push_back(&request);
  done(self, index, status, length);
}

void Engine::sent(void*, ucs_status_t status, void* request) {
  auto& found = *static_cast<Request*>(request);
  found.engine->finish(found, status, 0);
}

void Engine::received(void*, ucs_status_t status, const ucp_tag_recv_info_t* info, void* request) {
  auto& found = *static_cast<Request*>(request);
  if (status == UCS_OK && found.endpoint != nullptr) found.endpoint->heard_ = true;
  found.engine->finish(found, status, status == UCS_OK ? info->length : 0);
}

void Engine::received_stream(void*, ucs_status_t status, std::size_t length, void* request) {
  auto& found = *static_cast<Request*>(request);
  if (status == UCS_OK && found.endpoint != nullptr) found.endpoint->heard_ = true;
  found.engine->finish(found, status, length);
}

void Engine::defer(Deferred& work) {
  if (work.queued_) return;
  work.queued_ = true;
  deferred_.push_back(&work);
}

void Engine::forget(Deferred& work) {
  work.queued_ = false;
  std::replace(deferred_.begin(), deferred_.end(), &work, static_cast<Deferred*>(nullptr));
}

unsigned Engine::run_deferred() {
  unsigned done = 0;
  for (; !lost_.empty(); ++done) {
    Endpoint* const endpoint = lost_.back();
    lost_.pop_back();
    endpoint->lost();
  }
  for (Listener* listener : listeners_) {
    for (const ucp_conn_request_h request : std::exchange(listener->waiting_, {})) {
      ++done;
      try {
        emit({listener->token_, 0, nullptr, Endpoint::accept(*this, request)});
      } catch (const UcxFault&) {  // the client was gone before it was accepted
      }
    }
  }
  for (std::size_t at = 0; at < deferred_.size(); ++at) {  // grows while it runs
    Deferred* const work = deferred_[at];
    if (work == nullptr) continue;
    deferred_[at] = nullptr;
    work->queued_ = false;
    work->run();
    ++done;
  }
  deferred_.clear();
  return done;
}

void Engine::settle() {
  while (run_deferred() != 0) {
  }
}

unsigned Engine::progress() {
  const unsigned did = ucp_worker_progress(worker_);
  if (sort_unexpected) sort();
  return did + run_deferred();
}

void Engine::sort() {
  ucp_tag_recv_info_t info;
  while (const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, 0, 0, 1, &info))
    if (!sort_unexpected(info.sender_tag, info.length, message)) drop(message);
}

// Received into nothing, and the request given back at once: UCX ends it by itself.
void Engine::drop(ucp_tag_message_h message) {
  ++dropped_;
  if (worker_ == nullptr || foreign()) return;
  ucp_request_param_t param{};
  char nothing = 0;
  const ucs_status_ptr_t started = ucp_tag_msg_recv_nbx(worker_, &nothing, 0, message, &param);
  if (UCS_PTR_IS_PTR(started)) ucp_request_free(started);
}

void Engine::expect_soon() { active_ns_ = now_ns(); }

bool Engine::drive(std::int64_t spin_most_ns) {
  if (worker_ == nullptr || foreign()) return true;
  const std::int64_t entered = now_ns();
  if (!postponed_.empty()) close_postponed(entered);
  std::int64_t now = entered;
  for (unsigned busy = 0;;) {
    const unsigned did = progress();
    if (did != 0) {
      now = now_ns();
      if (asleep_) {  // would waiting for it have paid?
        const std::int64_t waited = now - active_ns_;
        spin_ns_ = waited < spin_most_ns ? std::min(spin_most_ns, std::max(spin_ns_, 2 * waited))
                                         : std::max(kShortestSpinNs, spin_ns_ / 2);
        asleep_ = false;
      }
      active_ns_ = now;
    }
    if (did != 0) {
      if (now - entered > (events_.empty() ? kLongestTurnNs : kGatherNs)) return false;
      continue;
    }
    if (!events_.empty()) return false;
    now = now_ns();
    if (expecting != 0 && now - active_ns_ < std::min(spin_ns_, spin_most_ns)) {
      relax();
      continue;
    }
    const ucs_status_t armed = ucp_worker_arm(worker_);
    if (armed == UCS_OK) {
      asleep_ = true;
      return true;
    }
    if (armed != UCS_ERR_BUSY) throw UcxFault(armed, "arming the worker's descriptor");
    // Something has just come. Where progress finds nothing of it, it may be waiting for the loop's other work.
    if (++busy == 2) return false;
  }
}

bool Engine::progress_until(const std::function<bool()>& finished, unsigned rounds) {
  for (unsigned round = 0; round < rounds; ++round) {
    if (finished()) return true;
    ucp_worker_progress(worker_);
  }
  return finished();
}

void Engine::close() {
  if (worker_ == nullptr) return;
  closing_ = true;
  while (!listeners_.empty()) (*listeners_.begin())->close();
  while (!endpoints_.empty()) (*endpoints_.begin())->abort();
  settle();
  if (!foreign()) {
    close_postponed(INT64_MAX);
    wait_for_quiet();
    for (const auto& door : doors_) ucp_listener_destroy(door->handle);
    // ucxx receives what nobody has asked for before it destroys a worker, and would wait for ever for a payload whose
    // sender is gone.
    ucp_tag_recv_info_t info;
    while (ucp_tag_probe_nb(worker_, 0, 0, 1, &info) != nullptr) {
    }
  }
  doors_.clear();
  worker_ = nullptr;
}

// Until nobody has tried to connect for a moment: connections that the kernel has taken and UCX has not yet heard of
// would call a listener that is gone. Somebody who never stops trying can still be met.
void Engine::wait_for_quiet() {
  if (doors_.empty()) return;
  const std::int64_t begun = now_ns();
  std::int64_t quiet_since = begun;
  for (std::int64_t now = begun; now - quiet_since < kQuietNs && now - begun < 40 * kQuietNs; now = now_ns()) {
    const std::uint64_t before = turned_away_;
    ucp_worker_progress(worker_);
    if (turned_away_ != before) quiet_since = now;
  }
}

void Engine::close_postponed(std::int64_t now) {
  std::erase_if(postponed_, [&](const Postponed& each) {
    if (each.due_ns > now) return false;
    const ucs_status_ptr_t closing = force_close(each.handle);
    if (UCS_PTR_IS_PTR(closing)) {
      progress_until([&] { return ucp_request_check_status(closing) != UCS_INPROGRESS; });
      ucp_request_free(closing);
    }
    return true;
  });
}

}  // namespace transport::ucp
