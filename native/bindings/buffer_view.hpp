#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace transport::python {

namespace nb = nanobind;

// Contiguous memory of any object with the buffer protocol, for as long as this lives; dies with the GIL held.
class BufferView {
 public:
  BufferView(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace transport::python
