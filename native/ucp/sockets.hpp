// The kernel's side of a listening port: what UCX has of it stands in no interface of its own.
//
// UCX's own thread accepts every connection and waits without limit for a connection request. If a peer sends more bytes
// than a request has, UCX stops reading, is notified again and again of readable bytes, and keeps a core busy. So this
// closes connections that sent no valid request within a time and a size.
//
// Where no descriptor is left, UCX's thread tries to accept the same connection for ever, and writes an error each time.
// So a reserve of descriptors is kept: while it is not free, the kernel ignores new connections to the port, requests that
// came are rejected, and connections without a request are ended at once.
#pragma once

#include <dirent.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "ucp/addresses.hpp"

namespace transport::ucp {

// Of one address that this process listens on. Belongs to the engine's thread. A descriptor of a file that is no socket
// is never duplicated, since closing it would give up the locks that this process has on the file.
class Gate {
 public:
  explicit Gate(const SocketAddress& at);
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // A valid request of this client has come. False: there are too few descriptors to serve it.
  bool admitted(const SocketAddress& client);

  // Look after the reserve of descriptors, and end a peer that is not admitted, and was seen `patience_ns` ago or has said more than a request can have. True
  // while there are some to look at again. Nothing tells when a client connects: UCX's thread accepts at once, and a
  // descriptor that waits for the same has then nothing to tell any more. So this is called now and then.
  bool end_strangers(std::int64_t now_ns, std::int64_t patience_ns);

  // The reserve of descriptors is in use: newcomers are ignored.
  bool shut() const { return shut_; }

  // Make the kernel ignore new connections, or not. Connections that are already established are still accepted.
  void ignore_newcomers(bool ignored = true);

  // End all connections, as if their clients had. True once there are none, and none that the kernel has ready to be
  // accepted; call again until then.
  bool end_connections();

 private:
  enum class Kind { other, listens, admitted, stranger };
  struct Seen {
    ino_t inode;
    Kind kind;
    std::int64_t since_ns;
    std::uint64_t round;
  };

  template <typename Do>
  void for_each(std::int64_t now_ns, Do act);
  Kind classify(int descriptor) const;
  bool is_at(int descriptor) const;
  bool has_admitted(int descriptor) const;
  template <typename Do>
  void with(int descriptor, ino_t inode, Do act);
  void reset(int descriptor, ino_t inode);
  bool keep_reserve();

  const SocketAddress at_;
  std::unique_ptr<DIR, int (*)(DIR*)> directory_;  // kept open: descriptors may run out
  int spare_ = -1;  // a number of ours for what is held
  std::size_t used_ = 0;  // descriptors of this process, at the last round
  std::size_t requests_ = 0;  // since then
  bool shut_ = false;  // the reserve is in use: no newcomers
  std::uint64_t round_ = 0;
  std::unordered_map<int, Seen> seen_;
  std::unordered_set<std::string> admitted_;  // since the last round
};

}  // namespace transport::ucp
