// What the files of the binding share. They hold names, the GIL and the ownership of memory, no decisions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>

#include "bindings/buffer_view.hpp"
#include "bindings/gil_released.hpp"
#include "common/error.hpp"
#include "common/futex.hpp"

namespace transport {
class Ring;
}

namespace transport::python {

namespace nb = nanobind;

void bind_ring(nb::module_& module);
void bind_bytes(nb::module_& module);
void bind_blocks(nb::module_& module);
void bind_batches(nb::module_& module);
void bind_claim_types(nb::module_& module);
void bind_claims(nb::class_<Ring>& ring);
void bind_dropped(nb::module_& module);
void bind_writes(nb::module_& module);

// Copies and hashes of less are over before another thread could have used the GIL.
inline constexpr std::size_t kReleaseGilBytes = 64 * 1024;

inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// One sleep of at most a re-check interval without the GIL, and then Python's signal handlers.
inline bool sleep_without_gil(EventWord& event, std::uint32_t before, const Deadline& deadline) {
  bool advanced = false;
  {
    const GilReleased release;
    advanced = sleep_slice(event, before, deadline);
  }
  check_signals();
  return advanced;
}

}  // namespace transport::python
