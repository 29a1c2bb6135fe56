// Requests: how each kind begins, and how its end is reported, exactly once.
#include "ucp/engine.hpp"

#include <algorithm>

namespace transport::ucp {

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

// An RDMA device is given the memory of a receive when its message is there; where the kernel locks no more, it fails.
void Engine::received(void*, ucs_status_t status, const ucp_tag_recv_info_t* info, void* request) {
  auto& found = *static_cast<Request*>(request);
  if ((status == UCS_ERR_IO_ERROR || status == UCS_ERR_NO_MEMORY) && found.endpoint != nullptr)
    found.endpoint->refused_ = true;
  if (status == UCS_OK && found.endpoint != nullptr) found.endpoint->heard_ = true;
  found.engine->finish(found, status, status == UCS_OK ? info->length : 0);
}

void Engine::received_stream(void*, ucs_status_t status, std::size_t length, void* request) {
  auto& found = *static_cast<Request*>(request);
  if (status == UCS_OK && found.endpoint != nullptr) found.endpoint->heard_ = true;
  found.engine->finish(found, status, length);
}

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
    if (!receives) engine_->armed_ = false;  // it may need progress that no event asks for
    return &request;
  }
  engine_->finish(request, UCS_PTR_STATUS(started), length);
  return nullptr;
}

namespace {

// Its part is 255, which no message has: who receives it drops it.
constexpr ucp_tag_t kNobodysTag = ~ucp_tag_t{0};

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
                        ucs_memory_type_t memory, ucp_mem_h registered) {
  ucp_request_param_t param{};
  set_memory(param, memory);
  if (registered != nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = registered;
  }
  param.cb.send = &Engine::sent;
  return start(false, waiter, std::move(keep), param, [&](const ucp_request_param_t& with, std::size_t& length) {
    length = size;
    return ucp_tag_send_nbx(handle_, data, size, tag, &with);
  });
}

bool Endpoint::probe() {
  if (!alive()) return false;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL;  // else UCX answers that it has no resource, and keeps nothing
  return ucp_tag_send_nbx(handle_, nullptr, 0, kNobodysTag, &param) == nullptr;
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

// Received into nothing, and the request given back at once: UCX ends it by itself.
void Engine::drop(ucp_tag_message_h message) {
  ++dropped_;
  if (worker_ == nullptr || foreign()) return;
  ucp_request_param_t param{};
  char nothing = 0;
  const ucs_status_ptr_t started = ucp_tag_msg_recv_nbx(worker_, &nothing, 0, message, &param);
  if (UCS_PTR_IS_PTR(started)) ucp_request_free(started);
}

}  // namespace transport::ucp
