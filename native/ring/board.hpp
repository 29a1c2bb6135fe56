// A short text or table that one process writes and all may read, however the writer ends.
//
// Two copies and a version: version v is shown in copy v & 1, the next one is written into the other
// copy and shown by advancing the version. A writer killed half-way has shown nothing. Writers
// exclude each other by a kernel lock, which dies with them (Ring::write_board).
//
// SYNC B: words are stored before the version that shows them and loaded after it; a reader whose
// version is still current afterwards has read one copy that was not being written.
#pragma once

#include <atomic>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "common/fault.hpp"

namespace transport {

template <std::size_t Capacity>
class Board {
 public:
  static_assert(Capacity % 8 == 0, "a board is stored in 64-bit words");

  std::string read() const {
    for (;;) {
      const std::uint64_t version = version_.load(std::memory_order_acquire);  // SYNC B
      const Copy& copy = copies_[version & 1];
      const std::size_t length = std::min<std::uint64_t>(copy[0].load(std::memory_order_acquire), Capacity);
      std::string text(Capacity, '\0');
      for (std::size_t i = 0; i < kWords; ++i) {
        const std::uint64_t word = copy[i + 1].load(std::memory_order_acquire);
        std::memcpy(text.data() + i * 8, &word, 8);
      }
      if (version_.load(std::memory_order_relaxed) != version) continue;
      text.resize(length);
      return text;
    }
  }

  // Writers exclude each other; text.size() <= Capacity.
  void write(std::string_view text) {
    const std::uint64_t version = version_.load(std::memory_order_relaxed) + 1;
    Copy& copy = copies_[version & 1];
    copy[0].store(text.size(), std::memory_order_release);
    for (std::size_t i = 0; i * 8 < text.size(); ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, text.data() + i * 8, std::min<std::size_t>(8, text.size() - i * 8));
      copy[i + 1].store(word, std::memory_order_release);
    }
    FAULT_POINT("board.written");
    version_.store(version, std::memory_order_release);  // SYNC B
  }

 private:
  static constexpr std::size_t kWords = Capacity / 8;
  using Copy = std::array<std::atomic<std::uint64_t>, kWords + 1>;

  std::atomic<std::uint64_t> version_;
  std::array<Copy, 2> copies_;
};

}  // namespace transport
