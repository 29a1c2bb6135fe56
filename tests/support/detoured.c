// Preloaded into a process: its TCP connections over IPv4 go to a port of loopback that a test chooses (detour.py). It is
// asked for over the socket that DETOUR names, by address and port that the process wants.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int (*theirs)(int, const struct sockaddr*, socklen_t);

// The port to connect to instead, in network order, as both are; 0: no answer.
static uint16_t instead(const struct sockaddr_in* wanted) {
  unsigned char asked[6];
  memcpy(asked, &wanted->sin_addr, 4);
  memcpy(asked + 4, &wanted->sin_port, 2);
  struct sockaddr_un place = {.sun_family = AF_UNIX};
  strncpy(place.sun_path, getenv("DETOUR"), sizeof place.sun_path - 1);
  const int ask = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  uint16_t port = 0;
  if (theirs(ask, (const struct sockaddr*)&place, sizeof place) != 0 || write(ask, asked, 6) != 6 || read(ask, &port, 2) != 2)
    port = 0;
  close(ask);
  return port;
}

int connect(int fd, const struct sockaddr* address, socklen_t length) {
  if (theirs == NULL) theirs = (int (*)(int, const struct sockaddr*, socklen_t))dlsym(RTLD_NEXT, "connect");
  int kind = 0;
  socklen_t size = sizeof kind;
  if (getenv("DETOUR") == NULL || address->sa_family != AF_INET || length < sizeof(struct sockaddr_in) ||
      getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) != 0 || kind != SOCK_STREAM)
    return theirs(fd, address, length);
  struct sockaddr_in other;
  memcpy(&other, address, sizeof other);
  other.sin_port = instead(&other);
  other.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (other.sin_port == 0) {
    errno = ECONNREFUSED;
    return -1;
  }
  return theirs(fd, (const struct sockaddr*)&other, sizeof other);
}
