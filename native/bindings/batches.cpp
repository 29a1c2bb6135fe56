// Payloads claimed together, and gathered into a batch's arrays: copied, hashed and filled up without the GIL.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/batches.hpp"
#include "common/checksum.hpp"
#include "common/copy.hpp"
#include "ring/ticket_note.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;  // of all tensors: so that no sum of theirs wraps
// From here on hashing while copying saves a second pass over memory; below it both are in the caches.
constexpr std::uint64_t kFusedBytes = 256 * 1024;

// The tensors of a schema, as they stand one behind the other in a payload.
struct BatchField {
  std::uint64_t row_bytes;  // of one entry of the leading dimension, or of the whole tensor where it is not ragged
  std::uint64_t most;       // entries
  bool ragged;
};

struct Target {
  std::byte* data;
  std::uint64_t size, stride, start;
  bool packed;
  std::string fill;
};

// Repeats the pattern over the memory, whose size is a multiple of its own.
void fill_with(std::byte* memory, std::uint64_t size, const std::string& pattern) {
  if (size == 0) return;
  if (std::all_of(pattern.begin(), pattern.end(), [&](char c) { return c == pattern[0]; })) {
    std::memset(memory, static_cast<unsigned char>(pattern[0]), size);
    return;
  }
  std::uint64_t done = std::min<std::uint64_t>(size, pattern.size());
  std::memcpy(memory, pattern.data(), done);
  while (done < size) {
    const std::uint64_t piece = std::min(done, size - done);
    std::memcpy(memory + done, memory, piece);
    done += piece;
  }
}

}  // namespace

class BatchFields {
 public:
  // (bytes of a row, entries at most, ragged) of each tensor, in the schema's order.
  explicit BatchFields(const nb::list& rows) {
    for (nb::handle each : rows) {
      const auto row = nb::cast<nb::tuple>(each);
      all_.push_back({nb::cast<std::uint64_t>(row[0]), nb::cast<std::uint64_t>(row[1]), nb::cast<bool>(row[2])});
      const BatchField& field = all_.back();
      std::uint64_t bytes = 0;
      if (field.most > kMostBytes || __builtin_mul_overflow(field.row_bytes, field.most, &bytes) ||
          (most_ += std::min(bytes, kMostBytes) + kAlignment) > kMostBytes)
        fail(Fault::argument, "tensors larger than any memory");
      ragged_ += field.ragged;
    }
  }
  const std::vector<BatchField>& all() const { return all_; }
  std::size_t ragged() const { return ragged_; }

 private:
  std::vector<BatchField> all_;
  std::size_t ragged_ = 0;
  std::uint64_t most_ = 0;
};

// Payloads of one ring that were claimed together. What is neither consumed nor given back goes back with the object,
// and memory that was kept is let go; so whatever looks into the slots keeps the object.
class ClaimedBatch {
 public:
  ClaimedBatch(nb::handle_t<Ring> ring, std::vector<Claimed> claims)
      : keep_(nb::borrow(ring)), ring_(nb::inst_ptr<Ring>(ring)), mapping_(ring_->mapping()) {
    base_ = ring_->payload(0);
    const std::uint64_t last = ring_->identity().slot_count - 1;
    const auto distance = static_cast<std::uint64_t>(ring_->payload(last) - base_);
    stride_ = last == 0 ? 0 : distance / last;
    size_ = distance + ring_->identity().slot_capacity;
    held_.reserve(claims.size());
    for (const Claimed& claim : claims) {
      ring_->lend(claim.id.slot);
      held_.push_back({claim, Hold::claimed, {}});
    }
  }
  ClaimedBatch(ClaimedBatch&& other) noexcept
      : keep_(std::move(other.keep_)), ring_(std::exchange(other.ring_, nullptr)), mapping_(std::move(other.mapping_)),
        base_(other.base_), stride_(other.stride_), size_(other.size_), ragged_(other.ragged_), held_(std::move(other.held_)),
        lengths_(std::move(other.lengths_)) {}
  ~ClaimedBatch() {
    if (ring_ != nullptr) release();
  }

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
      const Claimed& c = held_[i].claim;
      const std::int64_t row[kColumns] = {c.id.slot, c.id.generation, c.id.rank, c.id.attempts,
                                          static_cast<std::int64_t>(c.length), c.policy_version,
                                          static_cast<std::int64_t>(c.id.slot * stride_)};
      for (std::size_t k = 0; k < kColumns; ++k) rows[k * n + i] = row[k];
    }
  }
  static constexpr std::size_t kColumns = 7;

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
      const ClaimId& id = held_[i].claim.id;
      std::optional<std::string> note = ring_->note(id.slot, id.generation);
      held_[i].note = note ? std::move(*note) : std::string();
      if (!fits(fields, i)) wrong.push_back(i);
    }
    auto* const rows = reinterpret_cast<std::int64_t*>(view.data());
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < ragged_; ++k) rows[k * n + i] = static_cast<std::int64_t>(lengths_[i * ragged_ + k]);
    return wrong;
  }

  // Copies every tensor to its place: (memory, stride, start, packed, fill) of each field; what a row has beyond its
  // payload is filled. The payloads whose checksum differs, and whose places are as they were or half written.
  std::vector<std::size_t> gather(const BatchFields& fields, const nb::list& targets, bool verify) {
    const Busy busy(*this);  // from here on: finding the targets' memory may run other code
    if (targets.size() != fields.all().size() || lengths_.size() != held_.size() * fields.ragged() ||
        ragged_ != fields.ragged())
      fail(Fault::argument, "the payloads were not measured by these fields");
    std::vector<std::unique_ptr<BufferView>> views;
    std::vector<Target> all;
    for (nb::handle each : targets) {
      const auto row = nb::cast<nb::tuple>(each);
      views.push_back(std::make_unique<BufferView>(nb::handle(row[0]), true));
      const auto fill = nb::cast<nb::bytes>(row[4]);
      all.push_back({views.back()->data(), views.back()->size(), nb::cast<std::uint64_t>(row[1]),
                     nb::cast<std::uint64_t>(row[2]), nb::cast<bool>(row[3]), {fill.c_str(), fill.size()}});
    }
    check_room(fields, all);
    std::vector<std::size_t> wrong;
    const nb::gil_scoped_release release;
    std::vector<std::uint64_t> packed_at;
    for (const Target& target : all) packed_at.push_back(target.start);
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (held_[i].hold == Hold::none || !gather_one(fields, all, packed_at, i, verify)) wrong.push_back(i);
    return wrong;
  }

  // Only hashes them, for payloads that stay where they are.
  std::vector<std::size_t> verify() {
    std::vector<std::size_t> wrong;
    const Busy busy(*this);
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (const Claimed& c = held_[i].claim;
          held_[i].hold == Hold::none || checksum(at(c), c.length) != c.checksum)  // its slot may be another's by now
        wrong.push_back(i);
    return wrong;
  }

  nb::bytes finish(bool keep, bool arrived) {
    require_idle();
    std::string accepted(held_.size(), '\0');
    for (std::size_t i = 0; i < held_.size(); ++i) {
      Held& each = held_[i];
      if (each.hold != Hold::claimed) continue;
      accepted[i] = static_cast<char>(ring_->finish(each.claim.id, keep, arrived));
      each.hold = keep && accepted[i] ? Hold::kept : Hold::none;
      if (each.hold == Hold::none) ring_->loan_ended(each.claim.id.slot);
    }
    return nb::bytes(accepted.data(), accepted.size());
  }

  std::size_t renew() {
    std::size_t held = 0;
    for (const Held& each : held_) held += each.hold == Hold::claimed && ring_->renew(each.claim.id);
    return held;
  }

  // The payload leaves the batch: it may be claimed again, or is dead for this reason.
  void drop(std::size_t index, const std::string& reason, bool dead, const std::string& consumer, double delay_s) {
    require_idle();
    if (index >= held_.size()) fail(Fault::argument, "no such payload in the batch");
    Held& each = held_[index];
    if (each.hold == Hold::claimed) {
      if (dead)
        ring_->end(each.claim.id, Ended::dead, reason, consumer);
      else
        ring_->give_back(each.claim.id, static_cast<std::uint64_t>(std::clamp(delay_s, 0.0, 1e9) * 1e9));
      each.hold = Hold::none;
      ring_->loan_ended(each.claim.id.slot);
    }
    const auto first = lengths_.begin() + static_cast<std::ptrdiff_t>(index * ragged_);
    if (lengths_.size() == held_.size() * ragged_) lengths_.erase(first, first + static_cast<std::ptrdiff_t>(ragged_));
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void let_go(double delay_s) {
    require_idle();
    release(delay_s);
  }
  // Gives back what was not consumed, after the delay, and lets kept memory go. Idempotent.
  void release(double delay_s = 0.0) noexcept {
    for (Held& each : held_) {
      const Hold hold = std::exchange(each.hold, Hold::none);
      if (hold == Hold::none) continue;
      const ClaimId& id = each.claim.id;
      try {  // a closed ring gives them up with the last loan; a forked child has none
        if (!ring_->closed() && hold == Hold::claimed)
          ring_->give_back(id, static_cast<std::uint64_t>(std::clamp(delay_s, 0.0, 1e9) * 1e9));
        else if (!ring_->closed())
          ring_->unpin(id.slot, id.generation);
      } catch (const RingFault&) {  // closed since we looked
      }
      ring_->loan_ended(id.slot);
    }
  }

  nb::bytes note(std::size_t index) const {
    if (index >= held_.size()) fail(Fault::argument, "no such payload in the batch");
    return nb::bytes(held_[index].note.data(), held_[index].note.size());
  }

 private:
  enum class Hold { none, claimed, kept };
  struct Held {
    Claimed claim;
    Hold hold;
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

  bool fits(const BatchFields& fields, std::size_t i) {
    std::uint64_t* const lengths = lengths_.data() + i * ragged_;
    return (ragged_ == 0 || read_lengths(held_[i].note, lengths, ragged_)) && fills_its_slot(fields, i);
  }

  // Whether the tensors, of the lengths that were read, are the payload.
  bool fills_its_slot(const BatchFields& fields, std::size_t i) const {
    const std::uint64_t* const lengths = lengths_.data() + i * ragged_;
    std::uint64_t end = 0;
    std::size_t next = 0;
    for (const BatchField& field : fields.all()) {
      const std::uint64_t rows = field.ragged ? lengths[next++] : field.most;
      if (rows > field.most) return false;
      end = (end + kAlignment - 1) / kAlignment * kAlignment + rows * field.row_bytes;
    }
    return end == held_[i].claim.length && end <= ring_->identity().slot_capacity;
  }

  void check_room(const BatchFields& fields, const std::vector<Target>& all) const {
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (!fills_its_slot(fields, i)) fail(Fault::argument, "the payloads were not measured by these fields");
    std::size_t next = 0;
    for (std::size_t f = 0; f < all.size(); ++f) {
      const BatchField& field = fields.all()[f];
      const Target& target = all[f];
      std::uint64_t end = target.start;
      for (std::size_t i = 0; i < held_.size(); ++i) {
        const std::uint64_t bytes = (field.ragged ? lengths_[i * ragged_ + next] : field.most) * field.row_bytes;
        if (target.packed ? bytes > target.size - std::min(end, target.size)
                          : bytes > target.stride || end > target.size || target.stride > target.size - end)
          fail(Fault::argument, "the memory of a field is too small for the batch");
        end += target.packed ? bytes : target.stride;
      }
      if (target.fill.empty()) fail(Fault::argument, "a fill value has at least one byte");
      next += field.ragged;
    }
  }

  bool gather_one(const BatchFields& fields, const std::vector<Target>& all, std::vector<std::uint64_t>& packed_at,
                  std::size_t i, bool verify) const {
    const Claimed& claim = held_[i].claim;
    const std::byte* const source = at(claim);
    const bool fused = verify && claim.length >= kFusedBytes;
    if (verify && !fused && checksum(source, claim.length) != claim.checksum) return false;
    std::optional<Checksum> hasher;
    if (fused) hasher.emplace();
    std::uint64_t end = 0;
    std::size_t next = 0;
    for (std::size_t f = 0; f < all.size(); ++f) {
      const BatchField& field = fields.all()[f];
      const Target& target = all[f];
      const std::uint64_t bytes = (field.ragged ? lengths_[i * ragged_ + next++] : field.most) * field.row_bytes;
      const std::uint64_t offset = (end + kAlignment - 1) / kAlignment * kAlignment;
      std::byte* const place = target.data + (target.packed ? packed_at[f] : target.start + i * target.stride);
      if (fused) {
        hasher->update(source + end, offset - end);
        copy_and_update(*hasher, place, source + offset, bytes);
      } else if (bytes > 0) {
        copy_bytes(place, source + offset, bytes);
      }
      if (target.packed)
        packed_at[f] += bytes;
      else
        fill_with(place + bytes, target.stride - bytes, target.fill);
      end = offset + bytes;
    }
    return !fused || hasher->digest() == claim.checksum;
  }

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

nb::object claimed_batch(nb::handle_t<Ring> ring, std::vector<Claimed> claims) {
  return nb::cast(ClaimedBatch(ring, std::move(claims)));
}

void bind_batches(nb::module_& module) {
  nb::class_<BatchFields>(module, "BatchFields", nb::is_final(), "The tensors of a schema, for batches.")
      .def(nb::init<nb::list>(), "rows"_a);

  nb::class_<ClaimedBatch> batch(module, "ClaimedBatch", nb::is_final(), nb::type_slots(batch_slots),
                                 "Payloads of one ring that were claimed together.");
  batch.def("__len__", &ClaimedBatch::size)
      .def("__bool__", [](const ClaimedBatch& self) { return self.size() > 0; })
      .def_prop_ro("ring", &ClaimedBatch::ring)
      .def("columns", &ClaimedBatch::columns, "out"_a)
      .def("measure", &ClaimedBatch::measure, "fields"_a, "out"_a)
      .def("gather", &ClaimedBatch::gather, "fields"_a, "targets"_a, "verify"_a)
      .def("verify", &ClaimedBatch::verify)
      .def("finish", &ClaimedBatch::finish, "keep"_a = false, "arrived"_a = false)
      .def("renew", &ClaimedBatch::renew)
      .def("drop", &ClaimedBatch::drop, "index"_a, "reason"_a, "dead"_a, "consumer"_a = "", "delay_s"_a = 0.0)
      .def("release", &ClaimedBatch::let_go, "delay_s"_a = 0.0)
      .def("note", &ClaimedBatch::note, "index"_a);
  module.attr("BATCH_COLUMNS") = nb::make_tuple("slot", "generation", "rank", "attempts", "length", "policy_version",
                                                "offset");
}

}  // namespace transport::python
