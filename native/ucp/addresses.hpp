// IPv4 addresses as the socket calls of UCX take them, and as text.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstdint>
#include <string>

#include "ucp/engine.hpp"

namespace transport::ucp {

inline sockaddr_in address_of(const std::string& address, std::uint16_t port) {
  sockaddr_in found{};
  found.sin_family = AF_INET;
  found.sin_port = htons(port);
  found.sin_addr.s_addr = INADDR_ANY;
  if (!address.empty() && inet_pton(AF_INET, address.c_str(), &found.sin_addr) != 1)
    throw UcxFault(UCS_ERR_INVALID_ADDR, address + " is not an IPv4 address");
  return found;
}

inline std::string text_of(const sockaddr_storage& address) {
  if (address.ss_family != AF_INET) return "client";
  const auto& found = reinterpret_cast<const sockaddr_in&>(address);
  char text[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &found.sin_addr, text, sizeof text);
  return std::string(text) + ":" + std::to_string(ntohs(found.sin_port));
}

}  // namespace transport::ucp
