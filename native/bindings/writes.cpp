// Many payloads in one call: looked at first, all of them, and then copied, hashed and published without the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/ring_bindings.hpp"
#include "bindings/without_gil.hpp"
#include "common/copy.hpp"
#include "common/siphash.hpp"
#include "ring/gathering.hpp"
#include "ring/ring.hpp"
#include "ring/ticket_note.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

constexpr std::byte kNothing{};

// Contiguous memory that is held until the plan is gone.
class Source {
 public:
  Source(PyObject* object, int flags) : held_(PyObject_GetBuffer(object, &view_, flags) == 0) {}
  Source(Source&& other) noexcept : view_(other.view_), held_(std::exchange(other.held_, false)) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source() {
    if (held_) PyBuffer_Release(&view_);
  }
  bool held() const { return held_; }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_{};
  bool held_;
};

struct Field {
  nb::object name, dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t itemsize;
  bool ragged, optional;
};

struct Piece {
  std::uint64_t offset, bytes;
  const std::byte* data;
};

struct Planned {
  std::uint64_t total = 0;
  std::vector<std::uint64_t> lengths;
  std::size_t first_piece = 0, pieces = 0;
  std::string middle, metadata;  // empty: those of the plan
};

struct Terms {
  unsigned readers;
  double created;
  std::optional<double> deadline;
  std::int64_t policy_version;
};

class WritePlan {
 public:
  // fields: (name, dtype, shape, itemsize, ragged, optional) of each tensor, or none where payloads describe themselves.
  WritePlan(nb::list fields, nb::object array_type, const nb::bytes& head, const nb::bytes& middle,
            const nb::bytes& metadata)
      : array_type_(std::move(array_type)), head_(text(head)), middle_(text(middle)), metadata_(text(metadata)) {
    for (nb::handle each : fields) {
      const auto row = nb::cast<nb::tuple>(each);
      Field field{nb::borrow(row[0]), nb::borrow(row[1]),        {}, nb::cast<std::uint64_t>(row[3]),
                  nb::cast<bool>(row[4]), nb::cast<bool>(row[5])};
      for (nb::handle length : nb::cast<nb::tuple>(row[2])) field.shape.push_back(nb::cast<std::uint64_t>(length));
      fields_.push_back(std::move(field));
    }
  }

  WritePlan(const WritePlan&) = delete;
  WritePlan& operator=(const WritePlan&) = delete;

  // False, and nothing added: not a dict of plain contiguous arrays that are exactly what the schema says.
  bool add(nb::handle values, const nb::object& metadata) {
    if (!PyDict_CheckExact(values.ptr()) || PyDict_GET_SIZE(values.ptr()) != static_cast<Py_ssize_t>(fields_.size()))
      return false;
    const std::size_t sources = sources_.size(), pieces = pieces_.size();
    Planned planned;
    planned.first_piece = pieces;
    for (const Field& field : fields_)
      if (!add_tensor(field, values, planned)) {
        while (sources_.size() > sources) sources_.pop_back();
        pieces_.resize(pieces);
        return false;
      }
    planned.pieces = pieces_.size() - pieces;
    if (!metadata.is_none()) planned.metadata = text(nb::cast<nb::bytes>(metadata));
    planned_.push_back(std::move(planned));
    return true;
  }

  // What Python has looked at: (offset, contiguous memory) of each tensor, ascending.
  void add_placed(std::uint64_t total, const std::vector<std::uint64_t>& lengths, nb::list placed,
                  const nb::object& middle, const nb::object& metadata) {
    Planned planned;
    planned.total = total;
    planned.lengths = lengths;
    planned.first_piece = pieces_.size();
    planned.pieces = placed.size();
    std::uint64_t end = 0;
    for (nb::handle each : placed) {
      const auto row = nb::cast<nb::tuple>(each);
      const auto offset = nb::cast<std::uint64_t>(row[0]);
      Source source(nb::handle(row[1]).ptr(), PyBUF_SIMPLE);
      if (!source.held()) throw nb::python_error();
      const auto bytes = static_cast<std::uint64_t>(source.view().len);
      if (offset < end || offset > total || bytes > total - offset)
        fail(Fault::argument, "the tensors do not lie one behind the other");
      end = offset + bytes;
      pieces_.push_back({offset, bytes, static_cast<const std::byte*>(source.view().buf)});
      sources_.push_back(std::move(source));
    }
    if (!middle.is_none()) planned.middle = text(nb::cast<nb::bytes>(middle));
    if (!metadata.is_none()) planned.metadata = text(nb::cast<nb::bytes>(metadata));
    planned_.push_back(std::move(planned));
  }

  // The largest payload, and the longest note that any of them can get.
  std::pair<std::uint64_t, std::uint64_t> largest() const {
    std::uint64_t bytes = 0, note = 0;
    for (const Planned& p : planned_) {
      bytes = std::max(bytes, p.total);
      const std::size_t rest = (p.middle.empty() ? middle_ : p.middle).size() +
                               (p.metadata.empty() ? metadata_ : p.metadata).size() + p.lengths.size() * 9;
      note = std::max<std::uint64_t>(note, head_.size() + rest + 5 * 9 + 2 + 3 + 2 * 9);
    }
    return {bytes, note};
  }

  // Publishes what has not been published yet, into the given slot first, until no slot is free. What is left.
  std::size_t write(Ring& ring, const nb::object& lease, unsigned readers, double created,
                    std::optional<double> deadline, std::optional<std::int64_t> policy_version) {
    ring.require_open();
    if (largest().first > ring.identity().slot_capacity || largest().second > kNoteCapacity)
      fail(Fault::argument, "a payload or its ticket is too large for a slot");
    std::optional<Lease> slot;
    if (!lease.is_none()) {
      const auto pair = nb::cast<nb::tuple>(lease);
      slot = Lease{nb::cast<std::uint32_t>(pair[0]), nb::cast<std::uint32_t>(pair[1])};
    }
    const Terms terms{readers, created, deadline, policy_version.value_or(kNoVersion)};
    const WithoutGil without(ring);
    std::vector<Lease> prepared;  // at the end of written_
    const bool together = ring.synced();
    try {
      while (written_.size() < planned_.size()) {
        if (!slot) slot = ring.try_take();
        if (!slot) break;
        prepare_one(ring, *slot, terms);
        prepared.push_back(*slot);
        slot.reset();
        if (!together) commit(ring, prepared);
      }
      commit(ring, prepared);
    } catch (...) {  // the sync failed
      written_.resize(written_.size() - prepared.size());
      for (const Lease& each : prepared) ring.abort(each.slot, each.generation);
      throw;
    }
    return planned_.size() - written_.size();
  }

  nb::list notes(std::size_t first) const {
    nb::list all;
    for (std::size_t i = first; i < written_.size(); ++i) all.append(nb::bytes(written_[i].data(), written_[i].size()));
    return all;
  }
  std::size_t size() const { return planned_.size(); }

 private:
  static std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

  bool add_tensor(const Field& field, nb::handle values, Planned& planned) {
    PyObject* const value = PyDict_GetItemWithError(values.ptr(), field.name.ptr());
    if (value == Py_None && field.optional) {
      planned.lengths.push_back(0);
      planned.total = BatchFields::aligned(planned.total);
      pieces_.push_back({planned.total, 0, &kNothing});
      return true;
    }
    if (value == nullptr || Py_TYPE(value) != reinterpret_cast<PyTypeObject*>(array_type_.ptr())) {
      PyErr_Clear();
      return false;
    }
    static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
    const nb::object dtype = nb::steal(PyObject_GetAttr(value, dtype_name));
    if (!dtype.is(field.dtype)) {
      PyErr_Clear();
      return false;
    }
    Source source(value, PyBUF_ND);
    if (!source.held()) {
      PyErr_Clear();  // strided
      return false;
    }
    const Py_buffer& view = source.view();
    if (view.ndim != static_cast<int>(field.shape.size())) return false;
    for (std::size_t i = 0; i < field.shape.size(); ++i) {
      const auto length = static_cast<std::uint64_t>(view.shape[i]);
      if (i == 0 && field.ragged ? length > field.shape[0] : length != field.shape[i]) return false;
    }
    if (field.ragged || field.optional)
      planned.lengths.push_back((field.ragged ? static_cast<std::uint64_t>(view.shape[0]) : 0) + field.optional);
    const std::uint64_t offset = BatchFields::aligned(planned.total);
    const auto bytes = static_cast<std::uint64_t>(view.len);
    pieces_.push_back({offset, bytes, static_cast<const std::byte*>(view.buf)});
    planned.total = offset + bytes;
    sources_.push_back(std::move(source));
    return true;
  }

  static void commit(Ring& ring, std::vector<Lease>& prepared) {
    if (!prepared.empty() && ring.commit(prepared) != prepared.size())
      fail(Fault::argument, "a slot is not this writer's");
    prepared.clear();
  }

  void prepare_one(Ring& ring, const Lease& lease, const Terms& terms) {
    const Planned& p = planned_[written_.size()];
    std::byte* const memory = ring.payload(lease.slot);
    const bool fused = p.total >= kFusedBytes;
    std::optional<Checksum> hasher;
    if (fused) hasher.emplace();
    std::uint64_t end = 0;
    for (std::size_t i = p.first_piece; i < p.first_piece + p.pieces; ++i) {
      const Piece& piece = pieces_[i];
      std::memset(memory + end, 0, piece.offset - end);
      if (fused) {
        hasher->update(memory + end, piece.offset - end);
        copy_and_update(*hasher, memory + piece.offset, piece.data, piece.bytes);
      } else if (piece.bytes > 0) {
        std::memcpy(memory + piece.offset, piece.data, piece.bytes);
      }
      end = piece.offset + piece.bytes;
    }
    const std::uint64_t sum = fused ? hasher->digest() : checksum(memory, p.total);
    std::string note;
    encode_note(note, {head_, lease.slot, lease.generation,
                       slot_key(ring.identity().secret, lease.slot, lease.generation), p.total, sum, terms.readers,
                       p.middle.empty() ? middle_ : p.middle, p.lengths, terms.created, terms.deadline,
                       p.metadata.empty() ? metadata_ : p.metadata});
    const std::uint64_t deadline_ns = terms.deadline ? static_cast<std::uint64_t>(*terms.deadline * 1e9) : 0;
    if (!ring.prepare(lease.slot, lease.generation,
                      {p.total, sum, terms.readers, deadline_ns, note, terms.policy_version}))
      fail(Fault::argument, "slot " + std::to_string(lease.slot) + " is not this writer's");
    written_.push_back(std::move(note));
  }

  nb::object array_type_;
  std::string head_, middle_, metadata_;
  std::vector<Field> fields_;
  std::vector<Source> sources_;
  std::vector<Piece> pieces_;
  std::vector<Planned> planned_;
  std::vector<std::string> written_;
};

}  // namespace

void bind_writes(nb::module_& module) {
  nb::class_<WritePlan>(module, "WritePlan", nb::is_final(), "Payloads to be written in one call, looked at first.")
      .def(nb::init<nb::list, nb::object, nb::bytes, nb::bytes, nb::bytes>(), "fields"_a, "array_type"_a, "head"_a,
           "middle"_a, "metadata"_a)
      .def("add", &WritePlan::add, "values"_a, "metadata"_a.none())
      .def("add_placed", &WritePlan::add_placed, "total"_a, "lengths"_a, "placed"_a, "middle"_a.none(),
           "metadata"_a.none())
      .def("largest", [](const WritePlan& plan) { return nb::make_tuple(plan.largest().first, plan.largest().second); })
      .def("write", &WritePlan::write, "ring"_a, "lease"_a.none(), "readers"_a, "created"_a, "deadline"_a.none(),
           "policy_version"_a.none())
      .def("notes", &WritePlan::notes, "first"_a)
      .def("__len__", &WritePlan::size);
}

}  // namespace transport::python
