// Payloads in this process's own memory, in few large pieces, such as the answer to a TAKE: for batches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batches.hpp"
#include "bindings/gathering.hpp"
#include "ucp/taken_rows.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

// The objects that have the memory, what lies in it, and BATCH_COLUMNS of each payload.
class ReceivedPayloads {
 public:
  // rows: a row of 64-bit numbers for each of kRows; columns: a row of them for each of kColumns.
  ReceivedPayloads(const nb::list& memory, nb::handle rows, nb::handle columns) {
    for (nb::handle each : memory) add(each);
    const BufferView view(rows, false), numbers(columns, false);
    const std::size_t n = view.size() / (kRows * sizeof(std::uint64_t));
    if (view.size() != n * kRows * sizeof(std::uint64_t) || numbers.size() != n * sizeof(Columns))
      fail(Fault::argument, "not a row of each kind");
    const auto* const all = reinterpret_cast<const std::uint64_t*>(view.data());
    const auto number = [&](std::size_t row, std::size_t i) { return all[row * n + i]; };
    std::vector<ReceivedPayload> payloads;
    payloads.reserve(n);
    for (std::size_t i = 0; i < n; ++i)
      payloads.push_back({number(0, i), number(1, i), number(2, i), number(3, i), number(4, i), number(5, i),
                          number(6, i), number(7, i) != 0});
    columns_.resize(n);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < kColumns; ++k)
        columns_[i][k] = reinterpret_cast<const std::int64_t*>(numbers.data())[k * n + i];
    hold(std::move(payloads));
  }

  // Of an answer to a TAKE that was found to fit. `own`: by position, memory of payloads that did not come with the
  // answer; None: no bytes were asked for. All that came was verified on arrival.
  ReceivedPayloads(nb::handle answer, std::size_t count, nb::handle own) {
    add(answer);
    const BufferView& view = *(*pieces_)[0].view;
    const std::size_t head = sizeof(ucp::Header) + count * sizeof(ucp::Taken);
    if (count > ucp::kMostTaken || view.size() < head) fail(Fault::argument, "no answer has so many payloads");
    std::uint64_t bytes = head, notes = head;
    for (std::size_t i = 0; i < count; ++i) bytes += ucp::taken_at(view.data(), i).note_bytes;
    bytes = ucp::aligned_taken(bytes);
    std::vector<ReceivedPayload> payloads;
    payloads.reserve(count);
    columns_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const ucp::Taken one = ucp::taken_at(view.data(), i);
      ReceivedPayload payload{0, 0, 0, 0, notes, one.note_bytes, one.checksum, true};
      notes += one.note_bytes;
      if ((one.flags & ucp::kJoined) != 0) {
        payload.offset = bytes;
        bytes += ucp::aligned_taken(one.length);
      }
      if (!own.is_none()) {
        payload.length = one.length;
        if (const nb::object memory = nb::borrow(PyDict_GetItemWithError(own.ptr(), nb::int_(i).ptr()))) {
          payload.piece = pieces_->size();
          payload.offset = 0;
          add(memory);
          payload.length = std::min<std::uint64_t>(one.length, pieces_->back().view->size());
        }
      }
      payloads.push_back(payload);
      columns_.push_back({one.slot, one.generation, one.rank, one.attempts, static_cast<std::int64_t>(one.length),
                          one.policy_version, static_cast<std::int64_t>(payload.offset), one.in_vain});
    }
    hold(std::move(payloads));
  }

  // The first payloads of another one, which has the rest from here on.
  ReceivedPayloads(ReceivedPayloads& other, std::size_t count) : pieces_(other.pieces_) {
    hold(other.payloads().take(count));
    const auto end = other.columns_.begin() + static_cast<std::ptrdiff_t>(count);
    columns_.assign(other.columns_.begin(), end);
    other.columns_.erase(other.columns_.begin(), end);
  }

  ReceivedPayloads(const ReceivedPayloads&) = delete;
  ReceivedPayloads& operator=(const ReceivedPayloads&) = delete;

  Received& payloads() { return *received_; }

  void columns(nb::handle out) const {
    const BufferView view(out, true);
    const std::size_t n = columns_.size();
    if (view.size() != n * sizeof(Columns)) fail(Fault::argument, "not room for the columns");
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < kColumns; ++k)
        reinterpret_cast<std::int64_t*>(view.data())[k * n + i] = columns_[i][k];
  }

  // The object that has the payload's bytes, and where they begin in it.
  nb::tuple place(std::size_t index) const {
    const ReceivedPayload& each = received_->at(index);
    return nb::make_tuple((*pieces_)[each.piece].object, each.offset);
  }

  void drop(std::size_t index) {
    received_->drop(index);
    columns_.erase(columns_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  static constexpr std::size_t kRows = 8, kColumns = 8;

 private:
  using Columns = std::array<std::int64_t, kColumns>;
  struct Piece {
    nb::object object;
    std::unique_ptr<BufferView> view;
  };

  void add(nb::handle memory) {
    pieces_->push_back({nb::borrow(memory), std::make_unique<BufferView>(memory, false)});
  }
  void hold(std::vector<ReceivedPayload> payloads) {
    std::vector<Received::Piece> pieces;
    for (const Piece& each : *pieces_) pieces.push_back({each.view->data(), each.view->size()});
    received_.emplace(std::move(pieces), std::move(payloads));
  }

  std::shared_ptr<std::vector<Piece>> pieces_ = std::make_shared<std::vector<Piece>>();
  std::optional<Received> received_;
  std::vector<Columns> columns_;
};

}  // namespace

void bind_received(nb::module_& module) {
  nb::class_<BatchFields>(module, "BatchFields", nb::is_final(), "The tensors of a schema, for batches.")
      .def(
          "__init__", [](BatchFields* self, const nb::list& rows) { new (self) BatchFields(fields_of(rows)); }, "rows"_a);

  nb::class_<ReceivedPayloads> received(module, "ReceivedPayloads",
                                        "Payloads in this process's own memory, for batches.");
  received.def(nb::init<nb::list, nb::handle, nb::handle>(), "memory"_a, "rows"_a, "columns"_a)
      .def(nb::init<ReceivedPayloads&, std::size_t>(), "other"_a, "count"_a)
      .def(nb::init<nb::handle, std::size_t, nb::handle>(), "answer"_a, "count"_a, "own"_a.none())
      .def("__len__", [](ReceivedPayloads& self) { return self.payloads().size(); })
      .def("columns", &ReceivedPayloads::columns, "out"_a)
      .def("leave", &ReceivedPayloads::drop, "index"_a)
      .def("place", &ReceivedPayloads::place, "index"_a);
  bind_payloads(received);
  module.attr("RECEIVED_ROWS") = nb::make_tuple("piece", "offset", "length", "note_piece", "note_offset",
                                                "note_length", "checksum", "verified");
}

}  // namespace transport::python
