// Looks through one MessagePack value that a peer may have made up, before anything is made of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace transport {

// Walks over the bytes without reading beyond them. An extension's body is one array; its codes are those of
// transport/values/forms.py.
class TreeCheck {
 public:
  TreeCheck(const std::uint8_t* data, std::size_t size, unsigned most_depth, std::uint64_t most_values)
      : at_(data), end_(data + size), most_depth_(most_depth), values_left_(most_values) {}

  // What is wrong; nullptr: it is one value, and ends where the bytes end.
  const char* run() {
    value(0);
    if (wrong_ == nullptr && at_ != end_) wrong_ = "there are bytes behind the tree";
    return wrong_;
  }

 private:
  static constexpr std::uint8_t kFirstCode = 1, kLastCode = 8;

  std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }

  void refuse(const char* what) {
    if (wrong_ == nullptr) wrong_ = what;
    at_ = end_;
  }

  // A big-endian number of so many bytes.
  std::uint64_t number(unsigned bytes) {
    std::uint64_t found = 0;
    if (left() < bytes) {
      refuse("the tree is cut off");
      return 0;
    }
    for (unsigned i = 0; i < bytes; ++i) found = found << 8 | *at_++;
    return found;
  }

  void skip(std::uint64_t bytes) {
    if (bytes > left()) return refuse("the tree is cut off");
    at_ += bytes;
  }

  void several(std::uint64_t count, unsigned depth) {
    if (depth >= most_depth_) return refuse("the tree is nested too deep");
    if (count > left()) return refuse("the tree is cut off");  // each has a byte at least
    for (std::uint64_t i = 0; i < count && wrong_ == nullptr; ++i) value(depth + 1);
  }

  void extension(std::uint64_t bytes, unsigned depth) {
    const auto code = static_cast<std::uint8_t>(number(1));
    if (wrong_ != nullptr) return;
    if (code < kFirstCode || code > kLastCode) return refuse("the tree has a form that is not known");
    if (bytes == 0 || bytes > left()) return refuse("the tree is cut off");
    const bool array = (*at_ & 0xF0) == 0x90 || *at_ == 0xDC || *at_ == 0xDD;
    if (!array) return refuse("a form of the tree has no array");
    const std::uint8_t* const outer = end_;
    end_ = at_ + bytes;
    value(depth);
    if (wrong_ == nullptr && at_ != end_) refuse("there are bytes behind a form of the tree");
    if (wrong_ == nullptr) end_ = outer;
  }

  void value(unsigned depth) {
    if (values_left_-- == 0) {
      values_left_ = 0;
      return refuse("the tree has too many values");
    }
    const auto first = static_cast<std::uint8_t>(number(1));
    if (wrong_ != nullptr) return;
    if (first <= 0x7F || first >= 0xE0) return;             // a small integer
    if (first <= 0x8F) return several(2u * (first & 0x0Fu), depth);
    if (first <= 0x9F) return several(first & 0x0Fu, depth);
    if (first <= 0xBF) return skip(first & 0x1Fu);          // text
    switch (first) {
      case 0xC0: case 0xC2: case 0xC3: return;              // nil, false, true
      case 0xC4: case 0xD9: return skip(number(1));         // bytes, text
      case 0xC5: case 0xDA: return skip(number(2));
      case 0xC6: case 0xDB: return skip(number(4));
      case 0xC7: return extension(number(1), depth);
      case 0xC8: return extension(number(2), depth);
      case 0xC9: return extension(number(4), depth);
      case 0xCA: return skip(4);                            // float
      case 0xCB: return skip(8);
      case 0xCC: case 0xD0: return skip(1);                 // integers
      case 0xCD: case 0xD1: return skip(2);
      case 0xCE: case 0xD2: return skip(4);
      case 0xCF: case 0xD3: return skip(8);
      case 0xD4: return extension(1, depth);
      case 0xD5: return extension(2, depth);
      case 0xD6: return extension(4, depth);
      case 0xD7: return extension(8, depth);
      case 0xD8: return extension(16, depth);
      case 0xDC: return several(number(2), depth);
      case 0xDD: return several(number(4), depth);
      case 0xDE: return several(2 * number(2), depth);
      case 0xDF: return several(2 * number(4), depth);
      default: return refuse("the tree has a byte that MessagePack does not have");
    }
  }

  const std::uint8_t* at_;
  const std::uint8_t* end_;
  unsigned most_depth_;
  std::uint64_t values_left_;
  const char* wrong_ = nullptr;
};

}  // namespace transport
