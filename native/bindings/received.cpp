// Payloads in this process's own memory, in few large pieces, such as the answer to a TAKE: for batches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batches.hpp"
#include "bindings/gathering.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

// Says nothing about claims: who received the payloads ends them.
class ReceivedPayloads {
 public:
  // rows: a row of 64-bit numbers for each of kRows.
  ReceivedPayloads(const nb::list& memory, nb::handle rows) {
    for (nb::handle each : memory) pieces_.push_back({nb::borrow(each), std::make_unique<BufferView>(each, false)});
    const BufferView view(rows, false);
    const std::size_t n = view.size() / (kRows * sizeof(std::uint64_t));
    if (view.size() != n * kRows * sizeof(std::uint64_t)) fail(Fault::argument, "not a row of each kind");
    const auto* const all = reinterpret_cast<const std::uint64_t*>(view.data());
    const auto number = [&](std::size_t row, std::size_t i) { return all[row * n + i]; };
    payloads_.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
      payloads_.push_back({number(0, i), number(1, i), number(2, i), number(3, i), number(4, i), number(5, i),
                           number(6, i), number(7, i) != 0});
      const Payload& made = payloads_.back();
      if (!within(made.piece, made.offset, made.length) || !within(made.note_piece, made.note_offset, made.note_length))
        fail(Fault::argument, "a payload or its ticket lies outside the memory");
    }
  }

  ReceivedPayloads(const ReceivedPayloads&) = delete;
  ReceivedPayloads& operator=(const ReceivedPayloads&) = delete;

  std::size_t size() const { return payloads_.size(); }

  // The fingerprints of the schemas that the tickets name, each once, as the first of them comes; "" for one that
  // cannot be read.
  std::vector<std::string> schemas() const {
    std::vector<std::string> found;
    for (const Payload& payload : payloads_) {
      const std::string_view fingerprint = read_fingerprint(note_of(payload));
      if (std::find(found.begin(), found.end(), fingerprint) == found.end()) found.emplace_back(fingerprint);
    }
    return found;
  }

  // The lengths of the ragged tensors, a row for each; the payloads whose ticket or size does not fit the fields.
  std::vector<std::size_t> measure(const BatchFields& fields, nb::handle out) {
    require_idle();
    const BufferView view(out, true);
    const std::size_t n = payloads_.size();
    ragged_ = fields.ragged();
    if (view.size() != n * ragged_ * sizeof(std::int64_t)) fail(Fault::argument, "not room for the lengths");
    lengths_.assign(n * ragged_, 0);
    std::vector<std::size_t> wrong;
    for (std::size_t i = 0; i < n; ++i)
      if (const std::string_view note = note_of(payloads_[i]);
          read_fingerprint(note).empty() || !fields.fit(note, payloads_[i].length, lengths_.data() + i * ragged_))
        wrong.push_back(i);
    auto* const rows = reinterpret_cast<std::int64_t*>(view.data());
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < ragged_; ++k) rows[k * n + i] = static_cast<std::int64_t>(lengths_[i * ragged_ + k]);
    return wrong;
  }

  // The payloads whose checksum differs, and whose places are as they were or half written.
  std::vector<std::size_t> gather(const BatchFields& fields, const nb::list& targets, bool verify) {
    require_idle();
    const Busy busy(busy_);  // from here on: finding the targets' memory may run other code
    if (ragged_ != fields.ragged()) fail(Fault::argument, "the payloads were not measured by these fields");
    std::vector<std::uint64_t> sizes;
    for (const Payload& each : payloads_) sizes.push_back(each.length);
    Gathering gathering(fields, targets, lengths_, sizes);
    std::vector<std::size_t> wrong;
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < payloads_.size(); ++i) {
      const Payload& each = payloads_[i];
      const auto expected = verify && !each.verified ? std::optional(each.checksum) : std::nullopt;
      if (!gathering.next(data_of(each), each.length, expected)) wrong.push_back(i);
    }
    return wrong;
  }

  // Only hashes them, for payloads that stay where they are.
  std::vector<std::size_t> verify() {
    require_idle();
    std::vector<std::size_t> wrong;
    const Busy busy(busy_);
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < payloads_.size(); ++i)
      if (const Payload& each = payloads_[i]; !each.verified && checksum(data_of(each), each.length) != each.checksum)
        wrong.push_back(i);
    return wrong;
  }

  void drop(std::size_t index) {
    require_idle();
    require(index);
    payloads_.erase(payloads_.begin() + static_cast<std::ptrdiff_t>(index));
    const auto first = static_cast<std::ptrdiff_t>(index * ragged_);
    if (lengths_.size() == (payloads_.size() + 1) * ragged_)
      lengths_.erase(lengths_.begin() + first, lengths_.begin() + first + static_cast<std::ptrdiff_t>(ragged_));
  }

  // The object that has the payload's bytes, and where they begin in it.
  nb::tuple place(std::size_t index) const {
    require(index);
    return nb::make_tuple(pieces_[payloads_[index].piece].object, payloads_[index].offset);
  }

  nb::bytes note(std::size_t index) const {
    require(index);
    const std::string_view found = note_of(payloads_[index]);
    return nb::bytes(found.data(), found.size());
  }

  static constexpr std::size_t kRows = 8;

 private:
  struct Piece {
    nb::object object;
    std::unique_ptr<BufferView> view;
  };
  struct Payload {
    std::uint64_t piece, offset, length, note_piece, note_offset, note_length, checksum;
    bool verified;
  };

  bool within(std::uint64_t piece, std::uint64_t offset, std::uint64_t length) const {
    if (piece >= pieces_.size()) return false;
    const std::uint64_t size = pieces_[piece].view->size();
    return offset <= size && length <= size - offset;
  }
  const std::byte* data_of(const Payload& each) const { return pieces_[each.piece].view->data() + each.offset; }
  std::string_view note_of(const Payload& each) const {
    return {reinterpret_cast<const char*>(pieces_[each.note_piece].view->data() + each.note_offset), each.note_length};
  }
  void require(std::size_t index) const {
    if (index >= payloads_.size()) fail(Fault::argument, "no such payload in the batch");
  }
  // While the GIL is released, other threads may not change the list of payloads.
  class Busy {
   public:
    explicit Busy(bool& busy) : busy_(busy) { busy_ = true; }
    ~Busy() { busy_ = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    bool& busy_;
  };
  void require_idle() const {
    if (busy_) fail(Fault::argument, "another thread is gathering this batch");
  }

  std::vector<Piece> pieces_;
  std::vector<Payload> payloads_;
  std::vector<std::uint64_t> lengths_;  // of payload after payload
  std::size_t ragged_ = 0;
  bool busy_ = false;
};

}  // namespace

void bind_received(nb::module_& module) {
  nb::class_<BatchFields>(module, "BatchFields", nb::is_final(), "The tensors of a schema, for batches.")
      .def(nb::init<nb::list>(), "rows"_a);

  nb::class_<ReceivedPayloads>(module, "ReceivedPayloads", nb::is_final(),
                               "Payloads in this process's own memory, for batches.")
      .def(nb::init<nb::list, nb::handle>(), "memory"_a, "rows"_a)
      .def("__len__", &ReceivedPayloads::size)
      .def("schemas", &ReceivedPayloads::schemas)
      .def("measure", &ReceivedPayloads::measure, "fields"_a, "out"_a)
      .def("gather", &ReceivedPayloads::gather, "fields"_a, "targets"_a, "verify"_a)
      .def("verify", &ReceivedPayloads::verify)
      .def("drop", &ReceivedPayloads::drop, "index"_a)
      .def("place", &ReceivedPayloads::place, "index"_a)
      .def("note", &ReceivedPayloads::note, "index"_a);
  module.attr("RECEIVED_ROWS") = nb::make_tuple("piece", "offset", "length", "note_piece", "note_offset",
                                                "note_length", "checksum", "verified");
}

}  // namespace transport::python
