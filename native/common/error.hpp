// The one exception of the native core. Codes are actions a caller can take, not errno values; Python has an error of
// transport/errors.py for each (bindings/ring_module.cpp).
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace transport {

enum class Fault : int {
  exists = 1,  // create: the segment exists and its keeper is alive
  not_found,   // attach: no such segment
  layout,      // magic, version, sizes or fingerprint differ
  not_ready,   // the creator died in creation, or is at it
  no_owner,    // live processes hold all owner numbers
  no_memory,   // the segment does not fit into /dev/shm
  denied,      // permission, or another user's segment
  system,      // any other errno
  detached,    // closed, or inherited through fork
  argument,    // slot, rank, name or size out of range
};

class RingFault : public std::runtime_error {
 public:
  RingFault(Fault code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Fault code() const noexcept { return code_; }

  bool of_new_file = false;  // of the making of a ring in a file, where other remedies help

 private:
  Fault code_;
};

[[noreturn]] inline void fail(Fault code, const std::string& message) { throw RingFault(code, message); }

// The errno of `call` on `subject`, as the fault a caller can act upon.
[[noreturn]] inline void fail_errno(int error, const std::string& call, const std::string& subject) {
  const std::string message = call + "(" + subject + "): " + std::strerror(error);
  switch (error) {
    case ENOENT:
      fail(Fault::not_found, message);
    case EEXIST:
      fail(Fault::exists, message);
    case EACCES:
    case EPERM:
      fail(Fault::denied, message);
    case ENOSPC:
    case ENOMEM:
    case EFBIG:
      fail(Fault::no_memory, message);
    default:
      fail(Fault::system, message);
  }
}

}  // namespace transport
