// The Python module `transport._ring`; transport/_ring.pyi is its interface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include "bindings/faults.hpp"
#include "bindings/ring_bindings.hpp"
#include "common/error.hpp"
#include "ring/ring.hpp"
#include "ucp/frames.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

// A fault as Python sees it: the class of transport/errors.py, and what the caller can do, behind the message.
struct Named {
  Fault code;
  const char* error;
  const char* remedy = "";
  const char* remedy_of_new_file = "";
};
constexpr Named kNamed[] = {
    {Fault::exists, "RingBusyError", "; stop it, or give another name",
     "; stop it: one writer at a time has a ring's file"},
    {Fault::not_found, "RingNotFoundError"},
    {Fault::layout, "LayoutError", "",
     "; start with the same slots, sizes and schema to go on with what is unread in it, or give another file. Nothing "
     "of it was changed"},
    {Fault::not_ready, "RingNotFoundError", "; its writer is making it, or was killed meanwhile"},
    {Fault::no_owner, "NoOwnerError"},
    {Fault::no_memory, "SharedMemoryError",
     "; take fewer or smaller slots, remove dead rings with `transport reclaim`, or make /dev/shm larger",
     "; take fewer or smaller slots, or a file on another file system"},
    {Fault::denied, "SharedMemoryError", "; run as its user, or give another name"},
    {Fault::system, "RingError"},
    {Fault::detached, "ClosedError"},
    {Fault::argument, "UsageError"},
};

static_assert([] {
  for (std::size_t at = 0; at < std::size(kNamed); ++at)
    if (static_cast<std::size_t>(kNamed[at].code) != at + 1) return false;
  return true;
}(), "one for each fault, in their order");

std::array<PyObject*, std::size(kNamed)> error_types{};  // references that the module's end does not give back

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const RingFault& fault) {
    const auto at = static_cast<std::size_t>(fault.code()) - 1;
    const Named& named = kNamed[at];
    const std::string message = fault.what() + std::string(fault.of_new_file ? named.remedy_of_new_file : named.remedy);
    PyErr_SetString(error_types[at], message.c_str());
  }
}

void bind_faults() {
  const nb::module_ errors = nb::module_::import_("transport.errors");
  for (std::size_t at = 0; at < std::size(kNamed); ++at)
    error_types[at] = nb::object(errors.attr(kNamed[at].error)).release().ptr();
  nb::register_exception_translator(translate);
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
  bind_faults();
  bind_constants(module);
  bind_fault_points(module);
  bind_bytes(module);
  bind_blocks(module);
  bind_ring(module);
  bind_writes(module);
  bind_batches(module);
  bind_dropped(module);
}
