// libFuzzer: what a client that was admitted sends, as messages over real UCX on loopback. READ, READ_RANGE, TAKE, the
// ends of claims and everything else of it are answered or end the connection; no message makes the listener hold a pin,
// a claim or a demand when the connection is closed, or damages a payload of the ring.
//
// Input: steps, each a byte and what it takes: bytes as they are, a message of records whose slots, generations and keys
// may be right, a payload that is written, turns of both engines.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/checksum.hpp"
#include "loopback.hpp"

using namespace transport;
using namespace transport::test;
using namespace transport::ucp;

namespace {

constexpr std::uint64_t kSlots = 3, kCapacity = 20'000;
constexpr std::size_t kMostSteps = 24;

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  std::uint8_t byte() { return size_ == 0 ? 0 : (--size_, *data_++); }
  std::uint64_t number() {  // most are small, some as large as can be
    const std::uint8_t kind = byte();
    if (kind < 160) return kind % 16;
    if (kind < 200) return std::uint64_t{byte()} << 8 | byte();
    std::uint64_t found = 0;
    for (int each = 0; each < 8; ++each) found = found << 8 | byte();
    return found;
  }
  std::vector<std::byte> bytes(std::size_t most) {
    std::vector<std::byte> taken(std::min(most, size_));
    if (!taken.empty()) std::memcpy(taken.data(), data_, taken.size());
    data_ += taken.size(), size_ -= taken.size();
    return taken;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

std::unique_ptr<Ring> make_ring() {
  static const std::string name = ring_name("fuzz-serving");
  shm_unlink(name.c_str());  // of a process of the same number that was killed
  std::atexit([] { shm_unlink(name.c_str()); });
  return Ring::create(name, kSlots, kCapacity, Bytes16{});
}

struct Scene {
  std::unique_ptr<Ring> ring = make_ring();
  Served served{*ring, {.most_reads = 8, .most_unsent = 16, .most_ahead = 1 << 16, .most_waiting = 2}};
  Side client;
  std::shared_ptr<Endpoint> endpoint;
  std::uint32_t number = 0;
  std::uint64_t inputs = 0;
  bool over = true;

  Scene() {
    client.engine->sort_unexpected = [](ucp_tag_t, std::size_t, ucp_tag_message_h) { return false; };  // answers
  }

  void turn() {
    served.turn();
    client.turn();
    End how{};
    if (served.ended(how)) {
      if (how == End::internal) std::abort();
      over = true;
    }
  }

  void connect() {
    served.connection.reset();
    if (endpoint) endpoint->abort();
    endpoint = Endpoint::connect(*client.engine, "127.0.0.1", served.listener.port());
    if (!until([this] { return served.admit(); }, [this] { served.turn(), client.turn(); })) std::abort();
    number = 0;
    over = false;
  }

  void send(std::vector<std::byte> bytes, std::uint32_t as) {
    auto kept = std::make_shared<std::vector<std::byte>>(std::move(bytes));
    endpoint->send(kept->data(), kept->size(), tag_of(kListenerBase, as),
                   {[](void*, std::uint32_t, ucs_status_t, std::size_t) {}, nullptr}, kept);
  }

  Record record(Input& input) {
    const std::uint8_t how = input.byte();
    Record made{};
    made.kind = static_cast<std::uint8_t>(0x20 + input.byte() % 15);
    made.rank = static_cast<std::uint8_t>(input.number());
    made.attempts = static_cast<std::uint16_t>(input.number());
    made.slot = static_cast<std::uint32_t>(how & 1 ? input.number() : how >> 1 & 3);
    const SlotInfo info = ring->info(made.slot % kSlots);
    made.generation = static_cast<std::uint32_t>(how & 8 ? input.number() : info.generation);
    made.joined_most = static_cast<std::uint32_t>(input.number());
    made.key = how & 16 ? input.number() : slot_key(ring->identity().secret, made.slot, made.generation);
    made.length = how & 32 ? input.number() : info.length;
    if (how & 64) made.key = input.number() % 200 | (input.number() % 60) << 32;  // of the texts of an END
    return made;
  }

  void send_records(Input& input) {
    const std::uint8_t count = 1 + input.byte() % 4;
    std::vector<std::byte> message(sizeof(ucp::Header) + count * sizeof(Record));
    store(message.data(), ucp::Header{0, kVersion, static_cast<std::uint8_t>(Kind::control), count, number, 0, 0});
    for (std::size_t each = 0; each < count; ++each)
      store(message.data() + sizeof(ucp::Header) + each * sizeof(Record), record(input));
    const std::vector<std::byte> behind = input.bytes(input.byte() % 250);
    message.insert(message.end(), behind.begin(), behind.end());
    ucp::seal(message.data(), message.size());
    send(std::move(message), number++);
  }

  void write(std::uint64_t length, unsigned readers) {
    const auto lease = ring->try_take();
    if (!lease) return;
    std::memset(ring->payload(lease->slot), static_cast<int>(lease->generation), length);
    ring->publish(lease->slot, lease->generation,
                  {.length = length, .checksum = checksum(ring->payload(lease->slot), length), .readers = readers, .note = "n"});
  }

  void step(Input& input) {
    const std::uint8_t which = input.byte();
    switch (which % 8) {
      case 0: send(input.bytes(input.byte()), number++); break;
      case 1: send(input.bytes(2048 + 16), number + which / 8 % 3); break;
      case 2: write(which < 128 ? which : kCapacity - which, 1 + which / 8 % 2); break;
      case 3:
      case 4:
        for (int turns = 0; turns < 1 + which / 16; ++turns) turn();
        break;
      default: send_records(input); break;
    }
  }

  // Everything that was asked is answered or given up, and the ring is as if nobody had been there. To connect takes longer
  // than all the rest: a connection that is as new is kept for the next input, others are closed.
  void settle() {
    for (int turns = 0; turns < 20 && !over; ++turns) turn();
    Connection& connection = *served.connection;
    // What is left of its attempts are claims, which end with it: their holder is not silent for longer than its lease.
    const bool kept = ++inputs % 8 != 0 && !over && connection.expire(1e12) >= 0 && connection.waiting() == 0 &&
                      connection.unsent() == 0 && served.service->attempts() == 0;
    if (!kept) {
      connection.close();
      turn();
      over = true;
    }
    if (served.service->attempts() != 0 || served.service->waiting() != 0) std::abort();
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      const SlotInfo info = ring->info(slot);
      if (ring->own_pins(slot) != 0 || info.pins != 0 || info.state == State::reading || info.state == State::writing) std::abort();
      if (info.state != State::ready) continue;
      if (checksum(ring->payload(slot), info.length) != info.checksum) std::abort();
      if (!ring->discard(slot, info.generation)) std::abort();
    }
    if (ring->state_counts()[static_cast<std::size_t>(State::free)] != kSlots) std::abort();
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Scene* const scene = new Scene;  // UCX's contexts are not made again for each input, and end with the process
  Input input(data, size);
  if (scene->over) scene->connect();
  scene->write(5000, 1);
  scene->write(17'000, 2);
  for (std::size_t steps = 0; steps < kMostSteps && !input.empty() && !scene->over; ++steps) scene->step(input);
  scene->settle();
  return 0;
}
