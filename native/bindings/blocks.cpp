// BlockPool, Block, and a read-only look at one.
#include <nanobind/stl/shared_ptr.h>

#include <new>

#include "bindings/ring_bindings.hpp"
#include "common/block_pool.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

// Every export holds the object, so its memory goes back when the last reference and the last view are gone.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto* block = nb::inst_ptr<Block>(self);
  return PyBuffer_FillInfo(view, self, block->data(), static_cast<Py_ssize_t>(block->size()), 0, flags);
}
Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(nb::inst_ptr<Block>(self)->size()); }

PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                             {Py_sq_length, reinterpret_cast<void*>(length)},
                             {0, nullptr}};

// What exports a block's memory read-only. A read-only memoryview will not do: numpy looks through it at what it is a
// view of, and would let the array be made writable again.
struct BlockView {
  nb::object keep;  // the Block
  const Block* block;

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Block& block = *nb::inst_ptr<BlockView>(self)->block;
    return PyBuffer_FillInfo(view, self, block.data(), static_cast<Py_ssize_t>(block.size()), 1, flags);
  }
  static Py_ssize_t length(PyObject* self) {
    return static_cast<Py_ssize_t>(nb::inst_ptr<BlockView>(self)->block->size());
  }
};
PyType_Slot block_view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(BlockView::get_buffer)},
                                  {Py_sq_length, reinterpret_cast<void*>(BlockView::length)},
                                  {0, nullptr}};

Block take(const std::shared_ptr<BlockPool>& pool, std::size_t size) {
  Block block(pool, size);
  if (block.data() == nullptr) throw std::bad_alloc();
  return block;
}

std::size_t class_of(std::size_t size) {
  if (size > size_class::kLargest) throw std::bad_alloc();
  return size_class::bytes(size_class::index(size));
}

}  // namespace

void bind_blocks(nb::module_& module) {
  nb::class_<Block>(module, "Block", nb::is_final(), nb::is_weak_referenceable(), nb::type_slots(block_slots),
                    "Writable bytes, returned to their pool with the last reference.")
      .def_prop_ro("address", [](const Block& block) { return reinterpret_cast<std::uintptr_t>(block.data()); })
      .def("read_only",
           [](nb::handle_t<Block> self) {
             return BlockView{nb::borrow(self), nb::inst_ptr<Block>(self)};
           })
      .def("__repr__", [](const Block& block) { return nb::str("<Block {} bytes>").format(block.size()); });

  nb::class_<BlockView>(module, "BlockView", nb::is_final(), nb::type_slots(block_view_slots),
                        "The same bytes, read-only.");

  nb::class_<BlockPool>(module, "BufferPool", nb::is_final(), "Host memory by size class, bounded while idle.")
      .def(nb::init<std::size_t>(), "most_idle_bytes"_a = std::size_t{1} << 30)
      .def("take", take, "size"_a)
      .def("clear", &BlockPool::clear)
      .def_prop_ro("idle_bytes", &BlockPool::idle_bytes)
      .def_prop_ro("lent", &BlockPool::lent)
      .def("__repr__", [](const BlockPool& pool) {
        return nb::str("<BufferPool {} lent, {} bytes idle>").format(pool.lent(), pool.idle_bytes());
      });

  module.def("size_class", class_of, "size"_a, "Bytes that are allocated for `size`.");
}

}  // namespace transport::python
