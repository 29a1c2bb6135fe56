// libFuzzer: any bytes in the place of a CONTROL message are refused, or every record of it can be read. The message lies
// in memory of exactly its size, so that the address sanitizer sees a look beyond it.
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "ucp/frames.hpp"

using namespace transport::ucp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto message = std::make_unique<std::byte[]>(size);
  std::memcpy(message.get(), data, size);
  std::uint32_t due = 0;
  if (size >= sizeof(Header)) due = load<Header>(message.get()).number & 0xff;  // so that numbers can be right
  if (size >= sizeof(Header)) seal(message.get(), size);  // what is behind the checksum is looked at, too
  if (control_fault(message.get(), size, due) != nullptr) return 0;
  const auto header = load<Header>(message.get());
  if (header.version != kVersion || header.number != due || header.count == 0 || header.count > kMostRecords) std::abort();
  std::uint64_t sum = 0;
  for (std::size_t index = 0; index < header.count; ++index) {
    const Record record = record_at(message.get(), index);
    if (record.kind < 0x20 || record.kind > 0x2c) std::abort();
    if (record.kind == static_cast<std::uint8_t>(Kind::end)) {
      const std::byte* const texts = message.get() + sizeof(Header) + sizeof(Record);
      for (std::uint32_t at = 0; at < reason_bytes(record) + consumer_bytes(record); ++at)
        sum += static_cast<std::uint64_t>(texts[at]);
    }
    if (record.kind == static_cast<std::uint8_t>(Kind::take)) {
      const std::uint64_t room = taken_room(record.slot, bytes_of(record), 2048);
      if (header.count != 1 || record.slot - 1 >= kMostTaken || record.rank >= kRanks || room >> 31 != 0) std::abort();
    }
    sum += record.key + record.length + record.slot;
  }
  volatile std::uint64_t used = sum;
  static_cast<void>(used);
  return 0;
}
