#include "sockets.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

namespace transport::ucp {

namespace {

// One of this process's sockets, held by a descriptor of our own: its number cannot become another's meanwhile.
class Held {
 public:
  explicit Held(int descriptor) : descriptor_(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)) {}
  ~Held() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  int descriptor() const { return descriptor_; }

  bool is_at(const sockaddr_in& at) const {
    if (descriptor_ < 0 || at.sin_port == 0) return false;
    int kind = 0;  // ports of UDP are others
    socklen_t kind_size = sizeof kind;
    if (getsockopt(descriptor_, SOL_SOCKET, SO_TYPE, &kind, &kind_size) != 0 || kind != SOCK_STREAM) return false;
    sockaddr_in address{};
    socklen_t size = sizeof address;
    return getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
           address.sin_family == AF_INET && address.sin_port == at.sin_port &&
           (at.sin_addr.s_addr == INADDR_ANY || address.sin_addr.s_addr == at.sin_addr.s_addr);
  }

  bool listens() const {
    int accepts = 0;
    socklen_t size = sizeof accepts;
    return getsockopt(descriptor_, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) == 0 && accepts != 0;
  }

 private:
  int descriptor_;
};

template <typename Do>
void for_each_socket_at(const sockaddr_in& at, Do act) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/proc/self/fd"), &closedir);
  if (directory == nullptr) return;
  const int own = dirfd(directory.get());
  while (const dirent* entry = readdir(directory.get())) {
    const int descriptor = std::atoi(entry->d_name);
    if (entry->d_name[0] == '.' || descriptor == own) continue;
    const Held held(descriptor);
    if (held.is_at(at)) act(held);
  }
}

}  // namespace

void ignore_newcomers(const sockaddr_in& at) {
  sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};  // of each packet, keep no byte
  const sock_fprog program = {1, &nothing};
  for_each_socket_at(at, [&](const Held& held) {
    if (held.listens()) setsockopt(held.descriptor(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
  });
}

bool end_connections(const sockaddr_in& at) {
  bool none = true;
  for_each_socket_at(at, [&](const Held& held) {
    if (!held.listens()) {
      none = false;
      shutdown(held.descriptor(), SHUT_RD);
      return;
    }
    pollfd ready = {held.descriptor(), POLLIN, 0};
    if (poll(&ready, 1, 0) > 0) none = false;
  });
  return none;
}

}  // namespace transport::ucp
