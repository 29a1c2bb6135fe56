// Payloads in this process's own memory, in few large pieces, such as the answer to a TAKE: for batches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batches.hpp"
#include "bindings/gathering.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

// The objects that have the memory, and what lies in it.
class ReceivedPayloads {
 public:
  // rows: a row of 64-bit numbers for each of kRows.
  ReceivedPayloads(const nb::list& memory, nb::handle rows) {
    std::vector<Received::Piece> pieces;
    for (nb::handle each : memory) {
      pieces_.push_back({nb::borrow(each), std::make_unique<BufferView>(each, false)});
      pieces.push_back({pieces_.back().view->data(), pieces_.back().view->size()});
    }
    const BufferView view(rows, false);
    const std::size_t n = view.size() / (kRows * sizeof(std::uint64_t));
    if (view.size() != n * kRows * sizeof(std::uint64_t)) fail(Fault::argument, "not a row of each kind");
    const auto* const all = reinterpret_cast<const std::uint64_t*>(view.data());
    const auto number = [&](std::size_t row, std::size_t i) { return all[row * n + i]; };
    std::vector<ReceivedPayload> payloads;
    payloads.reserve(n);
    for (std::size_t i = 0; i < n; ++i)
      payloads.push_back({number(0, i), number(1, i), number(2, i), number(3, i), number(4, i), number(5, i),
                          number(6, i), number(7, i) != 0});
    received_.emplace(std::move(pieces), std::move(payloads));
  }

  ReceivedPayloads(const ReceivedPayloads&) = delete;
  ReceivedPayloads& operator=(const ReceivedPayloads&) = delete;

  Received& payloads() { return *received_; }

  // The object that has the payload's bytes, and where they begin in it.
  nb::tuple place(std::size_t index) const {
    const ReceivedPayload& each = received_->at(index);
    return nb::make_tuple(pieces_[each.piece].object, each.offset);
  }

  static constexpr std::size_t kRows = 8;

 private:
  struct Piece {
    nb::object object;
    std::unique_ptr<BufferView> view;
  };

  std::vector<Piece> pieces_;
  std::optional<Received> received_;
};

}  // namespace

void bind_received(nb::module_& module) {
  nb::class_<BatchFields>(module, "BatchFields", nb::is_final(), "The tensors of a schema, for batches.")
      .def(
          "__init__", [](BatchFields* self, const nb::list& rows) { new (self) BatchFields(fields_of(rows)); }, "rows"_a);

  nb::class_<ReceivedPayloads> received(module, "ReceivedPayloads", nb::is_final(),
                                        "Payloads in this process's own memory, for batches.");
  received.def(nb::init<nb::list, nb::handle>(), "memory"_a, "rows"_a)
      .def("__len__", [](ReceivedPayloads& self) { return self.payloads().size(); })
      .def("drop", [](ReceivedPayloads& self, std::size_t index) { self.payloads().drop(index); }, "index"_a)
      .def("place", &ReceivedPayloads::place, "index"_a);
  bind_payloads(received);
  module.attr("RECEIVED_ROWS") = nb::make_tuple("piece", "offset", "length", "note_piece", "note_offset",
                                                "note_length", "checksum", "verified");
}

}  // namespace transport::python
