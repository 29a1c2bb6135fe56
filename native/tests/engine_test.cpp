// The engine by itself, without Python: a listener's service and a client's link over real UCX on loopback. Under the
// address and undefined-behaviour sanitizers, and with both ends in threads of their own under the thread sanitizer.
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "common/checksum.hpp"
#include "loopback.hpp"
#include "ucp/takes.hpp"

using namespace transport;
using namespace transport::test;
using namespace transport::ucp;

namespace {

constexpr std::uint64_t kSlots = 4, kCapacity = 300'000;

struct Written {
  Lease lease;
  std::uint64_t length, checksum;
};

struct Scene {
  explicit Scene(const char* what, const Limits& limits = {})
      : guard{ring_name(what)}, ring(Ring::create(guard.name, kSlots, kCapacity, Bytes16{})), served(*ring, limits) {}

  // Bytes that differ from place to place and from payload to payload.
  Written write(std::uint64_t length) {
    const auto lease = ring->try_take();
    CHECK(lease);
    std::byte* const bytes = ring->payload(lease->slot);
    for (std::uint64_t at = 0; at < length; ++at) bytes[at] = static_cast<std::byte>(at * 31 + lease->generation + at / 251);
    const std::uint64_t sum = checksum(bytes, length);
    CHECK(ring->publish(lease->slot, lease->generation, {.length = length, .checksum = sum, .note = "note"}));
    return {*lease, length, sum};
  }
  std::uint64_t key(const Lease& lease) const { return slot_key(ring->identity().secret, lease.slot, lease.generation); }

  void connect() {
    endpoint = Endpoint::connect(*client.engine, "127.0.0.1", served.listener.port());
    link = std::make_shared<Link>(endpoint, kClientBase, kListenerBase, kInlineBytes);
    CHECK(reached([this] { return served.admit(); }));
  }
  bool reached(const std::function<bool()>& condition) {
    return until(condition, [this] {
      served.turn();
      client.turn();
    });
  }
  Event told(const void* token) {
    Event event;
    CHECK(reached([&] { return take_event(client.events, token, event); }));
    return event;
  }
  Want want(const Written& of, std::vector<std::byte>& into) const {
    into.assign(of.length, std::byte{0xEE});
    return {of.lease.slot, of.lease.generation, 0, key(of.lease), of.length, into.data(), UCS_MEMORY_TYPE_HOST, true, of.checksum, {}};
  }
  // What a peer of the protocol would never send.
  void send(const std::vector<std::byte>& bytes, std::uint32_t number) {
    auto kept = std::make_shared<std::vector<std::byte>>(bytes);
    endpoint->send(kept->data(), kept->size(), tag_of(kListenerBase, number),
                   {[](void*, std::uint32_t, ucs_status_t, std::size_t) {}, nullptr}, kept);
  }
  void quiet() const {
    CHECK(served.service->attempts() == 0 && served.service->waiting() == 0);
    for (std::uint64_t slot = 0; slot < kSlots; ++slot) CHECK(ring->own_pins(slot) == 0);
  }

  NameGuard guard;
  std::unique_ptr<Ring> ring;
  Served served;
  Side client;
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<Link> link;
};

Record ack_of(const Scene& scene, const Written& written) {
  return {static_cast<std::uint8_t>(Kind::ack), 0, 0, written.lease.slot, written.lease.generation, 0,
          scene.key(written.lease), 0};
}

}  // namespace

TEST(small_and_large_payloads_arrive_whole_and_their_acknowledgement_frees_them) {
  Scene scene("engine-read");
  scene.connect();
  for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1}, kInlineBytes, kInlineBytes + 1, kCapacity}) {
    const Written written = scene.write(length);
    std::vector<std::byte> into;
    Want want = scene.want(written, into);
    char token = 0;
    scene.link->read(&token, {&want, 1}, {});
    CHECK(scene.told(&token).outcome == 0);
    CHECK(checksum(into.data(), into.size()) == written.checksum);
    const Record ack = ack_of(scene, written);
    scene.link->tell({&ack, 1});
    CHECK(scene.reached([&] { return scene.ring->state_counts()[0] == kSlots; }));
  }
  scene.quiet();
}

TEST(a_range_is_the_bytes_that_were_asked_for_and_one_beyond_the_payload_is_refused) {
  Scene scene("engine-range");
  scene.connect();
  const Written written = scene.write(100'000);
  for (const auto& [offset, size] : {std::pair<std::uint64_t, std::uint64_t>{0, 64}, {64, 100}, {640, 50'000}, {99'968, 32}}) {
    std::vector<std::byte> into(size);
    Want want{written.lease.slot, written.lease.generation, 0, scene.key(written.lease), size, into.data(), UCS_MEMORY_TYPE_HOST, false, 0, {}};
    want.verify = want.range = true;
    want.offset = offset;
    char token = 0;
    scene.link->read(&token, {&want, 1}, {});
    CHECK(scene.told(&token).outcome == 0);
    CHECK(std::memcmp(into.data(), scene.ring->payload(written.lease.slot) + offset, size) == 0);
  }
  for (const auto& [offset, size] : {std::pair<std::uint64_t, std::uint64_t>{99'968, 33}, {100'032, 0}, {std::uint64_t{0xFFFF'FFFF} * 64, 1}}) {
    std::vector<std::byte> into(size);
    Want want{written.lease.slot, written.lease.generation, 0, scene.key(written.lease), size, into.data(), UCS_MEMORY_TYPE_HOST, false, 0, {}};
    want.range = true;
    want.offset = offset;
    char token = 0;
    scene.link->read(&token, {&want, 1}, {});
    CHECK(scene.told(&token).outcome == static_cast<long>(Code::length));
  }
  scene.served.connection->close();
  scene.quiet();
}

TEST(a_demand_that_waits_is_answered_when_something_is_written) {
  Scene scene("engine-take");
  scene.connect();
  TakeTerms terms{};
  terms.most = 2;
  terms.wait_ms = 30'000;
  terms.most_bytes = 1 << 20;
  terms.joined_most = 1 << 20;
  terms.oldest_version = kNoVersion;
  terms.verify = true;
  std::vector<std::byte> room(taken_room(terms.most, terms.most_bytes, kNoteCapacity));
  char token = 0;
  scene.link->take(&token, terms, {room.data(), room.size(), {}});
  CHECK(scene.reached([&] { return scene.served.service->waiting() == 1; }));
  const Written written = scene.write(5000);
  const Event event = scene.told(&token);
  CHECK(event.outcomes && *event.outcomes == (std::vector<long>{0, 1, kMoreToCome}));
  const Taken taken = taken_at(room.data(), 0);
  CHECK(taken.slot == written.lease.slot && taken.length == 5000);
  const Record finish{static_cast<std::uint8_t>(Kind::finish), 0, taken.attempts, taken.slot, taken.generation, 0, 0, 0};
  char settled = 0;
  scene.link->settle(&settled, {&finish, 1});
  CHECK(scene.told(&settled).outcome == 0);
  CHECK(scene.reached([&] { return scene.ring->state_counts()[0] == kSlots; }));
  scene.quiet();
}

TEST(a_client_that_goes_away_with_everything_under_way_leaves_no_pin) {
  for (int round = 0; round < 8; ++round) {
    Scene scene("engine-gone");
    scene.connect();
    std::vector<std::vector<std::byte>> into(kSlots);
    std::vector<Want> wants;
    for (std::uint64_t each = 0; each < kSlots; ++each) wants.push_back(scene.want(scene.write(each % 2 ? 200'000 : 90), into[each]));
    char token = 0;
    scene.link->read(&token, wants, {});
    for (int turns = 0; turns < round * 3; ++turns) {
      scene.served.turn();
      scene.client.turn();
    }
    scene.link.reset();
    scene.endpoint->abort();
    End how{};
    CHECK(scene.reached([&] { return scene.served.ended(how); }));
    CHECK(how == End::gone);
    scene.served.connection->close();
    scene.quiet();
    CHECK(scene.ring->state_counts()[static_cast<std::size_t>(State::ready)] == kSlots);  // nothing is lost
  }
}

TEST(what_is_no_message_ends_the_connection_and_nothing_else) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    Scene scene("engine-garbage");
    const Written written = scene.write(500);
    scene.connect();
    std::vector<std::byte> bytes(random() % 200);
    for (std::byte& each : bytes) each = static_cast<std::byte>(random());
    if (bytes.size() >= sizeof(ucp::Header)) {  // so that some have a right header, and some of these a right checksum
      store(bytes.data(), ucp::Header{0, kVersion, static_cast<std::uint8_t>(Kind::control),
                                      static_cast<std::uint16_t>(random() % 4), 0, 0, 0});
      if (random() % 2 == 0) ucp::seal(bytes.data(), bytes.size());
    }
    scene.send(bytes, round % 3 == 0 ? 5 : 0);
    End how{};
    CHECK(scene.reached([&] { return scene.served.ended(how); }));
    CHECK(how == End::garbage);
    scene.served.connection->close();
    scene.quiet();
    CHECK(scene.ring->info(written.lease.slot).state == State::ready);
  }
}

TEST(what_is_asked_ahead_of_its_turn_is_bounded_for_all_connections_together) {
  constexpr std::size_t kEach = 1000, kCharged = kEach + 256;
  for (const std::size_t fitting : {2, 3}) {
    Scene scene("engine-ahead", {.most_ahead_of_all = fitting * kCharged});
    const Written written = scene.write(90);
    scene.connect();
    for (std::uint32_t number = 2; number < 5; ++number) scene.send(std::vector<std::byte>(kEach), number);
    std::vector<std::byte> into;
    Want want = scene.want(written, into);
    char token = 0;
    scene.link->read(&token, {&want, 1}, {});  // its request is the one whose turn it is
    if (fitting == 3) {
      CHECK(scene.told(&token).outcome == 0);
    } else {
      End how{};
      CHECK(scene.reached([&] { return scene.served.ended(how); }));
      CHECK(how == End::garbage);
    }
    scene.served.connection->close();
    scene.quiet();
  }
}

// The listener's end in a thread of its own, as the supervisor's processes are, and the ring's writer in a third one.
TEST(ends_in_threads_of_their_own) {
  constexpr int kPayloads = 300;
  const NameGuard guard{ring_name("engine-threads")};
  const auto ring = Ring::create(guard.name, kSlots, 20'000, Bytes16{});
  const auto attached = Ring::attach(guard.name, Role::listener, false);
  Served served(*attached);
  Side client;
  std::atomic<bool> over = false, admitted = false;
  std::thread listening([&] {
    while (!over) {
      served.turn();
      if (!served.connection && served.admit()) admitted = true;
    }
  });
  std::thread writing([&] {
    for (int written = 0; written < kPayloads;) {
      const auto lease = ring->try_take();
      if (!lease) {
        std::this_thread::yield();
        continue;
      }
      const std::uint64_t length = 1 + static_cast<std::uint64_t>(written) * 61 % 20'000;
      std::memset(ring->payload(lease->slot), written, length);
      CHECK(ring->publish(lease->slot, lease->generation,
                          {.length = length, .checksum = checksum(ring->payload(lease->slot), length), .note = "n"}));
      ++written;
    }
  });
  const auto endpoint = Endpoint::connect(*client.engine, "127.0.0.1", served.listener.port());
  const auto link = std::make_shared<Link>(endpoint, kClientBase, kListenerBase, kInlineBytes);
  CHECK(until([&] { return admitted.load(); }, [&] { client.turn(); }));
  TakeTerms terms{};
  terms.most = 3;
  terms.wait_ms = 1000;
  terms.most_bytes = terms.joined_most = 100'000;
  terms.oldest_version = kNoVersion;
  terms.verify = true;
  std::vector<std::byte> room(taken_room(terms.most, terms.most_bytes, kNoteCapacity));
  for (int consumed = 0; consumed < kPayloads;) {
    char token = 0;
    Event event;
    link->take(&token, terms, {room.data(), room.size(), {}});
    CHECK(until([&] { return take_event(client.events, &token, event); }, [&] { client.turn(); }));
    CHECK(event.outcomes && event.outcomes->size() == 3 && event.outcomes->at(0) == 0);
    std::vector<Record> finishes;
    for (long at = 0; at < event.outcomes->at(1); ++at) {
      const Taken taken = taken_at(room.data(), static_cast<std::size_t>(at));
      finishes.push_back({static_cast<std::uint8_t>(Kind::finish), 0, taken.attempts, taken.slot, taken.generation, 0, 0, 0});
    }
    if (finishes.empty()) continue;
    consumed += static_cast<int>(finishes.size());
    link->settle(&token, finishes);
    CHECK(until([&] { return take_event(client.events, &token, event); }, [&] { client.turn(); }));
  }
  writing.join();
  over = true;
  listening.join();
  CHECK(ring->state_counts()[0] == kSlots);
}

int main(int argc, char** argv) {
  return run_all(argc, argv);
}
