// Fault points as Python sees them, in each module that has any. The installed build says that it has none, and no more.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "common/error.hpp"
#include "common/fault.hpp"

namespace transport::python {

#ifdef TRANSPORT_FAULT_POINTS
inline void set_fault(const std::string& point, int signal, std::int64_t after) {
  const auto found = std::find(fault::kPoints.begin(), fault::kPoints.end(), point);
  if (found == fault::kPoints.end()) fail(Fault::argument, "no fault point is named " + point);
  fault::set(static_cast<std::size_t>(found - fault::kPoints.begin()), signal, after);
}
#endif

inline void bind_fault_points(nanobind::module_& module) {
  nanobind::list points;
#ifdef TRANSPORT_FAULT_POINTS
  for (const auto point : fault::kPoints) points.append(nanobind::str(point.data(), point.size()));
  module.def("set_fault", set_fault, nanobind::arg("point"), nanobind::arg("signal"), nanobind::arg("after") = 0);
  module.def("report_faults", [](int descriptor) { fault::report_to.store(descriptor); }, nanobind::arg("descriptor"));
#endif
  module.attr("FAULT_POINTS") = nanobind::tuple(points);
}

}  // namespace transport::python
