// Payloads of a mapped ring that were claimed together, for batches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batches.hpp"
#include "bindings/gathering.hpp"

namespace transport::python {

using namespace nb::literals;

// Payloads of one ring that were claimed together. What is neither consumed nor given back goes back with the object,
// and memory that was kept is let go; so whatever looks into the slots keeps the object.
class ClaimedBatch {
 public:
  ClaimedBatch(nb::handle_t<Ring> ring, std::vector<OwnedClaim> claims)
      : keep_(nb::borrow(ring)),
        ring_(nb::inst_ptr<Ring>(ring)),
        mapping_(ring_->mapping()),
        base_(ring_->payload(0)),
        claims_(std::move(claims)) {
    const Identity& sizes = ring_->identity();
    size_ = static_cast<std::uint64_t>(ring_->payload(sizes.slot_count - 1) - base_) + sizes.slot_capacity;
    std::vector<ReceivedPayload> payloads;
    payloads.reserve(claims_.size());
    for (OwnedClaim& each : claims_) {
      each.lend();
      const Claimed& c = each.claimed();
      const std::string note = ring_->note(c.id.slot, c.id.generation).value_or(std::string());
      const auto offset = static_cast<std::uint64_t>(ring_->payload(c.id.slot) - base_);
      payloads.push_back({0, offset, c.length, 1, notes_.size(), note.size(), c.checksum, false});
      notes_.insert(notes_.end(), note.begin(), note.end());
    }
    const std::vector<Received::Piece> pieces{{base_, size_}, std::as_bytes(std::span(notes_))};
    payloads_ = std::make_unique<Received>(pieces, std::move(payloads));
  }
  ClaimedBatch(ClaimedBatch&&) noexcept = default;

  std::size_t size() const { return claims_.size(); }
  const std::byte* data() const { return base_; }
  std::uint64_t data_size() const { return size_; }
  std::string ring() const {  // its id, as Python has it
    std::string digits;
    for (const std::uint8_t each : ring_->identity().ring_id) {
      digits += "0123456789abcdef"[each >> 4];
      digits += "0123456789abcdef"[each & 15];
    }
    return digits;
  }
  Received& payloads() { return *payloads_; }

  // A row for each of the claims' columns.
  void columns(nb::handle out) const {
    const BufferView view(out, true);
    const std::size_t n = claims_.size();
    if (view.size() != n * kColumns * sizeof(std::int64_t)) fail(Fault::argument, "not room for the claims' columns");
    auto* const rows = reinterpret_cast<std::int64_t*>(view.data());
    for (std::size_t i = 0; i < n; ++i) {
      const Claimed& c = claims_[i].claimed();
      const std::int64_t row[kColumns] = {c.id.slot, c.id.generation, c.id.rank, c.id.attempts,
                                          static_cast<std::int64_t>(c.length), c.policy_version,
                                          static_cast<std::int64_t>(payloads_->at(i).offset), c.in_vain};
      for (std::size_t k = 0; k < kColumns; ++k) rows[k * n + i] = row[k];
    }
  }
  static constexpr std::size_t kColumns = 8;

  // Asked again, it answers the same.
  nb::bytes finish(bool keep) {
    payloads_->require_idle();
    std::string accepted(claims_.size(), '\0');
    for (std::size_t i = 0; i < claims_.size(); ++i) {
      accepted[i] = static_cast<char>(claims_[i].finish(keep));
      if (!claims_[i].pinned()) payloads_->gone(i);
    }
    return nb::bytes(accepted.data(), accepted.size());
  }

  nb::bytes consumption() const {
    std::string consumed;
    for (const OwnedClaim& each : claims_) consumed += static_cast<char>(each.consumed());
    return nb::bytes(consumed.data(), consumed.size());
  }

  std::size_t renew() {
    ring_->heard();
    return static_cast<std::size_t>(
        std::count_if(claims_.begin(), claims_.end(), [](const OwnedClaim& each) { return each.held(); }));
  }

  // The payload leaves the batch, consumed. False: others have it.
  bool consume(std::size_t index) {
    require(index);
    const bool accepted = claims_[index].finish(false);
    leave(index);
    return accepted;
  }

  // The payload leaves the batch: it may be claimed again, or is dead for this reason.
  void drop(std::size_t index, const std::string& reason, bool dead, const std::string& consumer, double delay_s,
            bool in_vain) {
    require(index);
    if (dead)
      claims_[index].end(Ended::dead, reason, consumer);
    else
      claims_[index].give_back(delay_s, in_vain);
    leave(index);
  }

  // Each payload as a batch of its own; this one has none then.
  nb::list divide() {
    payloads_->require_idle();
    nb::list all;
    for (OwnedClaim& each : claims_) {
      std::vector<OwnedClaim> one;
      one.push_back(std::move(each));
      all.append(claimed_batch(nb::handle_t<Ring>(keep_), std::move(one)));
    }
    claims_.clear();
    payloads_ = std::make_unique<Received>(std::vector<Received::Piece>(), std::vector<ReceivedPayload>());
    return all;
  }

  // Gives back what was not consumed, after the delay, and lets kept memory go. Idempotent.
  void release(double delay_s, bool in_vain) {
    payloads_->require_idle();
    for (std::size_t i = 0; i < claims_.size(); ++i) {
      claims_[i].release(delay_s, in_vain);
      payloads_->gone(i);
    }
  }

 private:
  void require(std::size_t index) const {
    payloads_->require_idle();
    if (index >= claims_.size()) fail(Fault::argument, "no such payload in the batch");
  }
  void leave(std::size_t index) {
    payloads_->drop(index);
    claims_.erase(claims_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  nb::object keep_;  // the Ring
  Ring* ring_;
  std::shared_ptr<Mapping> mapping_;
  const std::byte* base_;
  std::uint64_t size_;
  std::vector<char> notes_;
  std::unique_ptr<Received> payloads_;  // while they are gathered, their slots are lent, so that close() leaves them
  std::vector<OwnedClaim> claims_;      // Invariant: in the order of the payloads
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
      .def_prop_ro("wire", [](const ClaimedBatch&) { return "mapped"; })
      .def("place",
           [](nb::handle_t<ClaimedBatch> self, std::size_t index) {
             return nb::make_tuple(self, nb::inst_ptr<ClaimedBatch>(self)->payloads().at(index).offset);
           },
           "index"_a)
      .def("columns", &ClaimedBatch::columns, "out"_a)
      .def("finish", &ClaimedBatch::finish, "keep"_a = false)
      .def_prop_ro("answered", [](const ClaimedBatch&) { return true; })
      .def("consumption", &ClaimedBatch::consumption)
      .def("in_question", [](const ClaimedBatch& self) {
        const std::string none(self.size(), '\0');
        return nb::bytes(none.data(), none.size());
      })
      .def("renew", &ClaimedBatch::renew)
      .def("consume", &ClaimedBatch::consume, "index"_a)
      .def("drop", &ClaimedBatch::drop, "index"_a, "reason"_a, "dead"_a, "consumer"_a = "", "delay_s"_a = 0.0,
           "in_vain"_a = true)
      .def("divide", &ClaimedBatch::divide)
      .def("release", &ClaimedBatch::release, "delay_s"_a = 0.0, "in_vain"_a = true);
  bind_payloads(batch);
  module.attr("BATCH_COLUMNS") = nb::make_tuple("slot", "generation", "rank", "attempts", "length", "policy_version",
                                                "offset", "in_vain");
}

}  // namespace transport::python
