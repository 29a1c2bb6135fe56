#include "ucp/sockets.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace transport::ucp {

namespace {

// UCX's buffer for a request: 2 KiB (its setting TCP_CM_PRIV_DATA_LEN) and a header. What has filled it and is no request
// never becomes one.
constexpr std::uint64_t kMostRequestBytes = 2048 + 16;

constexpr std::size_t kReserve = 64;            // descriptors; at most a quarter of the limit
constexpr std::size_t kMostPerConnection = 8;   // descriptors, sockets and shared memory together
constexpr std::size_t kFew = 4096;              // so many can be used up between two looks a second apart

std::size_t descriptor_limit() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<std::size_t>(limit.rlim_cur) : SIZE_MAX;
}

std::size_t reserve_of(std::size_t limit) { return std::min(kReserve, limit / 4); }

ino_t socket_inode(int descriptor) {  // 0: no socket
  struct stat found {};
  return fstat(descriptor, &found) == 0 && S_ISSOCK(found.st_mode) ? found.st_ino : 0;
}

using Ask = int (*)(int, sockaddr*, socklen_t*);

// The answer of getsockname or getpeername; of no family where there is none.
SocketAddress asked(Ask ask, int descriptor) {
  SocketAddress found;
  socklen_t size = sizeof found.storage;
  if (ask(descriptor, reinterpret_cast<sockaddr*>(&found.storage), &size) != 0) found.storage.ss_family = AF_UNSPEC;
  return found;
}

bool says_too_much(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
         size >= offsetof(tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received &&
         info.tcpi_bytes_received > kMostRequestBytes;
}

}  // namespace

Gate::Gate(const SocketAddress& at) : at_(at), directory_(opendir("/proc/self/fd"), &closedir) {
  if (directory_ == nullptr) return;
  spare_ = fcntl(dirfd(directory_.get()), F_DUPFD_CLOEXEC, 0);
}

Gate::~Gate() {
  if (spare_ >= 0) close(spare_);
}

bool Gate::admitted(const SocketAddress& client) {
  if (const std::string name = text_of(client); !name.empty()) admitted_.insert(name);
  const std::size_t limit = descriptor_limit();
  if (used_ + ++requests_ * kMostPerConnection + reserve_of(limit) > limit) keep_reserve();
  return !shut_;
}

bool Gate::is_at(int descriptor) const {
  if (at_.port() == 0) return false;
  int kind = 0;  // ports of UDP are others
  socklen_t kind_size = sizeof kind;
  if (getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &kind, &kind_size) != 0 || kind != SOCK_STREAM) return false;
  const SocketAddress address = asked(getsockname, descriptor);
  return address.storage.ss_family == at_.storage.ss_family && address.port() == at_.port() &&
         (at_.is_any() || address.host() == at_.host());
}

Gate::Kind Gate::classify(int descriptor) const {
  if (!is_at(descriptor)) return Kind::other;
  int accepts = 0;
  socklen_t size = sizeof accepts;
  const bool listens = getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) == 0 && accepts != 0;
  return listens ? Kind::listens : Kind::stranger;
}

bool Gate::has_admitted(int descriptor) const {
  return !admitted_.empty() && admitted_.contains(text_of(asked(getpeername, descriptor)));
}

// Sockets are asked by number: who closes one meanwhile, so that the number is another's, has us learn nothing worse than
// that. What stands in `seen_` is of sockets that were there at the last round, and is forgotten with them.
template <typename Do>
void Gate::for_each(std::int64_t now_ns, Do act) {
  if (directory_ == nullptr) return;
  ++round_;
  used_ = requests_ = 0;
  rewinddir(directory_.get());
  const int own = dirfd(directory_.get());
  while (const dirent* entry = readdir(directory_.get())) {
    const int descriptor = std::atoi(entry->d_name);
    ++used_;
    if (entry->d_name[0] == '.' || descriptor == own || descriptor == spare_) continue;
    const ino_t inode = socket_inode(descriptor);
    if (inode == 0) continue;
    const auto [found, fresh] = seen_.try_emplace(descriptor, Seen{inode, Kind::other, now_ns, round_});
    Seen& seen = found->second;
    if (fresh || seen.inode != inode) seen = {inode, classify(descriptor), now_ns, round_};
    seen.round = round_;
    if (seen.kind == Kind::other) continue;
    if (seen.kind == Kind::stranger && has_admitted(descriptor)) seen.kind = Kind::admitted;
    act(descriptor, seen);
  }
  admitted_.clear();  // the remaining connections have been seen
  std::erase_if(seen_, [&](const auto& each) { return each.second.round != round_; });
}

// A number can become another's at any time, so whatever changes a socket does it on a number of ours. dup3 takes no new
// one. Should a file have got the number in between, then ours is left open: closing it would drop the file's locks.
template <typename Do>
void Gate::with(int descriptor, ino_t inode, Do act) {
  if (socket_inode(descriptor) != inode) return;
  if (spare_ < 0) spare_ = fcntl(dirfd(directory_.get()), F_DUPFD_CLOEXEC, 0);
  if (spare_ < 0 || dup3(descriptor, spare_, O_CLOEXEC) < 0) return;
  const ino_t held = socket_inode(spare_);
  if (held == inode && is_at(spare_)) act(spare_);
  struct stat found {};
  if (held == 0 && (fstat(spare_, &found) != 0 || S_ISREG(found.st_mode)))
    spare_ = -1;
  else
    dup3(dirfd(directory_.get()), spare_, O_CLOEXEC);
}

// After it every use of the connection is an error. To shut it is not enough where UCX asks for no bytes: it would not be
// told of the end.
void Gate::reset(int descriptor, ino_t inode) {
  with(descriptor, inode, [](int held) {
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    connect(held, &nobody, sizeof nobody);
  });
}

bool Gate::end_strangers(std::int64_t now_ns, std::int64_t patience_ns) {
  bool again = false;
  for_each(now_ns, [&](int descriptor, Seen& seen) {
    if (seen.kind != Kind::stranger) return;
    again = true;
    if (shut_ || now_ns - seen.since_ns > patience_ns || says_too_much(descriptor)) reset(descriptor, seen.inode);
  });
  return keep_reserve() || again;
}

// True while descriptors are so few that they should be looked at again soon.
bool Gate::keep_reserve() {
  const std::size_t limit = descriptor_limit(), reserve = reserve_of(limit);
  if (requests_ > 0 || directory_ == nullptr) for_each(0, [](int, Seen&) {});
  const std::size_t left = limit - std::min(used_, limit);
  if (!shut_ && left < reserve) {
    shut_ = true;
    ignore_newcomers();
    for_each(0, [&](int descriptor, Seen& seen) {
      if (seen.kind == Kind::stranger) reset(descriptor, seen.inode);
    });
  } else if (shut_ && left >= 2 * reserve) {
    shut_ = false;
    ignore_newcomers(false);
  }
  return left < kFew;
}

void Gate::ignore_newcomers(bool ignored) {
  sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};  // of each packet, keep no byte
  const sock_fprog program = {1, &nothing};
  const int unused = 0;
  for_each(0, [&](int descriptor, Seen& seen) {
    if (seen.kind != Kind::listens) return;
    with(descriptor, seen.inode, [&](int held) {
      if (ignored)
        setsockopt(held, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
      else
        setsockopt(held, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused);
    });
  });
}

bool Gate::end_connections() {
  bool none = true;
  for_each(0, [&](int descriptor, Seen& seen) {
    if (seen.kind == Kind::listens) {
      pollfd ready = {descriptor, POLLIN, 0};
      if (poll(&ready, 1, 0) > 0) none = false;
      return;
    }
    none = false;
    if (seen.kind == Kind::stranger && says_too_much(descriptor))
      reset(descriptor, seen.inode);
    else
      with(descriptor, seen.inode, [](int held) { shutdown(held, SHUT_RD); });
  });
  return none;
}

}  // namespace transport::ucp
