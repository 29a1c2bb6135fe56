// Views of payloads in their slots: memory that is pinned until the last object that looks into it is gone.
//
//   PayloadView ──► Views ──► Ring
//        what exports the slot's memory · the views of one attachment · the attachment
//
// Whether a payload is consumed is another matter: its end only unpins.
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
class PayloadView {
 public:
  // Of a slot that is pinned. It is linked where it stays, once.
  PayloadView(nb::object keep, Views& views, nb::object owner, const Wanted& wanted)
      : keep_(std::move(keep)), views_(&views), owner_(std::move(owner)), slot_(wanted.slot),
        generation_(wanted.generation), mapping_(ring().mapping()), data_(ring().payload(slot_)),
        size_(wanted.length) {}
  PayloadView(PayloadView&&) = default;
  ~PayloadView();

  void link();
  // False: done before, or not linked.
  bool unpin() noexcept;

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  friend class Views;
  Ring& ring() const;
  void close_owner() const noexcept;

  nb::object keep_;  // the Views
  Views* views_;
  nb::object owner_;
  std::uint64_t slot_, generation_;
  std::shared_ptr<Mapping> mapping_;  // the memory stays also where the attachment is closed by force
  const std::byte* data_;
  std::size_t size_;
  bool linked_ = false;
  PayloadView *previous_ = nullptr, *next_ = nullptr;
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

  // Nothing more will be read. True if no view is out; else the last one to go closes its owner.
  bool close() {
    closing_ = true;
    return out_ == 0;
  }
  // Releases every pin. For the end of the process, when no view is used.
  void unpin_all() {
    while (first_ != nullptr) first_->unpin();
  }

  void add(PayloadView& view) {
    view.next_ = first_;
    if (first_ != nullptr) first_->previous_ = &view;
    first_ = &view;
    view.linked_ = true;
    ++out_;
  }
  bool remove(PayloadView& view) noexcept {
    if (!std::exchange(view.linked_, false)) return false;
    (view.previous_ != nullptr ? view.previous_->next_ : first_) = view.next_;
    if (view.next_ != nullptr) view.next_->previous_ = view.previous_;
    view.previous_ = view.next_ = nullptr;
    --out_;
    return true;
  }

 private:
  nb::object keep_;  // the Ring
  Ring* ring_;
  std::size_t most_;
  bool closing_ = false;
  // Invariant: exactly the views whose pins are held, out_ of them.
  PayloadView* first_ = nullptr;
  std::size_t out_ = 0;
};

Ring& PayloadView::ring() const { return views_->ring(); }

void PayloadView::link() {
  ring().lend(slot_);
  views_->add(*this);
}

bool PayloadView::unpin() noexcept {
  if (!views_->remove(*this)) return false;
  try {  // a closed ring gives the pin back with its last loan; a forked child has none
    if (!ring().closed()) ring().unpin(slot_, generation_);
  } catch (const RingFault&) {  // closed since we looked
  }
  ring().loan_ended(slot_);
  return true;
}

PayloadView::~PayloadView() {
  if (keep_.is_valid() && unpin() && views_->closing() && views_->size() == 0) close_owner();  // else moved from
}

void PayloadView::close_owner() const noexcept {
  PyObject *type, *value, *traceback;  // a view may be released while an exception is handled
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* const result = PyObject_CallMethod(owner_.ptr(), "close", nullptr);
  if (result == nullptr) PyErr_WriteUnraisable(owner_.ptr());
  Py_XDECREF(result);
  PyErr_Restore(type, value, traceback);
}

nb::object Views::read(nb::handle_t<Views> self, nb::object owner, std::uint64_t slot, std::uint64_t generation,
                       std::uint64_t key, std::uint64_t length, unsigned rank) {
  Views& views = *nb::inst_ptr<Views>(self);
  if (views.out_ >= views.most_) return nb::none();
  Ring& ring = views.ring();
  const Wanted wanted{slot, generation, key, length, rank};
  const ReadAnswer answer = ring.begin_read(wanted);
  if (answer != ReadAnswer::ok) return nb::int_(static_cast<int>(answer));
  try {
    nb::object view = nb::cast(PayloadView(nb::borrow(self), views, std::move(owner), wanted));
    nb::inst_ptr<PayloadView>(view)->link();
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
  nb::class_<PayloadView>(module, "PayloadView", nb::is_final(), nb::is_weak_referenceable(),
                          nb::type_slots(view_slots), "A payload's bytes in its slot, read-only and pinned.");

  nb::class_<Views>(module, "Views", nb::is_final(), "The views of one attachment that are in use.")
      .def(nb::init<nb::handle_t<Ring>, std::size_t>(), "ring"_a, "most"_a)
      .def("read", &Views::read, "owner"_a, "slot"_a, "generation"_a, "key"_a, "length"_a, "rank"_a)
      .def("close", &Views::close)
      .def("unpin_all", &Views::unpin_all)
      .def("__len__", &Views::size);
}

}  // namespace transport::python
