// A listener with its service, and a client, each with an engine of its own over real UCX on the loopback device, in one
// process. Both are driven by turns from one thread, or each from its own. run.py has UCX's settings for it.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "check.hpp"
#include "common/clock.hpp"
#include "common/siphash.hpp"
#include "ucp/reading.hpp"
#include "ucp/serving.hpp"

namespace transport::test {

inline constexpr std::uint32_t kListenerBase = 0x1000, kClientBase = 0x2000;
inline constexpr std::uint64_t kInlineBytes = 8192;
inline constexpr std::uint64_t kPatienceNs = 60'000'000'000;  // a watchdog

class Side {
 public:
  Side() {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_TAG | UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP;
    ucp_config_t* config = nullptr;
    CHECK(ucp_config_read(nullptr, nullptr, &config) == UCS_OK);
    CHECK(ucp_init(&params, config, &context_) == UCS_OK);
    ucp_config_release(config);
    ucp_worker_params_t how{};
    how.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    how.thread_mode = UCS_THREAD_MODE_SINGLE;
    CHECK(ucp_worker_create(context_, &how, &worker_) == UCS_OK);
    engine = std::make_shared<ucp::Engine>(context_, worker_);
  }
  ~Side() {
    engine->close();
    engine->take_garbage();
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  // One turn; what it has told since, which is kept until it is asked for.
  void turn() {
    engine->drive(0);
    engine->take_garbage();
    for (ucp::Event& each : engine->take_events()) events.push_back(std::move(each));
  }

  std::shared_ptr<ucp::Engine> engine;
  std::vector<ucp::Event> events;

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
};

// False: not within the patience.
inline bool until(const std::function<bool()>& condition, const std::function<void()>& turn) {
  const std::uint64_t begun = monotonic_ns();
  while (!condition()) {
    if (monotonic_ns() - begun > kPatienceNs) return false;
    turn();
  }
  return true;
}

// The event of this token, taken out of those that were told.
inline bool take_event(std::vector<ucp::Event>& events, const void* token, ucp::Event& found) {
  for (std::size_t at = 0; at < events.size(); ++at) {
    if (events[at].token != token) continue;
    found = std::move(events[at]);
    events.erase(events.begin() + static_cast<std::ptrdiff_t>(at));
    return true;
  }
  return false;
}

class Served {
 public:
  explicit Served(Ring& ring, const ucp::Limits& limits = {})
      : service(std::make_shared<ucp::Service>(*side.engine, ring, limits)),
        listener(*side.engine, "127.0.0.1", 0, 64, &arrivals_) {}
  ~Served() {
    service->watch_no_more();
    if (connection) connection->close();
    connection.reset();
    listener.close();
  }

  // As after the handshake, of which the engine knows nothing.
  bool admit() {
    ucp::Event event;
    if (!take_event(side.events, &arrivals_, event)) return false;
    connection = ucp::Connection::open(service, event.endpoint, kListenerBase, kClientBase, 0, true, &ended_);
    return true;
  }
  bool ended(ucp::End& how) {
    ucp::Event event;
    if (!take_event(side.events, &ended_, event)) return false;
    how = static_cast<ucp::End>(event.outcome);
    return true;
  }
  void turn() {
    side.turn();
    service->look();
  }

  Side side;
  std::shared_ptr<ucp::Service> service;
  ucp::Listener listener;
  std::shared_ptr<ucp::Connection> connection;

 private:
  char arrivals_ = 0, ended_ = 0;  // their places are the tokens
};

}  // namespace transport::test
