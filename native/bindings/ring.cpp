// Ring, SlotInfo, OwnerInfo.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "bindings/ring_bindings.hpp"
#include "bindings/without_gil.hpp"
#include "ring/ring.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

// What a memoryview of a payload refers to; it keeps the mapping and not the attachment.
struct PayloadArea {
  std::shared_ptr<Mapping> mapping;
  std::byte* data;
  std::size_t size;

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const auto* area = nb::inst_ptr<PayloadArea>(self);
    return PyBuffer_FillInfo(view, self, area->data, static_cast<Py_ssize_t>(area->size), !area->mapping->writable(),
                             flags);
  }
};
PyType_Slot payload_area_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(PayloadArea::get_buffer)}, {0, nullptr}};

nb::object payload(const Ring& ring, std::uint64_t slot) {
  nb::object area = nb::cast(PayloadArea{ring.mapping(), ring.payload(slot), ring.identity().slot_capacity});
  return nb::steal(PyMemoryView_FromObject(area.ptr()));
}

// Memory of a slot that is being written or read, for as long as anything looks into it. Closing the ring leaves the
// slot to it. One that was not ended gives the slot back when it goes, on any thread, in the middle of anything, and in
// a forked child, whose Ring is closed and holds nothing: unpublished, or for another attempt.
class Loan {
 public:
  enum class For { writing, reading };

  // Of a slot that the owner of `ring` has taken, or pinned. To be read are `size` bytes.
  Loan(nb::handle_t<Ring> ring, std::uint64_t slot, std::uint64_t generation, For use, std::uint64_t size)
      : keep_(nb::borrow(ring)),
        ring_(nb::inst_ptr<Ring>(ring)),
        mapping_(ring_->mapping()),
        slot_(slot),
        generation_(generation),
        size_(std::min(size, ring_->identity().slot_capacity)),
        use_(use),
        data_(ring_->payload(slot)) {
    ring_->lend(slot);
  }
  Loan(Loan&& other) noexcept
      : keep_(std::move(other.keep_)),
        ring_(other.ring_),
        mapping_(std::move(other.mapping_)),
        slot_(other.slot_),
        generation_(other.generation_),
        size_(other.size_),
        use_(other.use_),
        data_(other.data_),
        ended_(std::exchange(other.ended_, true)) {}
  Loan& operator=(Loan&&) = delete;
  ~Loan() { release(); }

  // The object; without memory for it the slot goes back.
  static nb::object made(nb::handle_t<Ring> ring, std::uint64_t slot, std::uint64_t generation, For use,
                         std::uint64_t size) {
    std::optional<Loan> loan;
    try {
      loan.emplace(ring, slot, generation, use, size);
    } catch (...) {
      give_back(*nb::inst_ptr<Ring>(ring), slot, generation, use);
      throw;
    }
    return nb::cast(std::move(*loan));
  }

  std::uint64_t slot() const { return slot_; }
  std::uint64_t generation() const { return generation_; }
  std::uint64_t size() const { return size_; }
  bool ended() const { return ended_; }
  // The payload is readable, and the slot is the writer's no more. False: it was not.
  bool publish(std::uint64_t length, std::uint64_t checksum, unsigned readers, std::uint64_t deadline_ns,
               nb::bytes note, std::optional<std::int64_t> policy_version) {
    ring_->require_open();
    if (ended_) return false;
    const Publication publication{length, checksum, readers, deadline_ns, {note.c_str(), note.size()},
                                  policy_version.value_or(kNoVersion)};
    bool published = false;
    {
      std::optional<WithoutGil> without;
      if (ring_->synced()) without.emplace(*ring_);  // the disk takes its time
      published = ring_->publish(slot_, generation_, publication);
    }
    end();
    return published;
  }
  // The slot is free again, or unpinned. False: it was before.
  bool release() {
    if (ended_) return false;
    const Ending ending(*this);
    try {  // a closed ring gives the slot back with its last loan
      return ring_->closed() || give_back(*ring_, slot_, generation_, use_);
    } catch (const RingFault&) {  // closed since we looked
      return true;
    }
  }
  // The reader is done: its pin goes in the same call. False: it went before, or the rank was consumed elsewhere.
  bool consume(unsigned rank) {
    if (ended_) return false;
    const Ending ending(*this);
    if (ring_->mark_consumed(slot_, generation_, rank)) return true;
    ring_->unpin(slot_, generation_);
    return false;
  }

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const auto* loan = nb::inst_ptr<Loan>(self);
    const bool read_only = loan->use_ == For::reading || !loan->mapping_->writable();
    return PyBuffer_FillInfo(view, self, loan->data_, static_cast<Py_ssize_t>(loan->size_), read_only, flags);
  }
  static Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(nb::inst_ptr<Loan>(self)->size_); }

 private:
  struct Ending {
    explicit Ending(Loan& loan) : loan(loan) {}
    Ending(const Ending&) = delete;
    ~Ending() { loan.end(); }
    Loan& loan;
  };

  static bool give_back(Ring& ring, std::uint64_t slot, std::uint64_t generation, For use) {
    return use == For::writing ? ring.abort(slot, generation) : ring.unpin(slot, generation);
  }
  void end() {
    if (!std::exchange(ended_, true)) ring_->loan_ended(slot_);
  }

  nb::object keep_;  // the Ring
  Ring* ring_;
  std::shared_ptr<Mapping> mapping_;  // the memory stays also where the attachment is closed by force
  std::uint64_t slot_, generation_, size_;
  For use_;
  std::byte* data_;
  bool ended_ = false;
};
PyType_Slot loan_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(Loan::get_buffer)},
                            {Py_sq_length, reinterpret_cast<void*>(Loan::length)},
                            {0, nullptr}};

// A loan of the pinned payload, or why it is not pinned; nothing where `most_lent` loans (0: no limit) have not ended.
// An interrupt drops the loan, and with it the pin.
nb::object begin_read(nb::handle_t<Ring> self, std::uint64_t slot, std::uint64_t generation, std::uint64_t key,
                      std::uint64_t length, unsigned rank, std::uint64_t most_lent) {
  Ring& ring = *nb::inst_ptr<Ring>(self);
  if (most_lent != 0 && ring.lent() >= most_lent) return nb::none();
  const ReadAnswer answer = ring.begin_read({slot, generation, key, length, rank});
  if (answer != ReadAnswer::ok) return nb::int_(static_cast<int>(answer));
  nb::object loan = Loan::made(self, slot, generation, Loan::For::reading, length);
  ring.count(Counter::bytes_mapped, length);
  return loan;
}

// As with a read, an interrupt drops the loan, and with it the slot.
nb::object to_write(nb::handle_t<Ring> ring, const std::optional<Lease>& lease) {
  if (!lease) return nb::none();
  const std::uint64_t capacity = nb::inst_ptr<Ring>(ring)->identity().slot_capacity;
  return Loan::made(ring, lease->slot, lease->generation, Loan::For::writing, capacity);
}

// Invariant: transitions run with the GIL, only sleeping does not; so close() excludes them (ring.hpp).
nb::object take(nb::handle_t<Ring> self, double timeout_s) {
  Ring& ring = *nb::inst_ptr<Ring>(self);
  const Deadline deadline(timeout_s);
  bool waited = false, woken = false;
  for (;;) {
    EventWord& freed = ring.freed();
    const std::uint32_t before = seen(freed);
    if (const auto taken = ring.try_take()) return to_write(self, taken);
    if (!std::exchange(waited, true)) ring.count(Counter::full_waits, 1);
    if (!woken && ring.reclaim() > 0) continue;  // dead owners may be all that fills it
    if (deadline.left_ns() == 0) return nb::none();
    const std::shared_ptr<Mapping> keep = ring.mapping();
    woken = sleep_without_gil(freed, before, deadline);
  }
}

bool wait(const Ring& ring, EventWord& (Ring::*which)() const, std::uint32_t before, double timeout_s) {
  const Deadline deadline(timeout_s);
  do {
    EventWord& event = (ring.*which)();
    const std::shared_ptr<Mapping> keep = ring.mapping();
    if (sleep_without_gil(event, before, deadline)) return true;
  } while (deadline.left_ns() > 0);
  return false;
}

std::unique_ptr<Ring> create(const std::string& name, std::uint64_t slot_count, std::uint64_t slot_capacity,
                             nb::bytes fingerprint, const std::string& file, bool synced, bool begins) {
  Bytes16 key{};
  if (fingerprint.size() != key.size()) fail(Fault::argument, "a fingerprint has 16 bytes");
  std::memcpy(key.data(), fingerprint.c_str(), key.size());
  const GilReleased release;
  const Kept kept = file.empty() ? Kept::no : synced ? Kept::synced : Kept::by_file;
  try {
    return Ring::create(name, slot_count, slot_capacity, key, file, kept, begins);
  } catch (RingFault& fault) {
    fault.of_new_file = !file.empty();
    throw;
  }
}

std::unique_ptr<Ring> attach(const std::string& name, int role, bool writable_payload, bool set_up) {
  if (role < 0 || role > static_cast<int>(Role::reader)) fail(Fault::argument, "no such role");
  const GilReleased release;
  return Ring::attach(name, static_cast<Role>(role), writable_payload, set_up);
}

nb::bytes bytes_of(const Bytes16& value) { return nb::bytes(value.data(), value.size()); }

nb::object note(const Ring& ring, std::uint64_t slot, std::uint64_t generation) {
  const auto note = ring.note(slot, generation);
  if (!note) return nb::none();
  return nb::bytes(note->data(), note->size());
}

nb::dict counters(const Ring& ring) {
  nb::dict counters;
  const auto sums = ring.counters();
  for (std::size_t i = 0; i < sums.size(); ++i) counters[kCounterNames[i]] = sums[i];
  return counters;
}

// Shared memory may contain any bytes; they are shown as text.
nb::str shown(const std::string& bytes) {
  return nb::steal<nb::str>(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

void begin(Ring& ring, bool begun) {
  if (!begun) fail(Fault::argument, "what has begun stays so");
  ring.begin();
}

nb::bytes schema(const Ring& ring) {
  const std::string encoded = ring.schema();
  return nb::bytes(encoded.data(), encoded.size());
}

void set_schema(Ring& ring, const nb::bytes& encoded) { ring.set_schema(std::string_view(encoded.c_str(), encoded.size())); }

nb::tuple state_counts(const Ring& ring) {
  const auto counts = ring.state_counts();
  return nb::make_tuple(counts[0], counts[1], counts[2], counts[3]);
}

const char* state_name(State state) {
  constexpr const char* names[] = {"FREE", "WRITING", "READY", "READING"};
  return names[static_cast<unsigned>(state)];
}

nb::str describe(const Ring& ring) {
  if (ring.closed()) return nb::str("<Ring {} closed>").format(ring.name());
  const auto counts = ring.state_counts();
  return nb::str("<Ring {} owner={} free={} writing={} ready={} reading={}>")
      .format(ring.name(), ring.owner(), counts[0], counts[1], counts[2], counts[3]);
}

nb::str describe_slot(const SlotInfo& slot) {
  return nb::str("<SlotInfo {} generation={} done={:04x} pins={:04x} length={}>")
      .format(state_name(slot.state), slot.generation, slot.done, slot.pins, slot.length);
}

nb::str describe_owner(const OwnerInfo& owner) {
  constexpr const char* roles[] = {"observer", "writer", "listener", "reader"};
  const auto role = static_cast<std::size_t>(owner.role);
  return nb::str("<OwnerInfo {} {} pid={} {} port={}>")
      .format(owner.index, role < std::size(roles) ? roles[role] : "unknown", owner.pid, owner.alive ? "alive" : "dead",
              owner.port);
}

}  // namespace

void bind_ring(nb::module_& module) {
  nb::class_<PayloadArea>(module, "_PayloadArea", nb::is_final(), nb::type_slots(payload_area_slots));

  nb::class_<Loan>(module, "Loan", nb::is_final(), nb::type_slots(loan_slots), "Memory of a slot that is in use.")
      .def(
          "__init__",
          [](Loan* self, nb::handle_t<Ring> ring, std::uint64_t slot, std::uint64_t generation, std::uint64_t length) {
            new (self) Loan(ring, slot, generation, Loan::For::reading, length);
          },
          "ring"_a, "slot"_a, "generation"_a, "length"_a)
      .def_prop_ro("slot", &Loan::slot)
      .def_prop_ro("generation", &Loan::generation)
      .def("publish", &Loan::publish, "length"_a, "checksum"_a, "readers"_a, "deadline_ns"_a, "note"_a,
           "policy_version"_a = nb::none())
      .def("release", &Loan::release)
      .def("consume", &Loan::consume, "rank"_a)
      .def_prop_ro("ended", &Loan::ended);

  nb::class_<SlotInfo>(module, "SlotInfo", nb::is_final(), "A consistent snapshot of one slot.")
      .def_prop_ro("state", [](const SlotInfo& slot) { return static_cast<int>(slot.state); })
      .def_ro("generation", &SlotInfo::generation)
      .def_ro("done", &SlotInfo::done)
      .def_ro("pins", &SlotInfo::pins)
      .def_ro("readers", &SlotInfo::readers)
      .def_ro("length", &SlotInfo::length)
      .def_ro("checksum", &SlotInfo::checksum)
      .def_ro("sequence", &SlotInfo::sequence)
      .def_ro("deadline_ns", &SlotInfo::deadline_ns)
      .def_prop_ro("policy_version", [](const SlotInfo& slot) { return given_version(slot.policy_version); })
      .def("__repr__", describe_slot);

  nb::class_<OwnerInfo>(module, "OwnerInfo", nb::is_final(), "A row of the owner table.")
      .def_ro("index", &OwnerInfo::index)
      .def_ro("alive", &OwnerInfo::alive)
      .def_prop_ro("role", [](const OwnerInfo& owner) { return static_cast<int>(owner.role); })
      .def_ro("pid", &OwnerInfo::pid)
      .def_ro("started_ns", &OwnerInfo::started_ns)
      .def_ro("heartbeat_ns", &OwnerInfo::heartbeat_ns)
      .def_ro("heard_ns", &OwnerInfo::heard_ns)
      .def_ro("lease_ns", &OwnerInfo::lease_ns)
      .def_ro("port", &OwnerInfo::port)
      .def("__repr__", describe_owner);

  bind_claim_types(module);
  nb::class_<Ring> ring(module, "Ring", nb::is_final(), nb::is_weak_referenceable(),
                        "One attachment of this process to a ring's segment.");
  bind_claims(ring);
  ring.def_static("create", create, "name"_a, "slot_count"_a, "slot_capacity"_a, "fingerprint"_a, nb::kw_only(),
                  "file"_a = "", "synced"_a = false, "begins"_a = true)
      .def_static("attach", attach, "name"_a, "role"_a, nb::kw_only(), "writable_payload"_a = false,
                  "set_up"_a = false)
      .def("close", &Ring::close, "Release pins, owner number and locks, except those of lent memory. Idempotent.")
      .def("leave", &Ring::leave, nb::kw_only(), "give_up_unread"_a, "only_empty"_a)
      .def("end_reading", &Ring::end_reading)
      .def_prop_ro("lent", &Ring::lent)
      .def("unlink_if_last", &Ring::unlink_if_last, nb::kw_only(), "readers_may_stay"_a = false,
           "gives_up_to"_a = kGivesUpAll)
      .def_static("unlink_if_dead", &Segment::unlink_if_dead, "name"_a, nb::kw_only(), "gives_up_to"_a = kGivesUpAll)
      .def_prop_ro("sequence", &Ring::sequence)
      .def_prop_ro("keeper_alive", &Ring::keeper_alive)
      .def("supervise", &Ring::supervise, "Try to become the ring's supervisor; True if it is this attachment now.")
      .def_prop_ro("supervised", &Ring::supervised)
      .def_prop_ro("still_named", &Ring::still_named)

      .def_prop_ro("name", &Ring::name)
      .def_prop_ro("ring_id", [](const Ring& ring) { return bytes_of(ring.identity().ring_id); })
      .def_prop_ro("secret", [](const Ring& ring) { return bytes_of(ring.identity().secret); })
      .def_prop_ro("fingerprint", [](const Ring& ring) { return bytes_of(ring.identity().fingerprint); })
      .def_prop_ro("slot_count", [](const Ring& ring) { return ring.identity().slot_count; })
      .def_prop_ro("slot_capacity", [](const Ring& ring) { return ring.identity().slot_capacity; })
      .def_prop_ro("taken_over", &Ring::taken_over)
      .def_prop_ro("file", &Ring::file)
      .def_prop_ro("torn", &Ring::torn)
      .def_prop_ro("owner", &Ring::owner)
      .def_prop_ro("closed", &Ring::closed)

      .def("try_take", [](nb::handle_t<Ring> self) { return to_write(self, nb::inst_ptr<Ring>(self)->try_take()); })
      .def("take", take, "timeout_s"_a)
      .def("try_overwrite",
           [](nb::handle_t<Ring> self) { return to_write(self, nb::inst_ptr<Ring>(self)->try_overwrite()); })
      .def(
          "pin",
          [](Ring& ring, std::uint64_t slot, std::uint64_t generation, unsigned rank) {
            return static_cast<int>(ring.pin(slot, generation, rank));
          },
          "slot"_a, "generation"_a, "rank"_a)
      .def("begin_read", begin_read, "slot"_a, "generation"_a, "key"_a, "length"_a, "rank"_a, "most_lent"_a = 0u)
      .def("consume", &Ring::consume, "slot"_a, "generation"_a, "rank"_a)
      .def("discard", &Ring::discard, "slot"_a, "generation"_a)
      .def("discard_unread", &Ring::discard_unread)
      .def("reclaim", &Ring::reclaim)

      .def("info", &Ring::info, "slot"_a)
      .def("note", note, "slot"_a, "generation"_a)
      .def("payload", payload, "slot"_a)
      .def("state_counts", state_counts)
      .def_prop_ro("unread", &Ring::unread)
      .def("left", &Ring::left, "rank"_a)
      .def("counters", counters)
      .def(
          "count",
          [](Ring& ring, const std::string& name, std::uint64_t amount) { ring.count(counter_named(name), amount); },
          "name"_a, "amount"_a)
      .def(
          "own_count", [](const Ring& ring, const std::string& name) { return ring.own_count(counter_named(name)); },
          "name"_a)
      .def("owners", &Ring::owners)
      .def("own_pins", &Ring::own_pins, "slot"_a)
      .def("heartbeat", &Ring::heartbeat)
      .def("ports", [](const Ring& ring) { return nb::tuple(nb::cast(ring.ports())); })
      .def("set_ports", &Ring::set_ports, "ports"_a)
      .def("set_own_port", &Ring::set_own_port, "port"_a)
      .def_prop_rw("addresses", [](const Ring& ring) { return shown(ring.addresses()); }, &Ring::set_addresses)
      .def_prop_rw("consumers", [](const Ring& ring) { return shown(ring.consumers()); }, &Ring::set_consumers)
      .def_prop_rw("schema", schema, set_schema)
      .def_prop_rw("begun", &Ring::begun, begin)
      .def_prop_ro("ended", &Ring::ended)
      .def_prop_ro("drained", &Ring::drained)
      .def("end_data", &Ring::end_data)
      .def("only_serve", &Ring::only_serve)
      .def_prop_ro("takers", &Ring::takers)
      .def_prop_ro("pending", &Ring::pending)

      .def("freed_event", [](const Ring& ring) { return seen(ring.freed()); })
      .def(
          "wait_freed",
          [](const Ring& ring, std::uint32_t before, double timeout_s) {
            return wait(ring, &Ring::freed, before, timeout_s);
          },
          "seen"_a, "timeout_s"_a)
      .def("published_event", [](const Ring& ring) { return seen(ring.published()); })
      .def(
          "wait_published",
          [](const Ring& ring, std::uint32_t before, double timeout_s) {
            return wait(ring, &Ring::published, before, timeout_s);
          },
          "seen"_a, "timeout_s"_a)
      .def("claimed_event", [](const Ring& ring) { return expect(ring.claimed()); })
      .def(
          "wait_claimed",
          [](const Ring& ring, std::uint32_t before, double timeout_s) {
            return wait(ring, &Ring::claimed, before, timeout_s);
          },
          "seen"_a, "timeout_s"_a)
      .def("__repr__", describe);

  module.def("segments", &Segment::list, "Names of this project's ring segments on this host.");
}

}  // namespace transport::python
