// Short texts that come from elsewhere, as reports and terminals can show them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace transport {

// As much of a text as fits without a piece of a UTF-8 character at its end.
inline std::string_view whole_text(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

// Bytes of the UTF-8 character that begins here; 0: none does.
inline std::size_t utf8_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  const std::size_t length = first < 0x80 ? 1 : first >= 0xC2 && first < 0xE0 ? 2 : (first & 0xF0) == 0xE0 ? 3
                             : first >= 0xF0 && first < 0xF5                  ? 4
                                                                              : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((at(i) & 0xC0) != 0x80) return 0;
  if (first == 0xE0 && at(1) < 0xA0) return 0;  // a shorter form exists
  if (first == 0xED && at(1) >= 0xA0) return 0;  // half of a UTF-16 pair
  if (first == 0xF0 && at(1) < 0x90) return 0;
  if (first == 0xF4 && at(1) >= 0x90) return 0;  // beyond the last character
  return length;
}

// One line of valid UTF-8 of at most the same length: control characters become spaces, other bytes question marks.
inline std::string one_line(std::string_view text) {
  std::string line;
  line.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0)
      line += '?';
    else if (first < 0x20 || first == 0x7F || (first == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0))
      line += ' ';
    else
      line += text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return line;
}

}  // namespace transport
