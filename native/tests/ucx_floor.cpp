// What the UCX library itself does with our work: a process asks for payloads, another sends them. The floor of reads
// over a wire in `transport bench loopback`.
//
//   ucx_floor SIZE CONCURRENCY SECONDS SLOTS CONNECTIONS CHECKSUM     prints one line of JSON
//
// The same as a read: a request as a message of its own, the payload straight into the reader's memory, its receive
// posted before it is asked for, CONCURRENCY under way, over CONNECTIONS with error handling. Each batch reads SLOTS
// payloads, from as many buffers into as many buffers, so that neither side has them in its cache. Memory is of the kinds
// that the ring and the client's pool have, and is mapped before the clock runs. Settings come from the environment.
// CHECKSUM 1: the reader hashes every payload as it arrives. Both sides sleep when nothing comes for a while, as the
// engine does. No tickets, keys, pins, retries or Python.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/checksum.hpp"
#include "common/clock.hpp"

namespace {

constexpr ucp_tag_t kAll = ~ucp_tag_t{0};
constexpr ucp_tag_t kHello = ucp_tag_t{1} << 60, kAsk = ucp_tag_t{2} << 60, kPayload = ucp_tag_t{3} << 60;
constexpr std::uint64_t kSpinNs = 200'000;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kWarmUpBatches = 2;

[[noreturn]] void fail(const char* what, const char* why) {
  std::fprintf(stderr, "ucx_floor: %s: %s\n", what, why);
  std::exit(1);
}

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) fail(what, ucs_status_string(status));
}

struct Ask {
  std::uint32_t connection, slot;
  std::uint64_t tag;
};

std::uint64_t word(std::size_t slot, std::size_t at) { return (slot + 1) * 0x9e3779b97f4a7c15U ^ at; }

// `shared`: as the ring's segment is, else as the blocks of the client's pool are.
std::vector<std::byte*> make_buffers(std::size_t slots, std::size_t size, bool shared) {
  const std::size_t each = (size + 4095) & ~std::size_t{4095}, spare = size >= kHugePage ? kHugePage : 0;
  std::vector<std::byte*> buffers;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    void* const mapped =
        mmap(nullptr, each + spare, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) fail("memory", std::strerror(errno));
    auto* memory = static_cast<std::byte*>(mapped);
    if (spare != 0 && !shared) {
      memory += -reinterpret_cast<std::uintptr_t>(memory) % kHugePage;
      madvise(memory, each, MADV_HUGEPAGE);
    }
    std::memset(memory, 1, each);
    buffers.push_back(memory);
  }
  return buffers;
}

class Worker {
 public:
  Worker() {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_TAG | UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP;
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "settings");
    check(ucp_init(&params, config, &context_), "context");
    ucp_config_release(config);
    ucp_worker_params_t how{};
    how.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    how.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context_, &how, &worker), "worker");
    check(ucp_worker_get_efd(worker, &descriptor_), "descriptor");
  }

  // Progress, and sleep where nothing comes. False: `ending` is readable.
  bool turn(int ending = -1) {
    if (ucp_worker_progress(worker) != 0) {
      active_ns_ = transport::monotonic_ns();
      return true;
    }
    if (transport::monotonic_ns() - active_ns_ < kSpinNs) {
      __builtin_ia32_pause();
      return true;
    }
    if (ucp_worker_arm(worker) != UCS_OK) return true;
    pollfd watched[] = {{descriptor_, POLLIN, 0}, {ending, POLLIN, 0}};
    poll(watched, ending < 0 ? 1 : 2, -1);
    return ending < 0 || watched[1].revents == 0;
  }

  ucp_worker_h worker = nullptr;

 private:
  ucp_context_h context_ = nullptr;
  int descriptor_ = -1;
  std::uint64_t active_ns_ = 0;
};

void end_of_peer(void*, ucp_ep_h, ucs_status_t) {}

ucp_ep_params_t endpoint_params() {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {end_of_peer, nullptr};
  return params;
}

void sent(void* request, ucs_status_t, void*) { ucp_request_free(request); }

// --- the side that has the payloads ----------------------------------------------------------------
class Server {
 public:
  Server(std::size_t size, std::size_t slots, std::size_t most) : size_(size), buffers_(make_buffers(slots, size, true)) {
    for (std::size_t slot = 0; slot < slots; ++slot)
      for (std::size_t at = 0; at + 8 <= size; at += 8) {
        const std::uint64_t value = word(slot, at);
        std::memcpy(buffers_[slot] + at, &value, 8);
      }
    asks_.resize(most);
    for (Ask& ask : asks_) listen_for(ask);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ucp_listener_params_t params{};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr = {reinterpret_cast<const sockaddr*>(&address), sizeof address};
    params.conn_handler = {[](ucp_conn_request_h request, void* self) {
                             static_cast<Server*>(self)->waiting_.push_back(request);
                           },
                           this};
    check(ucp_listener_create(worker_.worker, &params, &listener_), "listening");
    ucp_listener_attr_t found{};
    found.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    check(ucp_listener_query(listener_, &found), "the port");
    std::printf("%d\n", ntohs(reinterpret_cast<const sockaddr_in&>(found.sockaddr).sin_port));
    std::fflush(stdout);
  }

  void run() {
    while (worker_.turn(STDIN_FILENO)) {
      for (const ucp_conn_request_h request : waiting_) accept(request);
      waiting_.clear();
      for (Ask* ask : arrived_) answer(*ask);
      arrived_.clear();
    }
  }

 private:
  void accept(ucp_conn_request_h request) {
    ucp_ep_params_t params = endpoint_params();
    params.field_mask |= UCP_EP_PARAM_FIELD_CONN_REQUEST;
    params.conn_request = request;
    ucp_ep_h endpoint = nullptr;
    check(ucp_ep_create(worker_.worker, &params, &endpoint), "accepting");
    endpoints_.push_back(endpoint);
    send(endpoint, nullptr, 0, kHello | (endpoints_.size() - 1));
  }

  void send(ucp_ep_h endpoint, const void* data, std::size_t size, ucp_tag_t tag) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.cb.send = sent;
    if (UCS_PTR_IS_ERR(ucp_tag_send_nbx(endpoint, data, size, tag, &param))) fail("sending", "the peer is gone");
  }

  void listen_for(Ask& ask) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    param.user_data = &ask;
    param.cb.recv = [](void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* data) {
      ucp_request_free(request);
      if (status == UCS_OK) self_->arrived_.push_back(static_cast<Ask*>(data));
    };
    self_ = this;
    ucp_tag_recv_nbx(worker_.worker, &ask, sizeof ask, kAsk, kAll, &param);
  }

  void answer(Ask& ask) {
    const Ask asked = ask;
    listen_for(ask);
    send(endpoints_[asked.connection], buffers_[asked.slot], size_, asked.tag);
  }

  static inline Server* self_ = nullptr;
  Worker worker_;
  std::size_t size_;
  std::vector<std::byte*> buffers_;
  std::vector<Ask> asks_;
  std::vector<Ask*> arrived_;
  std::vector<ucp_conn_request_h> waiting_;
  std::vector<ucp_ep_h> endpoints_;
  ucp_listener_h listener_ = nullptr;
};

// --- the side that reads ------------------------------------------------------------------------------
class Reader {
 public:
  Reader(std::uint16_t port, std::size_t size, std::size_t slots, std::size_t concurrency, std::size_t connections,
         bool hashes)
      : size_(size), hashes_(hashes), buffers_(make_buffers(slots, size, false)), flights_(concurrency) {
    for (std::size_t made = 0; made < connections; ++made) connect(port);
  }

  // Seconds.
  double batch() {
    const std::uint64_t begun = transport::monotonic_ns();
    next_ = done_ = 0;
    for (Flight& flight : flights_) ask(flight);
    while (done_ < buffers_.size()) {
      worker_.turn();
      for (Flight* flight : std::exchange(arrived_, {})) {
        times_us.push_back(static_cast<double>(transport::monotonic_ns() - flight->begun) * 1e-3);
        if (hashes_) sum_ ^= transport::checksum(buffers_[flight->slot], size_);
        ++done_;
        ask(*flight);
      }
    }
    return static_cast<double>(transport::monotonic_ns() - begun) * 1e-9;
  }

  void verify() const {
    for (std::size_t slot = 0; slot < buffers_.size(); ++slot)
      for (std::size_t at = 0; at + 8 <= size_; at += 8) {
        std::uint64_t value;
        std::memcpy(&value, buffers_[slot] + at, 8);
        if (value != word(slot, at)) fail("verifying", "a payload differs from what was sent");
      }
  }

  std::vector<double> times_us;

 private:
  struct Flight {
    Ask ask;
    std::size_t slot;
    std::uint64_t begun;
    Reader* reader;
  };

  void connect(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ucp_ep_params_t params = endpoint_params();
    params.field_mask |= UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr = {reinterpret_cast<const sockaddr*>(&address), sizeof address};
    ucp_ep_h endpoint = nullptr;
    check(ucp_ep_create(worker_.worker, &params, &endpoint), "connecting");
    endpoints_.push_back(endpoint);
    bool greeted = false;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    param.user_data = &greeted;
    param.cb.recv = [](void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* data) {
      check(status, "connecting");
      ucp_request_free(request);
      *static_cast<bool*>(data) = true;
    };
    ucp_tag_recv_nbx(worker_.worker, nullptr, 0, kHello | (endpoints_.size() - 1), kAll, &param);
    while (!greeted) worker_.turn();
  }

  void ask(Flight& flight) {
    if (next_ == buffers_.size()) return;
    flight.reader = this;
    flight.slot = next_++;
    flight.begun = transport::monotonic_ns();
    const auto connection = static_cast<std::uint32_t>(static_cast<std::size_t>(&flight - flights_.data()) % endpoints_.size());
    flight.ask = {connection, static_cast<std::uint32_t>(flight.slot), kPayload | flight.slot};
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                         UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.user_data = &flight;
    param.cb.recv = [](void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* data) {
      check(status, "receiving");
      ucp_request_free(request);
      auto& arrived = *static_cast<Flight*>(data);
      arrived.reader->arrived_.push_back(&arrived);
    };
    ucp_tag_recv_nbx(worker_.worker, buffers_[flight.slot], size_, flight.ask.tag, kAll, &param);
    ucp_request_param_t how{};
    how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK;
    how.cb.send = sent;
    if (UCS_PTR_IS_ERR(ucp_tag_send_nbx(endpoints_[connection], &flight.ask, sizeof(Ask), kAsk, &how)))
      fail("asking", "the peer is gone");
  }

  Worker worker_;
  std::size_t size_;
  bool hashes_;
  std::uint64_t sum_ = 0;
  std::vector<std::byte*> buffers_;
  std::vector<Flight> flights_;
  std::vector<Flight*> arrived_;
  std::vector<ucp_ep_h> endpoints_;
  std::size_t next_ = 0, done_ = 0;
};

double percentile(std::vector<double>& values, double share) {
  const auto at = static_cast<std::size_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

// Its own program as the server; the pipe into it ends it, also when this process is killed.
pid_t start_server(char** arguments, FILE*& said) {
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) fail("pipes", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::string serve = "--serve";
  char* with[] = {arguments[0], serve.data(), arguments[1], arguments[4], arguments[2], nullptr};
  pid_t server = 0;
  if (posix_spawn(&server, "/proc/self/exe", &actions, nullptr, with, environ) != 0) fail("server", "not started");
  close(in[0]);
  close(out[1]);
  said = fdopen(out[0], "r");
  return server;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 5 && std::string(arguments[1]) == "--serve") {
    Server(std::stoul(arguments[2]), std::stoul(arguments[3]), std::stoul(arguments[4])).run();
    std::_Exit(0);
  }
  if (count != 7) fail("arguments", "SIZE CONCURRENCY SECONDS SLOTS CONNECTIONS CHECKSUM");
  const std::size_t size = std::stoul(arguments[1]), slots = std::stoul(arguments[4]);
  const double seconds = std::stod(arguments[3]);
  FILE* said = nullptr;
  const pid_t server = start_server(arguments, said);
  int port = 0;
  if (std::fscanf(said, "%d", &port) != 1) fail("server", "it does not listen");
  Reader reader(static_cast<std::uint16_t>(port), size, slots, std::stoul(arguments[2]), std::stoul(arguments[5]),
                std::stoul(arguments[6]) != 0);
  for (int batch = 0; batch < kWarmUpBatches; ++batch) {
    reader.batch();
    reader.verify();
  }
  reader.times_us.clear();
  double busy_s = 0;
  std::size_t batches = 0;
  for (; busy_s < seconds; ++batches) {
    busy_s += reader.batch();
    reader.verify();
  }
  const double bytes = static_cast<double>(size * slots * batches);
  std::printf(R"({"gb_per_s": %.6f, "us_p50": %.3f, "us_p99": %.3f, "reads": %zu, "verified": true})" "\n",
              bytes / busy_s / 1e9, percentile(reader.times_us, 0.5), percentile(reader.times_us, 0.99), slots * batches);
  std::fflush(stdout);
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  std::_Exit(0);
}
