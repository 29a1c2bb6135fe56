// transport._ucp: what needs libucp. Loaded after the library itself (transport/wire/library.py), so that one libucp serves
// ucxx and this; hence no rpath.
#include "bindings/faults.hpp"
#include "bindings/ucp_bindings.hpp"

NB_MODULE(_ucp, module) {
  using namespace transport::ucp::python;
  nb::set_leak_warnings(false);  // a worker that is open at exit is no leak
  module.doc() = "The native hot loop of client and listener, over the UCX library that ucxx has loaded.";
  nb::module_::import_("transport._ring");  // the type Ring
  bind_engine(module);
  bind_reading(module);
  bind_serving(module);
#ifdef TRANSPORT_FAULT_POINTS
  transport::python::bind_fault_points(module);
#endif
}
