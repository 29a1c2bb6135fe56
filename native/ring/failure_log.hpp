// The last deliveries that ended without being trained on, and why: a short log in the segment that any owner writes.
//
// An entry is written word by word without a lock, its own checksum last. Two writers meet in one entry only when one
// was stopped while as many others wrote as the log has entries; the checksum tells that from an entry, as it tells one
// whose writer was killed.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "common/checksum.hpp"
#include "common/text.hpp"
#include "ring/slot_word.hpp"

namespace transport {

enum class Ended : std::uint8_t { discarded = 0, dead = 1, aged = 2 };

struct Failure {
  std::uint64_t position = 0, sequence = 0;  // of the log's entries, and of the payload's publication
  std::uint32_t slot = 0, generation = 0;
  unsigned rank = 0, attempts = 0;
  Ended how = Ended::discarded;
  std::string reason, consumer;
};

// Twice as many as the ring has slots, within these: who asks behind each group that he writes misses none. As many as
// there are slots can end at once, and as many again that were written meanwhile.
inline constexpr std::uint64_t kLeastFailures = 256, kMostFailures = 8192;
inline constexpr std::size_t kReasonBytes = 160, kConsumerBytes = 56;

class FailureEntry {
 public:
  void write(const Failure& failure) {
    std::array<std::uint64_t, kWords> words{};
    const std::size_t reason = whole_text(failure.reason, kReasonBytes).size();
    const std::size_t consumer = whole_text(failure.consumer, kConsumerBytes).size();
    words[0] = failure.position + 1;
    words[1] = failure.sequence;
    words[2] = std::uint64_t{failure.generation} << 32 | failure.slot;
    words[3] = std::uint64_t{failure.rank} | std::uint64_t{static_cast<std::uint8_t>(failure.how)} << 8 |
               std::uint64_t{failure.attempts} << 16 | std::uint64_t{reason} << 32 | std::uint64_t{consumer} << 48;
    std::memcpy(&words[kReasonAt], failure.reason.data(), reason);
    std::memcpy(&words[kConsumerAt], failure.consumer.data(), consumer);
    words[kWords - 1] = checksum(words.data(), (kWords - 1) * sizeof(std::uint64_t));
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
  }

  std::optional<Failure> read() const {
    std::array<std::uint64_t, kWords> words{};
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (words[0] == 0 || words[kWords - 1] != checksum(words.data(), (kWords - 1) * sizeof(std::uint64_t)))
      return std::nullopt;
    Failure failure;
    failure.position = words[0] - 1;
    failure.sequence = words[1];
    failure.slot = static_cast<std::uint32_t>(words[2]);
    failure.generation = static_cast<std::uint32_t>(words[2] >> 32);
    failure.rank = std::min<unsigned>(words[3] & 0xFF, kMaxReaders - 1);
    failure.how = static_cast<Ended>(std::min<std::uint64_t>(words[3] >> 8 & 0xFF, 2));
    failure.attempts = words[3] >> 16 & 0xFFFF;
    const auto* bytes = reinterpret_cast<const char*>(words.data());
    failure.reason.assign(bytes + kReasonAt * 8, std::min<std::size_t>(words[3] >> 32 & 0xFFFF, kReasonBytes));
    failure.consumer.assign(bytes + kConsumerAt * 8, std::min<std::size_t>(words[3] >> 48, kConsumerBytes));
    return failure;
  }

 private:
  static constexpr std::size_t kWords = 32, kReasonAt = 4, kConsumerAt = kReasonAt + kReasonBytes / 8;
  static_assert(kConsumerAt + kConsumerBytes / 8 == kWords - 1, "the texts end before the checksum");

  std::array<std::atomic<std::uint64_t>, kWords> words_;
};
static_assert(sizeof(FailureEntry) == 256, "entries lie densely");

}  // namespace transport
