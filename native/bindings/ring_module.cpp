// The Python module `transport._ring`; transport/_ring.pyi is its interface.
#include <nanobind/nanobind.h>
#include <nanobind/eval.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/faults.hpp"
#include "bindings/ring_bindings.hpp"
#include "common/error.hpp"
#include "ring/ring.hpp"
#include "ucp/frames.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

PyObject* ring_fault_type = nullptr;

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const RingFault& fault) {
    const nb::object arguments = nb::make_tuple(static_cast<int>(fault.code()), fault.what());
    PyErr_SetObject(ring_fault_type, arguments.ptr());
  }
}

void bind_faults(nb::module_& module) {
  nb::dict members;
  members["code"] = nb::eval("property(lambda self: self.args[0])");
  members["message"] = nb::eval("property(lambda self: self.args[1])");
  members["__str__"] = nb::eval("lambda self: str(self.args[-1]) if self.args else ''");
  ring_fault_type =
      PyErr_NewExceptionWithDoc("transport._ring.RingFault",
                                "args = (code, message); code is one of the FAULT_ names.", nullptr, members.ptr());
  if (ring_fault_type == nullptr) throw nb::python_error();
  module.attr("RingFault") = nb::borrow(ring_fault_type);
  nb::register_exception_translator(translate);

  const std::pair<const char*, Fault> codes[] = {
      {"FAULT_EXISTS", Fault::exists},     {"FAULT_NOT_FOUND", Fault::not_found},
      {"FAULT_LAYOUT", Fault::layout},     {"FAULT_NOT_READY", Fault::not_ready},
      {"FAULT_NO_OWNER", Fault::no_owner}, {"FAULT_NO_MEMORY", Fault::no_memory},
      {"FAULT_DENIED", Fault::denied},     {"FAULT_SYSTEM", Fault::system},
      {"FAULT_DETACHED", Fault::detached}, {"FAULT_ARGUMENT", Fault::argument}};
  for (const auto& [name, code] : codes) module.attr(name) = static_cast<int>(code);
}

void bind_constants(nb::module_& module) {
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("WIRE_VERSION") = ucp::kVersion;
  module.attr("MAX_READERS") = kMaxReaders;
  module.attr("MAX_OWNERS") = kMaxOwners;
  module.attr("MAX_PORTS") = kMaxPorts;
  module.attr("NOTE_CAPACITY") = kNoteCapacity;
  module.attr("MAX_SCHEMA") = kSchemaCapacity;

  nb::list taken;  // here, since rows are also made and read where UCX is not loaded
  for (const ucp::Field& field : ucp::kTakenFields)
    taken.append(nb::make_tuple(field.name, (field.is_signed ? "<i" : "<u") + std::to_string(field.bytes)));
  module.attr("TAKEN_FIELDS") = nb::tuple(taken);

  const std::pair<const char*, State> states[] = {
      {"FREE", State::free}, {"WRITING", State::writing}, {"READY", State::ready}, {"READING", State::reading}};
  for (const auto& [name, state] : states) module.attr(name) = static_cast<int>(state);

  const std::pair<const char*, Role> roles[] = {{"ROLE_OBSERVER", Role::observer},
                                                {"ROLE_WRITER", Role::writer},
                                                {"ROLE_LISTENER", Role::listener},
                                                {"ROLE_READER", Role::reader}};
  for (const auto& [name, role] : roles) module.attr(name) = static_cast<int>(role);

  module.attr("PIN_OK") = static_cast<int>(PinAnswer::ok);
  const std::pair<const char*, ReadAnswer> answers[] = {{"READ_DONE", ReadAnswer::done},
                                                        {"READ_WRONG_KEY", ReadAnswer::wrong_key},
                                                        {"READ_EXPIRED", ReadAnswer::expired},
                                                        {"READ_OTHER_LENGTH", ReadAnswer::other_length}};
  for (const auto& [name, answer] : answers) module.attr(name) = static_cast<int>(answer);
}

}  // namespace
}  // namespace transport::python

NB_MODULE(_ring, module) {
  using namespace transport::python;
  nb::set_leak_warnings(false);  // a ring that is open at exit is given up by the kernel, which is no leak
  module.doc() =
      "The native core: ring operations, large copies, checksum, pooled memory, and a futex on shared memory.";
  bind_faults(module);
  bind_constants(module);
  bind_fault_points(module);
  bind_bytes(module);
  bind_blocks(module);
  bind_ring(module);
  bind_views(module);
  bind_writes(module);
  bind_batches(module);
  bind_dropped(module);
}
