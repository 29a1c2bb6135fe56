// The interpreter's lock, given away and taken again.
#pragma once

#include <Python.h>  // first: it sets macros of the system headers
#include <unistd.h>

namespace transport::python {

// While it lives the GIL is released. A thread that wants it back while the interpreter ends is ended by Python up to
// 3.13, by an unwinding that nothing may stop: destructors and nanobind's handlers on its way abort the process. So the
// thread stays here until the process has ended, as Python has it from 3.14 on.
class GilReleased {
 public:
  GilReleased() noexcept : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace transport::python
