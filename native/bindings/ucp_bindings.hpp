// What the files of the binding share: references to Python objects that native code carries without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bindings/buffer_view.hpp"
#include "bindings/gil_released.hpp"
#include "ucp/engine.hpp"

namespace transport::ucp {
class Link;
}

namespace transport::ucp::python {

namespace nb = nanobind;
using transport::python::BufferView;
using transport::python::GilReleased;

void bind_engine(nb::module_& module);
void bind_reading(nb::module_& module);
void bind_serving(nb::module_& module);
void bind_takes(nb::module_& module, nb::class_<Link>& link);

// An owned reference, given back by the event that carries it to Python.
inline void* own(nb::handle object) { return object.inc_ref().ptr(); }

// Host memory by the buffer protocol, or what a tuple (address, bytes, object) names, of any kind.
struct Place {
  std::byte* data;
  std::size_t size;
  ucs_memory_type_t memory;
  std::shared_ptr<void> keep;

  static Place of(nb::handle object, bool writable);
};

}  // namespace transport::ucp::python
