// A ticket's MessagePack, spliced from what all tickets of a ring share and what one payload has of its own.
// transport/ticket.py has the fields and their order; tests compare the two byte by byte.
#pragma once

#include <algorithm>
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

// Reads a note of any writer again: nothing of it is believed.
class MessagePackReader {
 public:
  explicit MessagePackReader(std::string_view data) : data_(data) {}

  // The number of what follows: elements of an array.
  std::optional<std::uint64_t> array() {
    const auto tag = byte();
    if (!tag) return std::nullopt;
    if ((*tag & 0xF0) == 0x90) return *tag & 0x0F;
    if (*tag == 0xDC) return big_endian(2);
    if (*tag == 0xDD) return big_endian(4);
    return std::nullopt;
  }
  std::optional<std::uint64_t> unsigned_number() {
    const auto tag = byte();
    if (!tag) return std::nullopt;
    if (*tag < 0x80) return *tag;
    if (*tag < 0xCC || *tag > 0xCF) return std::nullopt;
    return big_endian(std::size_t{1} << (*tag - 0xCC));
  }
  // Text of less than 256 bytes.
  std::optional<std::string_view> text() {
    const auto tag = byte();
    if (!tag) return std::nullopt;
    std::optional<std::uint64_t> size;
    if ((*tag & 0xE0) == 0xA0)
      size = *tag & 0x1Fu;
    else if (*tag == 0xD9)
      size = big_endian(1);
    if (!size || *size > data_.size()) return std::nullopt;
    const std::string_view found = data_.substr(0, *size);
    data_.remove_prefix(*size);
    return found;
  }
  // Passes over so many values with all that is in them. False: they end behind the data, or are not MessagePack.
  bool skip(std::uint64_t values) {
    while (values > 0) {
      const auto tag = byte();
      if (!tag || *tag == 0xC1) return false;
      --values;
      std::optional<std::uint64_t> bytes = 0, inner = 0;
      if (*tag >= 0x80 && *tag <= 0x8F)
        inner = 2 * (*tag & 0x0Fu);
      else if (*tag >= 0x90 && *tag <= 0x9F)
        inner = *tag & 0x0Fu;
      else if (*tag >= 0xA0 && *tag <= 0xBF)
        bytes = *tag & 0x1Fu;
      else if (*tag >= 0xC4 && *tag <= 0xC6)  // bytes
        bytes = big_endian(std::size_t{1} << (*tag - 0xC4));
      else if (*tag >= 0xC7 && *tag <= 0xC9)  // an extension, with its type
        bytes = plus_one(big_endian(std::size_t{1} << (*tag - 0xC7)));
      else if (*tag == 0xCA || *tag == 0xCE || *tag == 0xD2)
        bytes = 4;
      else if (*tag == 0xCB || *tag == 0xCF || *tag == 0xD3)
        bytes = 8;
      else if (*tag == 0xCC || *tag == 0xD0)
        bytes = 1;
      else if (*tag == 0xCD || *tag == 0xD1)
        bytes = 2;
      else if (*tag >= 0xD4 && *tag <= 0xD8)  // an extension of 1 to 16 bytes
        bytes = 1 + (std::uint64_t{1} << (*tag - 0xD4));
      else if (*tag >= 0xD9 && *tag <= 0xDB)  // text
        bytes = big_endian(std::size_t{1} << (*tag - 0xD9));
      else if (*tag == 0xDC || *tag == 0xDD)
        inner = big_endian(*tag == 0xDC ? 2 : 4);
      else if (*tag == 0xDE || *tag == 0xDF)
        inner = twice(big_endian(*tag == 0xDE ? 2 : 4));
      if (!bytes || !inner || *bytes > data_.size()) return false;
      data_.remove_prefix(*bytes);
      values += *inner;  // each has a byte of its own, so the data ends before this overflows
      if (values > data_.size()) return false;
    }
    return true;
  }

 private:
  std::optional<unsigned> byte() {
    if (data_.empty()) return std::nullopt;
    const auto value = static_cast<unsigned char>(data_.front());
    data_.remove_prefix(1);
    return value;
  }
  std::optional<std::uint64_t> big_endian(std::size_t bytes) {
    if (data_.size() < bytes) return std::nullopt;
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | static_cast<unsigned char>(data_[i]);
    data_.remove_prefix(bytes);
    return value;
  }
  static std::optional<std::uint64_t> plus_one(std::optional<std::uint64_t> value) {
    return value ? std::optional(*value + 1) : value;
  }
  static std::optional<std::uint64_t> twice(std::optional<std::uint64_t> value) {
    return value ? std::optional(*value * 2) : value;
  }

  std::string_view data_;
};

inline constexpr std::string_view kNoteMagic = "TK\x01";
inline constexpr std::size_t kNoteElements = 17, kFingerprintElement = 11, kLengthsElement = 13;
inline constexpr std::size_t kFingerprintDigits = 32;

// The fingerprint of the schema that a note names; empty: it is not such a note.
inline std::string_view read_fingerprint(std::string_view note) {
  if (!note.starts_with(kNoteMagic)) return {};
  MessagePackReader reader(note.substr(kNoteMagic.size()));
  if (reader.array() != kNoteElements || !reader.skip(kFingerprintElement)) return {};
  const std::string_view found = reader.text().value_or(std::string_view());
  const auto hexadecimal = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return found.size() == kFingerprintDigits && std::all_of(found.begin(), found.end(), hexadecimal) ? found
                                                                                                 : std::string_view();
}

// The numbers of the ragged and the optional tensors that a note tells, exactly `count` of them. False: it is not such a note.
inline bool read_lengths(std::string_view note, std::uint64_t* lengths, std::size_t count) {
  if (!note.starts_with(kNoteMagic)) return false;
  MessagePackReader reader(note.substr(kNoteMagic.size()));
  if (reader.array() != kNoteElements || !reader.skip(kLengthsElement) || reader.array() != count) return false;
  for (std::size_t i = 0; i < count; ++i) {
    const auto length = reader.unsigned_number();
    if (!length) return false;
    lengths[i] = *length;
  }
  return reader.skip(kNoteElements - kLengthsElement - 1);
}

}  // namespace transport
