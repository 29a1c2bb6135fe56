// libFuzzer: any bytes in the place of a ticket's note, which a peer may have made up: the fingerprint and the lengths are
// read from within the note, or it is refused. The note lies in memory of exactly its size.
//
// Input: how many lengths are asked for (one byte), and the note; the other half of the inputs has its magic in front.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "ring/ticket_note.hpp"

using namespace transport;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::size_t count = data[0] % 5;
  const std::string_view magic = data[0] >= 128 ? kNoteMagic : std::string_view();
  ++data, --size;
  const std::size_t whole = magic.size() + size;
  const auto memory = std::make_unique<char[]>(whole);
  if (!magic.empty()) std::memcpy(memory.get(), magic.data(), magic.size());
  if (size != 0) std::memcpy(memory.get() + magic.size(), data, size);
  const std::string_view note(memory.get(), whole);

  const std::string_view fingerprint = read_fingerprint(note);
  if (!fingerprint.empty()) {
    if (fingerprint.size() != kFingerprintDigits || fingerprint.data() < note.data() ||
        fingerprint.data() + fingerprint.size() > note.data() + note.size())
      std::abort();
    for (const char each : fingerprint)
      if (std::strchr("0123456789abcdef", each) == nullptr) std::abort();
  }
  const auto lengths = std::make_unique<std::uint64_t[]>(count);
  const auto again = std::make_unique<std::uint64_t[]>(count + 1);
  if (read_lengths(note, lengths.get(), count) && read_lengths(note, again.get(), count + 1)) std::abort();
  return 0;
}
