// Trees that a peer made up: whole ones pass, all others are refused, and no byte beyond the end is read. Under the
// address sanitizer each lies in memory of exactly its size.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "check.hpp"
#include "common/tree_check.hpp"

using namespace transport;

namespace {

const char* wrong(std::string_view bytes, unsigned depth = 8, std::uint64_t values = 100) {
  const auto copy = std::make_unique<std::uint8_t[]>(bytes.size());
  std::memcpy(copy.get(), bytes.data(), bytes.size());
  return TreeCheck(copy.get(), bytes.size(), depth, values).run();
}

}  // namespace

TEST(a_whole_tree_passes_and_no_part_of_it_does) {
  // A list of a dict of text to an empty tuple (extension 1), and a float.
  const std::string whole("\x92\x81\xA1" "k\xD4\x01\x90\xCB\0\0\0\0\0\0\0\0", 16);
  CHECK(wrong(whole) == nullptr);
  for (std::size_t size = 0; size < whole.size(); ++size) CHECK(wrong(std::string_view(whole).substr(0, size)) != nullptr);
  CHECK(wrong(whole + "x") != nullptr);
}

TEST(depth_and_values_are_bounded) {
  CHECK(wrong(std::string(8, '\x91') + "\xC0") == nullptr);
  CHECK(wrong(std::string(9, '\x91') + "\xC0") != nullptr);
  CHECK(wrong(std::string("\xDC\0\x63", 3) + std::string(99, '\0')) == nullptr);
  CHECK(wrong(std::string("\xDC\0\x64", 3) + std::string(100, '\0')) != nullptr);
}

TEST(any_bytes_are_looked_at_without_reading_beyond_them) {
  std::mt19937_64 random(7);
  const std::string forms("\x81\x91\xA1\xC4\xC7\xC9\xD4\xD8\xDB\xDC\xDD\xDF\x01\x02\x00\xC1", 16);
  int refused = 0;
  for (int round = 0; round < 300'000; ++round) {
    std::string bytes(random() % 40, '\0');
    for (char& each : bytes) each = random() % 2 ? forms[random() % forms.size()] : static_cast<char>(random());
    refused += wrong(bytes) != nullptr;
  }
  CHECK(refused > 200'000);
}

int main(int argc, char** argv) { return transport::test::run_all(argc, argv); }
