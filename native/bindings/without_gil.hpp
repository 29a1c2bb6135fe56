// The use of a ring without the GIL.
#pragma once

#include "bindings/ring_bindings.hpp" // first: Python.h sets macros of the system headers

#include <memory>

#include "ring/ring.hpp"

namespace transport::python {

// While it lives the GIL is released and close() waits. The use ends before the GIL is taken again: close() waits with
// the GIL. The memory stays mapped.
class WithoutGil {
 public:
  explicit WithoutGil(Ring& ring) : mapping_(ring.mapping()), in_use_(std::make_unique<Ring::InUse>(ring)) {}
  ~WithoutGil() { in_use_.reset(); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  std::shared_ptr<Mapping> mapping_;
  std::unique_ptr<Ring::InUse> in_use_;
  GilReleased released_;
};

}  // namespace transport::python
