// The vectors that its authors published: key 00..0f, message 00..(n-1).
#include "check.hpp"
#include "common/siphash.hpp"

using namespace transport;

namespace {

constexpr std::array<std::uint8_t, 16> kKey{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr std::uint64_t kOfLength[] = {0x726fdb47dd0e0e31, 0x74f839c593dc67fd, 0x0d6c8009d9a94f5a, 0x85676696d7fb7e2d,
                                       0xcf2794e0277187b7, 0x18765564cd99a68d, 0xcbc9466e58fee3ce, 0xab0200f58b01d137,
                                       0x93f5f5799a932462, 0x9e0082df0ba9e4b0, 0x7a5dbbc594ddb9f3, 0xf4b32f46226bada7,
                                       0x751e8fbc860ee5fb, 0x14ea5627c0843d90, 0xf723ca908e7af2ee, 0xa129ca6149be45e5,
                                       0x3f2acc7f57c29bdb};

}  // namespace

TEST(published_vectors_of_every_remainder) {
  std::uint8_t message[63];
  for (std::size_t i = 0; i < sizeof message; ++i) message[i] = static_cast<std::uint8_t>(i);
  for (std::size_t size = 0; size < std::size(kOfLength); ++size)
    CHECK(SipHash24(kKey).of(message, size) == kOfLength[size]);
  CHECK(SipHash24(kKey).of(message, sizeof message) == 0x958a324ceb064572);
}

TEST(a_word_is_a_message_of_eight_bytes) { CHECK(SipHash24(kKey).of(0x0706050403020100) == kOfLength[8]); }

TEST(a_slot_key_is_of_slot_then_generation) { CHECK(slot_key(kKey, 0x03020100, 0x07060504) == kOfLength[8]); }

int main(int argc, char** argv) { return transport::test::run_all(argc, argv); }
