// Payloads of a mapped ring that were claimed together, for batches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batches.hpp"
#include "bindings/gathering.hpp"
#include "common/checksum.hpp"

namespace transport::python {

using namespace nb::literals;

// Payloads of one ring that were claimed together. What is neither consumed nor given back goes back with the object,
// and memory that was kept is let go; so whatever looks into the slots keeps the object.
class ClaimedBatch {
 public:
  ClaimedBatch(nb::handle_t<Ring> ring, std::vector<OwnedClaim> claims)
      : keep_(nb::borrow(ring)), ring_(nb::inst_ptr<Ring>(ring)), mapping_(ring_->mapping()) {
    base_ = ring_->payload(0);
    const std::uint64_t last = ring_->identity().slot_count - 1;
    const auto distance = static_cast<std::uint64_t>(ring_->payload(last) - base_);
    stride_ = last == 0 ? 0 : distance / last;
    size_ = distance + ring_->identity().slot_capacity;
    held_.reserve(claims.size());
    for (OwnedClaim& claim : claims) {
      claim.lend();
      held_.push_back({std::move(claim), {}});
    }
  }
  ClaimedBatch(ClaimedBatch&&) noexcept = default;

  std::size_t size() const { return held_.size(); }
  const std::byte* data() const { return base_; }
  std::uint64_t data_size() const { return size_; }
  nb::object ring() const { return keep_; }

  // A row for each of the claims' columns.
  void columns(nb::handle out) const {
    const BufferView view(out, true);
    const std::size_t n = held_.size();
    if (view.size() != n * kColumns * sizeof(std::int64_t)) fail(Fault::argument, "not room for the claims' columns");
    auto* const rows = reinterpret_cast<std::int64_t*>(view.data());
    for (std::size_t i = 0; i < n; ++i) {
      const Claimed& c = held_[i].claim.claimed();
      const std::int64_t row[kColumns] = {c.id.slot, c.id.generation, c.id.rank, c.id.attempts,
                                          static_cast<std::int64_t>(c.length), c.policy_version,
                                          static_cast<std::int64_t>(c.id.slot * stride_), c.in_vain};
      for (std::size_t k = 0; k < kColumns; ++k) rows[k * n + i] = row[k];
    }
  }
  static constexpr std::size_t kColumns = 8;

  // Reads the lengths of the ragged tensors, a row of 64-bit numbers for each; the payloads whose note or size does not
  // fit the fields.
  std::vector<std::size_t> measure(const BatchFields& fields, nb::handle out) {
    require_idle();
    const BufferView view(out, true);
    const std::size_t n = held_.size();
    ragged_ = fields.ragged();
    if (view.size() != n * ragged_ * sizeof(std::int64_t)) fail(Fault::argument, "not room for the lengths");
    lengths_.assign(n * ragged_, 0);
    std::vector<std::size_t> wrong;
    for (std::size_t i = 0; i < n; ++i) {
      const ClaimId& id = held_[i].claim.id();
      std::optional<std::string> note = ring_->note(id.slot, id.generation);
      held_[i].note = note ? std::move(*note) : std::string();
      const std::uint64_t length = held_[i].claim.claimed().length;
      if (length > ring_->identity().slot_capacity ||
          !fields.fit(held_[i].note, length, lengths_.data() + i * ragged_))
        wrong.push_back(i);
    }
    auto* const rows = reinterpret_cast<std::int64_t*>(view.data());
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < ragged_; ++k) rows[k * n + i] = static_cast<std::int64_t>(lengths_[i * ragged_ + k]);
    return wrong;
  }

  // The payloads whose checksum differs, and whose places are as they were or half written.
  std::vector<std::size_t> gather(const BatchFields& fields, const nb::list& targets, bool verify) {
    const Busy busy(*this);  // from here on: finding the targets' memory may run other code
    if (lengths_.size() != held_.size() * fields.ragged() || ragged_ != fields.ragged())
      fail(Fault::argument, "the payloads were not measured by these fields");
    std::vector<std::uint64_t> sizes;
    for (const Held& each : held_) sizes.push_back(each.claim.claimed().length);
    const Targets memory(targets);
    Gathering gathering(fields, memory.all(), lengths_, sizes);
    std::vector<std::size_t> wrong;
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < held_.size(); ++i) {
      const Claimed& c = held_[i].claim.claimed();
      const std::byte* const source = held_[i].claim.pinned() ? at(c) : nullptr;  // it may be another's by now
      if (!gathering.next(source, c.length, verify ? &c.checksum : nullptr)) wrong.push_back(i);
    }
    return wrong;
  }

  // Only hashes them, for payloads that stay where they are.
  std::vector<std::size_t> verify() {
    std::vector<std::size_t> wrong;
    const Busy busy(*this);
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (const Claimed& c = held_[i].claim.claimed();
          !held_[i].claim.pinned() || checksum(at(c), c.length) != c.checksum)  // its slot may be another's by now
        wrong.push_back(i);
    return wrong;
  }

  // Asked again, it answers the same.
  nb::bytes finish(bool keep) {
    require_idle();
    std::string accepted(held_.size(), '\0');
    for (std::size_t i = 0; i < held_.size(); ++i) accepted[i] = static_cast<char>(held_[i].claim.finish(keep));
    return nb::bytes(accepted.data(), accepted.size());
  }

  std::size_t renew() {
    ring_->heard();
    return static_cast<std::size_t>(
        std::count_if(held_.begin(), held_.end(), [](const Held& each) { return each.claim.held(); }));
  }

  // The payload leaves the batch: it may be claimed again, or is dead for this reason.
  void drop(std::size_t index, const std::string& reason, bool dead, const std::string& consumer, double delay_s) {
    require_idle();
    if (index >= held_.size()) fail(Fault::argument, "no such payload in the batch");
    if (dead)
      held_[index].claim.end(Ended::dead, reason, consumer);
    else
      held_[index].claim.give_back(delay_s, true);
    const auto first = lengths_.begin() + static_cast<std::ptrdiff_t>(index * ragged_);
    if (lengths_.size() == held_.size() * ragged_) lengths_.erase(first, first + static_cast<std::ptrdiff_t>(ragged_));
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  // Gives back what was not consumed, after the delay, and lets kept memory go. Idempotent.
  void release(double delay_s, bool in_vain) {
    require_idle();
    for (Held& each : held_) each.claim.release(delay_s, in_vain);
  }

  nb::bytes note(std::size_t index) const {
    if (index >= held_.size()) fail(Fault::argument, "no such payload in the batch");
    return nb::bytes(held_[index].note.data(), held_[index].note.size());
  }

 private:
  struct Held {
    OwnedClaim claim;
    std::string note;
  };

  // While the GIL is released, other threads may not change the list of payloads. Their slots are lent, so that close()
  // leaves them as they are.
  class Busy {
   public:
    explicit Busy(ClaimedBatch& batch) : batch_(batch) {
      batch.require_idle();
      batch.busy_ = true;
    }
    ~Busy() { batch_.busy_ = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    ClaimedBatch& batch_;
  };
  void require_idle() const {
    if (busy_) fail(Fault::argument, "another thread is gathering this batch");
  }

  const std::byte* at(const Claimed& claim) const { return base_ + claim.id.slot * stride_; }

  nb::object keep_;  // the Ring
  Ring* ring_;
  std::shared_ptr<Mapping> mapping_;
  const std::byte* base_;
  std::uint64_t stride_, size_;
  std::size_t ragged_ = 0;
  bool busy_ = false;
  std::vector<Held> held_;
  std::vector<std::uint64_t> lengths_;  // of payload after payload
};

namespace {

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  const auto* batch = nb::inst_ptr<ClaimedBatch>(self);
  return PyBuffer_FillInfo(buffer, self, const_cast<std::byte*>(batch->data()),
                           static_cast<Py_ssize_t>(batch->data_size()), 1, flags);
}
PyType_Slot batch_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

nb::object claimed_batch(nb::handle_t<Ring> ring, std::vector<OwnedClaim> claims) {
  return nb::cast(ClaimedBatch(ring, std::move(claims)));
}

void bind_batches(nb::module_& module) {
  bind_received(module);
  nb::class_<ClaimedBatch> batch(module, "ClaimedBatch", nb::is_final(), nb::type_slots(batch_slots),
                                 "Payloads of one ring that were claimed together.");
  batch.def("__len__", &ClaimedBatch::size)
      .def("__bool__", [](const ClaimedBatch& self) { return self.size() > 0; })
      .def_prop_ro("ring", &ClaimedBatch::ring)
      .def("columns", &ClaimedBatch::columns, "out"_a)
      .def("measure", &ClaimedBatch::measure, "fields"_a, "out"_a)
      .def("gather", &ClaimedBatch::gather, "fields"_a, "targets"_a, "verify"_a)
      .def("verify", &ClaimedBatch::verify)
      .def("finish", &ClaimedBatch::finish, "keep"_a = false)
      .def("renew", &ClaimedBatch::renew)
      .def("drop", &ClaimedBatch::drop, "index"_a, "reason"_a, "dead"_a, "consumer"_a = "", "delay_s"_a = 0.0)
      .def("release", &ClaimedBatch::release, "delay_s"_a = 0.0, "in_vain"_a = true)
      .def("note", &ClaimedBatch::note, "index"_a);
  module.attr("BATCH_COLUMNS") = nb::make_tuple("slot", "generation", "rank", "attempts", "length", "policy_version",
                                                "offset", "in_vain");
}

}  // namespace transport::python
