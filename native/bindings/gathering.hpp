// The fields and the memory of a batch, as Python gives them.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "bindings/ring_bindings.hpp"
#include "ring/received.hpp"

namespace transport::python {

// (bytes of a row, entries at most, ragged, optional) of each tensor, in the schema's order.
inline BatchFields fields_of(const nb::list& rows) {
  std::vector<BatchFields::Field> all;
  for (nb::handle each : rows) {
    const auto row = nb::cast<nb::tuple>(each);
    all.push_back({nb::cast<std::uint64_t>(row[0]), nb::cast<std::uint64_t>(row[1]), nb::cast<bool>(row[2]),
                   nb::cast<bool>(row[3])});
  }
  return BatchFields(std::move(all));
}

// Made and destroyed with the GIL; the memory stays until then.
class Targets {
 public:
  // (memory, stride, start, packed, fill) of each field; None: it is skipped.
  explicit Targets(const nb::list& targets) {
    for (nb::handle each : targets) {
      if (each.is_none()) {
        all_.push_back({nullptr, 0, 0, 0, false, {}, true});
        continue;
      }
      const auto row = nb::cast<nb::tuple>(each);
      views_.push_back(std::make_unique<BufferView>(nb::handle(row[0]), true));
      const auto fill = nb::cast<nb::bytes>(row[4]);
      all_.push_back({views_.back()->data(), views_.back()->size(), nb::cast<std::uint64_t>(row[1]),
                      nb::cast<std::uint64_t>(row[2]), nb::cast<bool>(row[3]), {fill.c_str(), fill.size()}});
    }
  }
  const std::vector<GatherTarget>& all() const { return all_; }

 private:
  std::vector<std::unique_ptr<BufferView>> views_;
  std::vector<GatherTarget> all_;
};

inline constexpr auto without_gil_run = [](const auto& work) {
  const GilReleased release;
  work();
};

// What the batches of both kinds do with their payloads.
template <typename Batch>
void bind_payloads(nb::class_<Batch>& batch) {
  using namespace nb::literals;
  batch.def("empty", [](Batch& self) { return self.payloads().empty(); })
      .def(
          "strange",
          [](Batch& self, const std::string& fingerprint) { return self.payloads().strange(fingerprint); },
          "fingerprint"_a)
      .def(
          "marked",
          [](Batch& self, const nb::bytes& text) { return self.payloads().marked({text.c_str(), text.size()}); },
          "text"_a)
      .def(
          "measure",
          [](Batch& self, const BatchFields& fields, nb::handle out) {
            const BufferView view(out, true);
            if (view.size() % sizeof(std::int64_t) != 0) fail(Fault::argument, "not room for the lengths");
            auto* const rows = reinterpret_cast<std::int64_t*>(view.data());
            return self.payloads().measure(fields, {rows, view.size() / sizeof(std::int64_t)});
          },
          "fields"_a, "out"_a)
      .def(
          "gather",
          [](Batch& self, const BatchFields& fields, const nb::list& targets, bool verify) {
            return self.payloads().gather(fields, [&] { return Targets(targets); }, verify, without_gil_run);
          },
          "fields"_a, "targets"_a, "verify"_a)
      .def("verify", [](Batch& self) { return self.payloads().verify(without_gil_run); })
      .def(
          "note",
          [](Batch& self, std::size_t index) {
            const std::string_view found = self.payloads().note(index);
            return nb::bytes(found.data(), found.size());
          },
          "index"_a);
}

}  // namespace transport::python
