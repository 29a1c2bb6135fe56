// A ticket's MessagePack, spliced from what all tickets of a ring share and what one payload has of its own.
// transport/ticket.py has the fields and their order; tests compare the two byte by byte.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace transport {

class MessagePack {
 public:
  explicit MessagePack(std::string& out) : out_(out) {}

  void raw(std::string_view encoded) { out_.append(encoded); }
  void unsigned_number(std::uint64_t value) {
    if (value < 0x80)
      big_endian(value, 1);
    else if (value <= 0xFF)
      tagged(0xCC, value, 1);
    else if (value <= 0xFFFF)
      tagged(0xCD, value, 2);
    else if (value <= 0xFFFF'FFFF)
      tagged(0xCE, value, 4);
    else
      tagged(0xCF, value, 8);
  }
  void number(double value) { tagged(0xCB, std::bit_cast<std::uint64_t>(value), 8); }
  void nil() { out_.push_back(static_cast<char>(0xC0)); }
  void array(std::size_t count) {
    if (count < 16)
      big_endian(0x90 | count, 1);
    else
      tagged(0xDC, count, 2);
  }

 private:
  void tagged(unsigned tag, std::uint64_t value, unsigned bytes) {
    out_.push_back(static_cast<char>(tag));
    big_endian(value, bytes);
  }
  void big_endian(std::uint64_t value, unsigned bytes) {
    while (bytes-- > 0) out_.push_back(static_cast<char>(value >> (8 * bytes)));
  }

  std::string& out_;
};

struct NoteFields {
  std::string_view head;    // magic, version, the array's head; ring, segment, host, addresses, ports
  std::uint64_t slot, generation, key, size, checksum;
  unsigned readers;
  std::string_view middle;  // the schema's fingerprint, and the schema or nil
  const std::vector<std::uint64_t>& lengths;
  double created;
  std::optional<double> deadline;
  std::string_view metadata;  // a map
};

inline void encode_note(std::string& out, const NoteFields& fields) {
  out.clear();
  MessagePack pack(out);
  pack.raw(fields.head);
  for (const std::uint64_t value : {fields.slot, fields.generation, fields.key, fields.size, fields.checksum})
    pack.unsigned_number(value);
  pack.unsigned_number(fields.readers);
  pack.raw(fields.middle);
  pack.array(fields.lengths.size());
  for (const std::uint64_t length : fields.lengths) pack.unsigned_number(length);
  pack.number(fields.created);
  if (fields.deadline)
    pack.number(*fields.deadline);
  else
    pack.nil();
  pack.raw(fields.metadata);
}

}  // namespace transport
