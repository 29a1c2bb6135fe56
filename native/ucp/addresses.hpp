// Addresses of both families as the socket calls of UCX take them, and as text.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

namespace transport::ucp {

// An address of either family with a port.
struct SocketAddress {
  sockaddr_storage storage{};

  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  const sockaddr_in& ipv4() const { return reinterpret_cast<const sockaddr_in&>(storage); }
  const sockaddr_in6& ipv6() const { return reinterpret_cast<const sockaddr_in6&>(storage); }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage); }
  socklen_t size() const { return is_ipv6() ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }
  std::uint16_t port() const { return ntohs(is_ipv6() ? ipv6().sin6_port : ipv4().sin_port); }

  // The bytes of the address alone.
  std::string host() const {
    return is_ipv6() ? std::string(reinterpret_cast<const char*>(&ipv6().sin6_addr), sizeof(in6_addr))
                     : std::string(reinterpret_cast<const char*>(&ipv4().sin_addr), sizeof(in_addr));
  }
  bool is_any() const { return host() == std::string(host().size(), '\0'); }
};

// "" is all of IPv4. Nothing: no IP address.
inline std::optional<SocketAddress> parsed(const std::string& address, std::uint16_t port) {
  SocketAddress found;
  auto& ipv4 = reinterpret_cast<sockaddr_in&>(found.storage);
  auto& ipv6 = reinterpret_cast<sockaddr_in6&>(found.storage);
  if (address.find(':') != std::string::npos) {
    ipv6.sin6_family = AF_INET6;
    ipv6.sin6_port = htons(port);
    if (inet_pton(AF_INET6, address.c_str(), &ipv6.sin6_addr) == 1) return found;
  } else {
    ipv4.sin_family = AF_INET;
    ipv4.sin_port = htons(port);
    if (address.empty() || inet_pton(AF_INET, address.c_str(), &ipv4.sin_addr) == 1) return found;
  }
  return std::nullopt;
}

// Empty for an address of another family, or none.
inline std::string text_of(const SocketAddress& address) {
  char text[INET6_ADDRSTRLEN] = "";
  const void* const host = address.is_ipv6() ? static_cast<const void*>(&address.ipv6().sin6_addr)
                                             : static_cast<const void*>(&address.ipv4().sin_addr);
  if (inet_ntop(address.storage.ss_family, host, text, sizeof text) == nullptr) return {};
  std::string found(address.is_ipv6() ? "[" : "");
  found.append(text).append(address.is_ipv6() ? "]:" : ":").append(std::to_string(address.port()));
  return found;
}

}  // namespace transport::ucp
