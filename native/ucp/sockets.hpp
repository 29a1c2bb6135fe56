// The kernel's side of a listening port: what UCX has of it stands in no interface of its own.
#pragma once

#include <netinet/in.h>

namespace transport::ucp {

// Have the kernel ignore whoever wants to connect to an address that this process listens on. Who has already been
// connected still comes in.
void ignore_newcomers(const sockaddr_in& at);

// End all of this process's connections through an address that it listens on, as if their clients had. True once there
// are none, and none that the kernel has ready to be accepted; call again until then.
bool end_connections(const sockaddr_in& at);

}  // namespace transport::ucp
