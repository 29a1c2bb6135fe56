// Batches of payloads in a process's own memory: gathered as a plain loop would, by many threads at once, and refused to
// all other uses meanwhile. Under the address sanitizer every piece lies in memory of exactly its size.
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "check.hpp"
#include "ring/received.hpp"

using namespace transport;

namespace {

constexpr std::string_view kFingerprint = "0123456789abcdef0123456789abcdef";

std::string note_of(const std::vector<std::uint64_t>& lengths) {
  std::string head(kNoteMagic);
  MessagePack start(head);
  start.array(17);
  start.raw("\xA2id");
  start.raw("\xA3seg");
  start.raw("\xA4host");
  start.raw("\x91\xA4" "10.0");
  start.raw("\x91\x01");
  std::string note, fingerprint = "\xD9\x20";
  fingerprint += kFingerprint;
  fingerprint += '\xC0';  // no schema beside it
  encode_note(note, {head, 3, 4, ~0ull, 1 << 20, 0x80, 2, fingerprint, lengths, 1.5, std::nullopt, "\x80"});
  return note;
}

// A field of ragged rows of eight bytes, one of fixed size, one of ragged rows of three bytes.
BatchFields fields() { return BatchFields({{8, 100, true}, {4, 5, false}, {3, 4000, true}}); }
constexpr std::uint64_t kRow[] = {8, 4, 3};

std::uint64_t aligned(std::uint64_t at) { return (at + 63) / 64 * 64; }

struct Payload {
  std::vector<std::uint64_t> lengths;  // of the ragged ones
  std::vector<std::byte> bytes;
  std::string note;
  std::uint64_t rows(std::size_t field) const { return field == 1 ? 5 : lengths[field / 2]; }
};

Payload payload(std::mt19937_64& random, std::uint64_t most = 4000) {
  Payload made;
  made.lengths = {random() % 101, random() % (most + 1)};
  std::uint64_t end = 0;
  for (std::size_t f = 0; f < 3; ++f) end = aligned(end) + made.rows(f) * kRow[f];
  made.bytes.resize(end);
  for (std::byte& each : made.bytes) each = static_cast<std::byte>(random());
  made.note = note_of(made.lengths);
  return made;
}

// Payloads in pieces of memory of exactly their sizes, their notes in the first one.
struct Answer {
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<Received::Piece> pieces;
  std::vector<ReceivedPayload> rows;

  void piece(const std::vector<std::byte>& bytes) {
    memory.push_back(std::make_unique<std::byte[]>(bytes.size()));
    std::copy(bytes.begin(), bytes.end(), memory.back().get());
    pieces.push_back({memory.back().get(), bytes.size()});
  }
};

Answer answer(const std::vector<Payload>& payloads, std::mt19937_64& random) {
  Answer made;
  std::vector<std::byte> first;
  std::vector<const Payload*> apart;
  for (const Payload& each : payloads) {
    ReceivedPayload row{0, 0, each.bytes.size(), 0, first.size(), each.note.size(),
                        checksum(each.bytes.data(), each.bytes.size()), false};
    const auto* const text = reinterpret_cast<const std::byte*>(each.note.data());
    first.insert(first.end(), text, text + each.note.size());
    if (random() % 3 == 0) {
      apart.push_back(&each);
      row.piece = apart.size();
    } else {
      row.offset = first.size();
      first.insert(first.end(), each.bytes.begin(), each.bytes.end());
    }
    made.rows.push_back(row);
  }
  made.piece(first);
  for (const Payload* each : apart) made.piece(each->bytes);
  return made;
}

constexpr std::byte kFill{0xEE};

// The arrays of a batch: padded (rows of `most` entries), or packed.
struct Arrays {
  std::vector<std::vector<std::byte>> memory;
  std::vector<GatherTarget> targets;
  const std::vector<GatherTarget>& all() const { return targets; }

  Arrays(const std::vector<Payload>& payloads, bool packed) {
    for (std::size_t f = 0; f < 3; ++f) {
      std::uint64_t total = 0, most = 0;
      for (const Payload& each : payloads) {
        total += each.rows(f) * kRow[f];
        most = std::max(most, each.rows(f) * kRow[f]);
      }
      memory.emplace_back(packed ? total : most * payloads.size(), std::byte{0});
      targets.push_back({memory.back().data(), memory.back().size(), packed ? 0 : most, 0, packed,
                         std::string(1, static_cast<char>(kFill))});
    }
  }
};

void check_gathered(const std::vector<Payload>& payloads, const Arrays& arrays, bool packed) {
  for (std::size_t f = 0; f < 3; ++f) {
    std::uint64_t at = 0;
    for (const Payload& each : payloads) {
      std::uint64_t begin = 0;
      for (std::size_t before = 0; before < f; ++before) begin = aligned(begin) + each.rows(before) * kRow[before];
      const std::uint64_t bytes = each.rows(f) * kRow[f];
      CHECK(std::memcmp(arrays.memory[f].data() + at, each.bytes.data() + aligned(begin), bytes) == 0 || bytes == 0);
      for (std::uint64_t rest = bytes; !packed && rest < arrays.targets[f].stride; ++rest)
        CHECK(arrays.memory[f][at + rest] == kFill);
      at += packed ? bytes : arrays.targets[f].stride;
    }
  }
}

const auto at_once = [](const auto& work) { work(); };

template <typename Call>
bool refused(Call call) {
  try {
    call();
  } catch (const RingFault& fault) {
    return std::string(fault.what()).find("another thread is gathering") != std::string::npos;
  }
  return false;
}

}  // namespace

TEST(batches_are_gathered_as_a_plain_loop_would) {
  std::mt19937_64 random(1);
  const BatchFields schema = fields();
  for (int round = 0; round < 200; ++round) {
    std::vector<Payload> payloads(random() % 20);
    for (Payload& each : payloads) each = payload(random, round % 10 == 0 ? 4000 : 50);
    Answer made = answer(payloads, random);
    Received received(made.pieces, made.rows);
    CHECK(received.size() == payloads.size());
    CHECK(received.strange(kFingerprint).empty() && received.strange("").size() == payloads.size());
    CHECK(received.marked(kFingerprint).size() == payloads.size() && received.marked("no ticket's text").empty());
    std::vector<std::int64_t> lengths(2 * payloads.size());
    CHECK(received.measure(schema, lengths).empty());
    for (std::size_t i = 0; i < payloads.size(); ++i)
      for (std::size_t k = 0; k < 2; ++k)
        CHECK(static_cast<std::uint64_t>(lengths[k * payloads.size() + i]) == payloads[i].lengths[k]);
    const bool packed = round % 2 == 0;
    Arrays arrays(payloads, packed);
    CHECK(received.gather(schema, [&]() -> const Arrays& { return arrays; }, true, at_once).empty());
    check_gathered(payloads, arrays, packed);
    CHECK(received.verify(at_once).empty());
    if (!payloads.empty()) {  // and without one of them
      const std::size_t gone = random() % payloads.size();
      received.drop(gone);
      payloads.erase(payloads.begin() + static_cast<std::ptrdiff_t>(gone));
      Arrays fewer(payloads, packed);
      CHECK(received.gather(schema, [&]() -> const Arrays& { return fewer; }, true, at_once).empty());
      check_gathered(payloads, fewer, packed);
    }
  }
}

TEST(large_payloads_are_hashed_while_they_are_copied_and_wrong_bytes_are_found) {
  std::mt19937_64 random(2);
  const BatchFields schema({{1, 1 << 20, true}});
  std::vector<std::byte> bytes(700'001);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  const std::string note = note_of({bytes.size()});
  std::vector<std::byte> all(bytes);
  for (char each : note) all.push_back(static_cast<std::byte>(each));
  Answer made;
  made.piece(all);
  made.rows.push_back({0, 0, bytes.size(), 0, bytes.size(), note.size(), checksum(bytes.data(), bytes.size()), false});
  for (const bool wrong : {false, true}) {
    if (wrong) made.memory[0][random() % bytes.size()] ^= std::byte{1};
    Received received(made.pieces, made.rows);
    std::vector<std::int64_t> length(1);
    CHECK(received.measure(schema, length).empty());
    struct {
      std::vector<GatherTarget> targets;
      const std::vector<GatherTarget>& all() const { return targets; }
    } target;
    std::vector<std::byte> out(bytes.size());
    target.targets.push_back({out.data(), out.size(), 0, 0, true, std::string(1, '\0')});
    const auto found = received.gather(schema, [&] { return target; }, true, at_once);
    CHECK(found == (wrong ? std::vector<std::size_t>{0} : std::vector<std::size_t>{}));
    CHECK(received.verify(at_once) == found);
    if (!wrong) CHECK(out == bytes);
  }
}

TEST(rows_outside_the_memory_and_arrays_that_are_too_small_are_refused) {
  std::mt19937_64 random(3);
  const std::vector<Payload> payloads{payload(random, 10), payload(random, 10)};
  const Answer made = answer(payloads, random);
  const auto with = [&](auto change) {
    std::vector<ReceivedPayload> rows = made.rows;
    change(rows[1]);
    try {
      Received received(made.pieces, rows);
    } catch (const RingFault&) {
      return false;
    }
    return true;
  };
  CHECK(with([](ReceivedPayload&) {}));
  CHECK(!with([](ReceivedPayload& row) { row.piece = 7; }));
  CHECK(!with([](ReceivedPayload& row) { row.note_piece = ~0ull; }));
  CHECK(!with([](ReceivedPayload& row) { row.length = ~0ull; }));
  CHECK(!with([](ReceivedPayload& row) { row.offset = ~0ull - 3; }));
  CHECK(!with([](ReceivedPayload& row) { row.note_offset = 1ull << 40; }));
  const BatchFields schema = fields();
  Received received(made.pieces, made.rows);
  std::vector<std::int64_t> lengths(4);
  CHECK(received.measure(schema, lengths).empty());
  for (std::size_t f = 0; f < 3; ++f) {
    Arrays arrays(payloads, true);
    if (arrays.targets[f].size == 0) continue;
    --arrays.targets[f].size;
    bool failed = false;
    try {
      received.gather(schema, [&]() -> const Arrays& { return arrays; }, true, at_once);
    } catch (const RingFault&) {
      failed = true;
    }
    CHECK(failed);
    CHECK(received.verify(at_once).empty());  // not busy any more
  }
}

// One lock stands for the interpreter's: held by every call, except for what takes long.
TEST(while_a_batch_is_gathered_every_other_use_of_it_is_refused_and_other_batches_go_on) {
  std::mt19937_64 random(4);
  const BatchFields schema = fields();
  std::vector<Payload> payloads(24);
  for (Payload& each : payloads) each = payload(random, 1000);
  const Answer made = answer(payloads, random);
  std::mutex interpreter;
  const auto without = [&](const auto& work) {
    interpreter.unlock();
    work();
    interpreter.lock();
  };
  Received shared(made.pieces, made.rows);
  std::atomic<unsigned> gathered = 0, refusals = 0, done = 0;
  const auto one = [&](unsigned seed) {
    std::mt19937_64 own(seed);
    Received mine(made.pieces, made.rows);  // over memory that all of them read
    for (int round = 0; round < 60; ++round) {
      Arrays arrays(payloads, round % 2 == 0);
      const bool common = own() % 2 == 0;
      Received& batch = common ? shared : mine;
      std::vector<std::int64_t> lengths(2 * payloads.size());
      const auto call = [&](auto use) {
        const std::lock_guard hold(interpreter);
        if (refused(use)) {
          ++refusals;
          return false;
        }
        return true;
      };
      call([&] { CHECK(batch.measure(schema, lengths).empty()); });
      const bool ours = call([&] {
        const auto memory = [&]() -> const Arrays& { return arrays; };
        CHECK(batch.gather(schema, memory, true, without).empty());
      });
      CHECK(ours || common);
      if (ours) {
        check_gathered(payloads, arrays, round % 2 == 0);
        ++gathered;
      }
      call([&] { CHECK(batch.verify(without).empty()); });
      {
        const std::lock_guard hold(interpreter);
        CHECK(batch.size() == payloads.size());
        CHECK(batch.note(round % payloads.size()) == payloads[round % payloads.size()].note);
      }
    }
    ++done;
  };
  {
    const std::lock_guard hold(interpreter);
    std::vector<std::int64_t> lengths(2 * payloads.size());
    CHECK(shared.measure(schema, lengths).empty());
  }
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 6; ++number) threads.emplace_back(one, number);
  for (std::thread& thread : threads) thread.join();
  CHECK(done == 6 && gathered >= 6);

  const std::lock_guard hold(interpreter);
  bool looked = false;
  shared.verify([&](const auto& work) {
    CHECK(refused([&] { shared.drop(0); }));
    std::vector<std::int64_t> lengths(2 * payloads.size());
    CHECK(refused([&] { shared.measure(schema, lengths); }));
    CHECK(refused([&] { shared.verify(at_once); }));
    work();
    looked = true;
  });
  CHECK(looked);
  shared.drop(0);
  CHECK(shared.size() + 1 == payloads.size());
}

int main(int argc, char** argv) { return transport::test::run_all(argc, argv); }
