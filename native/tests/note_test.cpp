// The lengths in a ticket's note: what encode_note wrote is read again; cut off or changed, it is refused or read, but
// never beyond its end. Under the address sanitizer the note lies in memory of exactly its size.
#include <random>
#include <vector>

#include "check.hpp"
#include "ring/ticket_note.hpp"

using namespace transport;

namespace {

std::string pack(const std::vector<std::uint64_t>& lengths, std::string_view metadata = "\x80") {
  std::string head(kNoteMagic);
  MessagePack start(head);
  start.array(17);
  start.raw("\xA2id");
  start.raw("\xD9\x03seg");
  start.raw("\xA4host");
  start.raw("\x91\xA4" "10.0");
  start.raw("\x92\xCD\x1F\x40\x01");
  std::string note;
  encode_note(note, {head, 3, 4, ~0ull, 1 << 20, 0x80, 2, "\xA2" "ff\xC0", lengths, 1.5, std::nullopt, metadata});
  return note;
}

bool read(std::string_view note, std::vector<std::uint64_t>& lengths) {
  const std::vector<char> copy(note.begin(), note.end());
  return read_lengths({copy.data(), copy.size()}, lengths.data(), lengths.size());
}

}  // namespace

TEST(lengths_of_every_size_are_read_again) {
  const std::vector<std::uint64_t> wanted{0, 127, 128, 255, 256, 65535, 65536, 0xFFFF'FFFF, 0x1'0000'0000, ~0ull,
                                          1, 2,   3,   4,   5,   6,     7,     8,           9};
  for (std::size_t count = 0; count <= wanted.size(); ++count) {
    const std::vector<std::uint64_t> some(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(count));
    std::vector<std::uint64_t> found(count);
    CHECK(read(pack(some), found));
    CHECK(found == some);
    std::vector<std::uint64_t> more(count + 1);
    CHECK(!read(pack(some), more));
  }
}

TEST(the_fingerprint_is_read_where_it_is_one) {
  const std::string digits = "0123456789abcdef0123456789abcdef";
  const auto note = [&](std::string_view text) {
    std::string made = pack({5});
    const std::string_view before = "\xA2" "ff\xC0";
    return made.replace(made.find(before), before.size() - 1, text);
  };
  const auto fingerprint = [](std::string_view made) {
    const std::vector<char> copy(made.begin(), made.end());
    return std::string(read_fingerprint({copy.data(), copy.size()}));
  };
  CHECK(fingerprint(note("\xD9\x20" + digits)) == digits);
  CHECK(fingerprint(note("\xA2" "ff")).empty());
  CHECK(fingerprint(note("\xD9\x20" + std::string(32, '\xC5'))).empty());
  CHECK(fingerprint(note("\xD9\x20" + std::string(32, 'F'))).empty());
  CHECK(fingerprint(note("\xCD\x20\x20")).empty());
  const std::string whole = note("\xD9\x20" + digits);
  std::vector<std::uint64_t> found(1);
  CHECK(read(whole, found));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::string part = fingerprint(whole.substr(0, size));
    CHECK(part.empty() || part == digits);
  }
}

TEST(what_follows_the_lengths_may_be_anything_that_is_complete) {
  std::vector<std::uint64_t> found(1);
  CHECK(read(pack({5}, "\x82\xA1" "a\xC3\xA1" "b\x92\xD1\x01\x02\xC7\x01\x05" "x"), found));
  CHECK(found[0] == 5);
  CHECK(!read(pack({5}, "\x82\xA1" "a\xC3"), found));
  CHECK(!read(pack({5}, "\xC1"), found));
  CHECK(!read(pack({5}, "\xDF\xFF\xFF\xFF\xFF"), found));
  CHECK(!read(pack({5}, "\xDB\xFF\xFF\xFF\xFF"), found));
}

TEST(a_note_that_is_cut_off_is_refused) {
  const std::string note = pack({5, 70000});
  std::vector<std::uint64_t> found(2);
  CHECK(read(note, found));
  for (std::size_t size = 0; size < note.size(); ++size) CHECK(!read(std::string_view(note).substr(0, size), found));
}

TEST(random_changes_are_refused_or_read_within_the_note) {
  std::mt19937 random(1);
  const std::string note = pack({5, 70000});
  std::vector<std::uint64_t> found(2);
  for (int turn = 0; turn < 200'000; ++turn) {
    std::string changed = note;
    for (unsigned many = 1 + random() % 4; many > 0; --many) changed[random() % changed.size()] = static_cast<char>(random());
    changed.resize(1 + random() % changed.size());
    read(changed, found);
  }
}

int main(int argc, char** argv) { return transport::test::run_all(argc, argv); }
