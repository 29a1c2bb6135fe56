// One connection: made, lost, given up. Its requests are in requests.cpp.
#include "ucp/engine.hpp"

#include <algorithm>


namespace transport::ucp {

namespace {

constexpr std::int64_t kConnectingNs = 1'000'000'000;  // by then a connection is made, or has failed

void nobody(void*, std::uint32_t, ucs_status_t, std::size_t) {}

ucs_status_ptr_t force_close(ucp_ep_h handle) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  return ucp_ep_close_nbx(handle, &param);
}

}  // namespace

std::shared_ptr<Endpoint> Endpoint::connect(Engine& engine, const std::string& address, std::uint16_t port) {
  const SocketAddress to = address_of(address, port);
  engine.require_open();
  std::shared_ptr<Endpoint> endpoint(new Endpoint(engine, text_of(to)));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = to.data();
  params.sockaddr.addrlen = to.size();
  endpoint->create(params);
  return endpoint;
}

std::shared_ptr<Endpoint> Endpoint::accept(Engine& engine, ucp_conn_request_h request) {
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  std::string peer;
  if (ucp_conn_request_query(request, &attributes) == UCS_OK) peer = text_of({attributes.client_address});
  std::shared_ptr<Endpoint> endpoint(new Endpoint(engine, peer.empty() ? "client" : peer));
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
  tie_ = std::make_unique<Tie>(Tie{this});
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
// message has matched can be cancelled, the others may be missing fragments that will not come. So waiting
// callers get the error now, and `abort` sees to the memory.
void Endpoint::lost() {
  const auto keep = shared_from_this();  // a callback may release the last reference
  cancel_receives();
  std::vector<Request*> matched;
  for (Request* each = first_; each != nullptr; each = each->next)
    if (each->receives) matched.push_back(each);
  for (Request* each : matched) std::exchange(each->done, &nobody)(each->self, each->index, failure_, 0);
}

// UCX calls the callbacks from inside of a cancellation, and they may cancel others: so start over after each.
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
  engine_->endpoints_.erase(this);
  std::erase(engine_->lost_, this);
  if (engine_->foreign()) return;
  engine_->armed_ = false;
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
  check(ucp_ep_query(handle_, &attributes), "querying the transports of an endpoint");
  for (unsigned lane = 0; lane < attributes.transports.num_entries; ++lane)
    found.emplace_back(lanes[lane].transport_name ? lanes[lane].transport_name : "",
                       lanes[lane].device_name ? lanes[lane].device_name : "");
  return found;
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
