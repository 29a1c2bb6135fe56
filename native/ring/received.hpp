// Payloads in few large pieces of memory, such as the slots of a mapped ring, or the answer to a TAKE: for batches.
//
// Says nothing about claims: the owner of the payloads ends them. While a batch is gathered or verified, which takes
// long and needs no lock of the caller's, every other use that changes it or depends on its order is refused.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/checksum.hpp"
#include "common/error.hpp"
#include "ring/gathering.hpp"
#include "ring/ticket_note.hpp"

namespace transport {

struct ReceivedPayload {
  std::uint64_t piece, offset, length, note_piece, note_offset, note_length, checksum;
  bool verified;      // its checksum need not be compared any more
  bool gone = false;  // its memory may be another's by now: it is as one with wrong bytes
};

class Received {
 public:
  using Piece = std::span<const std::byte>;

  Received(std::vector<Piece> pieces, std::vector<ReceivedPayload> payloads)
      : pieces_(std::move(pieces)), payloads_(std::move(payloads)) {
    for (const ReceivedPayload& each : payloads_)
      if (!within(each.piece, each.offset, each.length) || !within(each.note_piece, each.note_offset, each.note_length))
        fail(Fault::argument, "a payload or its ticket lies outside the memory");
  }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;

  std::size_t size() const { return payloads_.size(); }

  // Those whose tickets can be read, and name another schema.
  std::vector<std::size_t> strange(std::string_view fingerprint) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < payloads_.size(); ++i)
      if (const auto named = read_fingerprint(note_of(payloads_[i])); !named.empty() && named != fingerprint)
        found.push_back(i);
    return found;
  }

  // Those without bytes.
  std::vector<std::size_t> empty() const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < payloads_.size(); ++i)
      if (payloads_[i].length == 0) found.push_back(i);
    return found;
  }

  // Those whose tickets have this text somewhere.
  std::vector<std::size_t> marked(std::string_view text) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < payloads_.size(); ++i)
      if (note_of(payloads_[i]).find(text) != std::string_view::npos) found.push_back(i);
    return found;
  }

  // The numbers of the counted tensors, a row for each; the payloads whose ticket or size does not fit the fields.
  std::vector<std::size_t> measure(const BatchFields& fields, std::span<std::int64_t> rows) {
    const Busy busy(busy_);
    const std::size_t n = payloads_.size();
    if (rows.size() != n * fields.counted()) fail(Fault::argument, "not room for the lengths");
    counted_ = fields.counted();
    lengths_.assign(n * counted_, 0);
    std::vector<std::size_t> wrong;
    for (std::size_t i = 0; i < n; ++i)
      if (const std::string_view note = note_of(payloads_[i]);
          read_fingerprint(note).empty() || !fields.fit(note, payloads_[i].length, lengths_.data() + i * counted_))
        wrong.push_back(i);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < counted_; ++k) rows[k * n + i] = static_cast<std::int64_t>(lengths_[i * counted_ + k]);
    return wrong;
  }

  // `targets` gives the memory of the fields, `work` runs what needs no lock of the caller's. The payloads whose
  // checksum differs, and whose places are as they were or half written.
  template <typename Find, typename Work>
  std::vector<std::size_t> gather(const BatchFields& fields, Find targets, bool verify, Work work) {
    const Busy busy(busy_);  // from here on: finding the targets' memory may run other code
    if (counted_ != fields.counted()) fail(Fault::argument, "the payloads were not measured by these fields");
    std::vector<std::uint64_t> sizes;
    for (const ReceivedPayload& each : payloads_) sizes.push_back(each.length);
    const auto memory = targets();
    Gathering gathering(fields, memory.all(), lengths_, sizes);
    std::vector<std::size_t> wrong;
    work([&] {
      for (std::size_t i = 0; i < payloads_.size(); ++i) {
        const ReceivedPayload& each = payloads_[i];
        const auto expected = verify && !each.verified ? &each.checksum : nullptr;
        if (!gathering.next(data_of(each), each.length, expected)) wrong.push_back(i);
      }
    });
    return wrong;
  }

  // Only hashes them, for payloads that stay where they are.
  template <typename Work>
  std::vector<std::size_t> verify(Work work) {
    const Busy busy(busy_);
    std::vector<std::size_t> wrong;
    work([&] {
      for (std::size_t i = 0; i < payloads_.size(); ++i)
        if (const ReceivedPayload& each = payloads_[i];
            each.gone || (!each.verified && checksum(data_of(each), each.length) != each.checksum))
          wrong.push_back(i);
    });
    return wrong;
  }

  // The first payloads leave, to be had by another.
  std::vector<ReceivedPayload> take(std::size_t count) {
    const Busy busy(busy_);
    if (count > payloads_.size()) fail(Fault::argument, "no such payload in the batch");
    const auto end = payloads_.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<ReceivedPayload> taken(payloads_.begin(), end);
    payloads_.erase(payloads_.begin(), end);
    lengths_.clear();
    counted_ = 0;
    return taken;
  }

  void gone(std::size_t index) { payloads_[index].gone = true; }
  void require_idle() const {
    if (busy_) fail(Fault::argument, "another thread is gathering this batch");
  }
  void drop(std::size_t index) {
    const Busy busy(busy_);
    require(index);
    payloads_.erase(payloads_.begin() + static_cast<std::ptrdiff_t>(index));
    const auto first = static_cast<std::ptrdiff_t>(index * counted_);
    if (lengths_.size() == (payloads_.size() + 1) * counted_)
      lengths_.erase(lengths_.begin() + first, lengths_.begin() + first + static_cast<std::ptrdiff_t>(counted_));
  }

  const ReceivedPayload& at(std::size_t index) const {
    require(index);
    return payloads_[index];
  }
  std::string_view note(std::size_t index) const { return note_of(at(index)); }

 private:
  bool within(std::uint64_t piece, std::uint64_t offset, std::uint64_t length) const {
    if (piece >= pieces_.size()) return false;
    const std::uint64_t size = pieces_[piece].size();
    return offset <= size && length <= size - offset;
  }
  const std::byte* data_of(const ReceivedPayload& each) const {
    return each.gone ? nullptr : pieces_[each.piece].data() + each.offset;
  }
  std::string_view note_of(const ReceivedPayload& each) const {
    return {reinterpret_cast<const char*>(pieces_[each.note_piece].data() + each.note_offset), each.note_length};
  }
  void require(std::size_t index) const {
    if (index >= payloads_.size()) fail(Fault::argument, "no such payload in the batch");
  }

  class Busy {
   public:
    explicit Busy(std::atomic<bool>& busy) : busy_(busy) {
      if (busy_.exchange(true, std::memory_order_acquire)) fail(Fault::argument, "another thread is gathering this batch");
    }
    ~Busy() { busy_.store(false, std::memory_order_release); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    std::atomic<bool>& busy_;
  };

  std::vector<Piece> pieces_;
  std::vector<ReceivedPayload> payloads_;
  std::vector<std::uint64_t> lengths_;  // of payload after payload
  std::size_t counted_ = 0;
  std::atomic<bool> busy_ = false;
};

}  // namespace transport
