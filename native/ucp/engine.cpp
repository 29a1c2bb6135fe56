// Rounds of progress, when to sleep, and the end. Endpoints, requests and the listener have files of their own.
#include "ucp/engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace transport::ucp {

namespace {

constexpr std::int64_t kLongestTurnNs = 2'000'000;  // then the loop's other work has its turn
constexpr std::int64_t kShuttingNs = 1'000'000'000;  // at most
constexpr auto kShuttingPause = std::chrono::microseconds(200);
constexpr std::int64_t kShortestSpinNs = 5'000;
constexpr std::int64_t kGatherNs = 20'000;  // what comes with an event is handed over with it
constexpr unsigned kMostLooks = 1000;  // for what came before a peer's end

void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

}  // namespace

bool Engine::foreign() const { return getpid() != pid_; }

Engine::Engine(ucp_context_h context, ucp_worker_h worker) : context_(context), worker_(worker), pid_(getpid()) {
  check(ucp_worker_get_efd(worker, &descriptor_), "getting the worker's descriptor");
  active_ns_ = now_ns();
}

ucp_mem_h Engine::register_memory(std::span<std::byte> memory, std::shared_ptr<void> keep) {
  require_open();
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = memory.data();
  params.length = memory.size();
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  ucp_mem_h registered = nullptr;
  check(ucp_mem_map(context_, &params, &registered), "registering memory");
  registered_.emplace_back(registered, std::move(keep));
  return registered;
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
  // What a peer said before it went lies in this side's memory, and is heard first. Others may say more all the time.
  for (unsigned looks = 0; !lost_.empty() && looks < kMostLooks && ucp_worker_progress(worker_) != 0; ++looks) ++done;
  for (; !lost_.empty(); ++done) {
    Endpoint* const endpoint = lost_.back();
    lost_.pop_back();
    endpoint->lost();
  }
  for (Listener* listener : listeners_) {
    for (const ucp_conn_request_h request : std::exchange(listener->waiting_, {})) {
      ++done;
      try {
        emit({listener->token_, 0, nullptr, Endpoint::accept(*this, request), true});
      } catch (const UcxFault& fault) {  // the client was gone before it was accepted, or no device leads to it
        emit({listener->token_, fault.status(), nullptr, nullptr, true});
      }
    }
  }
  const std::size_t due = deferred_.size();  // what is deferred meanwhile has its turn after others' progress
  for (std::size_t at = 0; at < due; ++at) {
    Deferred* const work = deferred_[at];
    if (work == nullptr) continue;
    deferred_[at] = nullptr;
    work->queued_ = false;
    work->run();
    ++done;
  }
  deferred_.erase(deferred_.begin(), deferred_.begin() + static_cast<std::ptrdiff_t>(due));
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

void Engine::expect_soon() { active_ns_ = now_ns(); }

bool Engine::drive(std::int64_t spin_most_ns) {
  if (worker_ == nullptr || foreign()) return armed_ = true;
  const std::int64_t entered = now_ns();
  const bool expected = expecting != 0;
  armed_ = false;
  if (!postponed_.empty()) close_postponed(entered);
  std::int64_t now = entered;
  bool armed = false;
  for (unsigned busy = 0;;) {
    const unsigned did = progress();
    if (did != 0) {
      armed = false;
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
    if (armed) return asleep_ = armed_ = true;
    if (!events_.empty() && (expected || expecting != 0)) return false;  // more is asked soon, and a spin may pay
    now = now_ns();
    if (expecting != 0 && now - active_ns_ < std::min(spin_ns_, spin_most_ns)) {
      relax();
      continue;
    }
    const ucs_status_t status = ucp_worker_arm(worker_);
    // Verbs tell of what comes after the arming alone: of what came between the last look and it, the next look does.
    armed = status == UCS_OK;
    if (armed) continue;
    if (status != UCS_ERR_BUSY) throw UcxFault(status, "arming the worker's descriptor");
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
    shut_doors();
    // ucxx receives what no receive stands for before it destroys a worker, and would wait for ever for a payload whose
    // sender is gone.
    ucp_tag_recv_info_t info;
    while (ucp_tag_probe_nb(worker_, 0, 0, 1, &info) != nullptr) {
    }
    for (const auto& [registered, memory] : registered_) ucp_mem_unmap(context_, registered);
    registered_.clear();
  }
  doors_.clear();
  worker_ = nullptr;
}

// UCX destroys a listener, but not the connections that it has taken and not yet heard a request on: when that comes,
// UCX's own thread calls the listener that is gone. So they end before it does.
void Engine::shut_doors() {
  const std::int64_t begun = now_ns();
  for (const auto& door : doors_)
    if (door->gate) door->gate->ignore_newcomers();
  for (const auto& door : doors_) {
    while (door->gate && !door->gate->end_connections() && now_ns() - begun < kShuttingNs) {
      ucp_worker_progress(worker_);
      std::this_thread::sleep_for(kShuttingPause);  // UCX's own thread is at it
    }
  }
  for (const auto& door : doors_) ucp_listener_destroy(door->handle);
}

}  // namespace transport::ucp
