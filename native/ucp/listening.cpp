// Connections that come in: taken while there is room, turned away otherwise.
#include "ucp/engine.hpp"

#include <algorithm>


namespace transport::ucp {

Listener::Listener(Engine& engine, const std::string& address, std::uint16_t port, std::size_t most, void* token)
    : engine_(engine), most_(most), token_(token) {
  const SocketAddress at = address_of(address, port);
  engine.require_open();
  auto door = std::make_unique<Door>(Door{engine, this});
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = at.data();
  params.sockaddr.addrlen = at.size();
  params.conn_handler = {&Listener::arrived, door.get()};
  check(ucp_listener_create(engine.worker_, &params, &door->handle), "listening");
  door_ = engine.doors_.emplace_back(std::move(door)).get();
  engine.listeners_.insert(this);
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  const ucs_status_t status = ucp_listener_query(door_->handle, &attributes);
  if (status != UCS_OK) {
    close();
    throw UcxFault(status, "querying the listening port");
  }
  const SocketAddress found{attributes.sockaddr};
  door_->gate = std::make_unique<Gate>(found);
  port_ = found.port();
}

Listener::~Listener() { close(); }

void Listener::arrived(ucp_conn_request_h request, void* self) {
  const auto& door = *static_cast<const Door*>(self);
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  bool served = true;
  if (door.gate != nullptr && ucp_conn_request_query(request, &attributes) == UCS_OK)
    served = door.gate->admitted({attributes.client_address});
  Engine& engine = door.engine;
  if (served && door.owner != nullptr &&
      engine.endpoints_.size() + engine.postponed_.size() + door.owner->waiting_.size() < door.owner->most_) {
    door.owner->waiting_.push_back(request);
    return;
  }
  ucp_listener_reject(door.handle, request);
}

bool Listener::end_strangers(std::int64_t patience_ns) {
  return door_ != nullptr && !engine_.foreign() && door_->gate->end_strangers(now_ns(), patience_ns);
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

}  // namespace transport::ucp
