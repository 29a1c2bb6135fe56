// Views of payloads in their slots: memory that is pinned until the last object that looks into it is gone.
//
//   PayloadView ──► Hold ──► Views ──► Ring
//        what exports the slot's memory · what is done at its end · the views of one attachment · the attachment
//
// Code that acknowledges a payload later keeps its Hold, which does not keep the memory.
//
// Everything here runs with the GIL, which is what guards the list of a Views. The end of a view may come on any
// thread, in the middle of anything, and in a forked child, whose Ring is closed and holds nothing.
#include "bindings/ring_bindings.hpp" // first: Python.h sets macros of the system headers

#include <algorithm>
#include <utility>

#include "ring/ring.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

class Views;

// One view that is out, as a link in its attachment's list.
class Hold {
 public:
  Hold(nb::object keep, Views& views, const Wanted& wanted)
      : keep_(std::move(keep)), views_(&views), wanted_(wanted) {}
  Hold(Hold&&) = default;

  // Consumes now; the memory stays pinned. False: it had been consumed.
  bool acknowledge();
  // From now on releasing the view acknowledges the payload: the caller has it.
  void deliver() { consume_ = true; }
  // Releasing the view does not acknowledge: the payload stays for another attempt.
  void abandon() { consume_ = false; }
  // Acknowledges what letting go would acknowledge.
  void settle() {
    if (std::exchange(consume_, false)) acknowledge();
  }

  void link();
  // False: done before.
  bool unpin() noexcept;

  Views& views() const { return *views_; }

 private:
  friend class Views;
  nb::object keep_;  // the Views
  Views* views_;
  Wanted wanted_;
  bool consume_ = false;
  bool linked_ = false;
  Hold *previous_ = nullptr, *next_ = nullptr;
};

class Views {
 public:
  Views(nb::handle_t<Ring> ring, std::size_t most)
      : keep_(nb::borrow(ring)), ring_(nb::inst_ptr<Ring>(ring)), most_(std::max<std::size_t>(most, 1)) {}
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  // A view; or nothing, where as many as allowed are out; or a ReadAnswer.
  static nb::object read(nb::handle_t<Views> self, nb::object owner, std::uint64_t slot, std::uint64_t generation,
                         std::uint64_t key, std::uint64_t length, unsigned rank);

  std::size_t size() const { return out_; }
  Ring& ring() const { return *ring_; }
  bool closing() const { return closing_; }

  // Nothing more will be read: what letting go would acknowledge is acknowledged now, for it has been delivered.
  // True if no view is out; else the last one to go closes its owner.
  bool close() {
    closing_ = true;
    for (Hold* hold = first_; hold != nullptr && !ring_->closed(); hold = hold->next_) hold->settle();
    return out_ == 0;
  }
  // Releases every pin. For the end of the process, when no view is used.
  void unpin_all() {
    while (first_ != nullptr) first_->unpin();
  }

  void add(Hold& hold) {
    hold.next_ = first_;
    if (first_ != nullptr) first_->previous_ = &hold;
    first_ = &hold;
    hold.linked_ = true;
    ++out_;
  }
  bool remove(Hold& hold) noexcept {
    if (!std::exchange(hold.linked_, false)) return false;
    (hold.previous_ != nullptr ? hold.previous_->next_ : first_) = hold.next_;
    if (hold.next_ != nullptr) hold.next_->previous_ = hold.previous_;
    hold.previous_ = hold.next_ = nullptr;
    --out_;
    return true;
  }

 private:
  nb::object keep_;  // the Ring
  Ring* ring_;
  std::size_t most_;
  bool closing_ = false;
  // Invariant: exactly the holds whose pins are held, out_ of them.
  Hold* first_ = nullptr;
  std::size_t out_ = 0;
};

bool Hold::acknowledge() {
  consume_ = false;
  return views_->ring().consume(wanted_.slot, wanted_.generation, wanted_.rank);
}

void Hold::link() {
  views_->ring().lend(wanted_.slot);
  views_->add(*this);
}

bool Hold::unpin() noexcept {
  if (!views_->remove(*this)) return false;
  Ring& ring = views_->ring();
  try {  // a closed ring gives the pin back with its last loan; a forked child has none
    // Refused: another owner was faster, but this one must still release the pin.
    if (!ring.closed() && (!consume_ || !ring.mark_consumed(wanted_.slot, wanted_.generation, wanted_.rank)))
      ring.unpin(wanted_.slot, wanted_.generation);
  } catch (const RingFault&) {  // closed since we looked
  }
  ring.loan_ended(wanted_.slot);
  return true;
}

class PayloadView {
 public:
  // `hold` is that of a slot that is pinned and linked.
  PayloadView(nb::object hold, nb::object owner, std::shared_ptr<Mapping> mapping, const std::byte* data,
              std::size_t size)
      : hold_(std::move(hold)), owner_(std::move(owner)), mapping_(std::move(mapping)), data_(data), size_(size) {}
  PayloadView(PayloadView&&) = default;
  ~PayloadView() {
    if (!hold_.is_valid()) return;  // moved from
    Hold& hold = *nb::inst_ptr<Hold>(hold_);
    if (hold.unpin() && hold.views().closing() && hold.views().size() == 0) close_owner();
  }

  nb::object hold() const { return hold_; }
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void close_owner() const noexcept {
    PyObject *type, *value, *traceback;  // a view may be released while an exception is handled
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* const result = PyObject_CallMethod(owner_.ptr(), "close", nullptr);
    if (result == nullptr) PyErr_WriteUnraisable(owner_.ptr());
    Py_XDECREF(result);
    PyErr_Restore(type, value, traceback);
  }

  nb::object hold_, owner_;
  std::shared_ptr<Mapping> mapping_;  // the memory stays also where the attachment is closed by force
  const std::byte* data_;
  std::size_t size_;
};

nb::object Views::read(nb::handle_t<Views> self, nb::object owner, std::uint64_t slot, std::uint64_t generation,
                       std::uint64_t key, std::uint64_t length, unsigned rank) {
  Views& views = *nb::inst_ptr<Views>(self);
  if (views.out_ >= views.most_) return nb::none();
  Ring& ring = views.ring();
  const Wanted wanted{slot, generation, key, length, rank};
  const ReadAnswer answer = ring.begin_read(wanted);
  if (answer != ReadAnswer::ok) return nb::int_(static_cast<int>(answer));
  try {
    nb::object hold = nb::cast(Hold(nb::borrow(self), views, wanted));
    nb::object view = nb::cast(PayloadView(hold, std::move(owner), ring.mapping(), ring.payload(slot), length));
    nb::inst_ptr<Hold>(hold)->link();
    ring.count(Counter::bytes_mapped, length);
    return view;
  } catch (...) {  // no memory for the objects
    if (!ring.closed()) ring.unpin(slot, generation);
    throw;
  }
}

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  const auto* view = nb::inst_ptr<PayloadView>(self);
  return PyBuffer_FillInfo(buffer, self, const_cast<std::byte*>(view->data()), static_cast<Py_ssize_t>(view->size()), 1,
                           flags);
}
Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(nb::inst_ptr<PayloadView>(self)->size()); }

PyType_Slot view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                            {Py_sq_length, reinterpret_cast<void*>(length)},
                            {0, nullptr}};

}  // namespace

void bind_views(nb::module_& module) {
  nb::class_<Hold>(module, "Hold", nb::is_final(), "The action to take when the last array over a view is released.")
      .def("acknowledge", &Hold::acknowledge, "Consume now; the memory stays pinned. False: already consumed.")
      .def("deliver", &Hold::deliver, "From now on, releasing the view acknowledges the payload.")
      .def("abandon", &Hold::abandon, "From now on, releasing the view does not acknowledge the payload.");

  nb::class_<PayloadView>(module, "PayloadView", nb::is_final(), nb::is_weak_referenceable(),
                          nb::type_slots(view_slots), "A payload's bytes in its slot, read-only and pinned.")
      .def_prop_ro("hold", &PayloadView::hold);

  nb::class_<Views>(module, "Views", nb::is_final(), "The views of one attachment that are in use.")
      .def(nb::init<nb::handle_t<Ring>, std::size_t>(), "ring"_a, "most"_a)
      .def("read", &Views::read, "owner"_a, "slot"_a, "generation"_a, "key"_a, "length"_a, "rank"_a)
      .def("close", &Views::close)
      .def("unpin_all", &Views::unpin_all)
      .def("__len__", &Views::size);
}

}  // namespace transport::python
