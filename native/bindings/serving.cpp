// Service and Connection for transport/server/listener.py.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/ucp_bindings.hpp"
#include "common/clock.hpp"
#include "ucp/serving.hpp"

namespace transport::ucp::python {

using namespace nb::literals;

namespace {

// Arguments of a `new_`, which has the class in front of them.
constexpr std::size_t kFirst = 2, kSecond = 3;

std::shared_ptr<Connection> open(std::shared_ptr<Service> service, std::shared_ptr<Endpoint> endpoint,
                                 std::uint32_t tag_base, std::uint32_t client_base,
                                 nb::handle ended, double lease_s, bool takes) {
  return Connection::open(std::move(service), std::move(endpoint), tag_base, client_base,
                          duration_ns(lease_s), takes, own(ended));
}

}  // namespace

void bind_serving(nb::module_& module) {
  module.attr("END_GARBAGE") = static_cast<long>(End::garbage);
  module.attr("END_INTERNAL") = static_cast<long>(End::internal);

  nb::class_<Service>(module, "Service", nb::is_final(), "State shared by the connections of one listener.")
      .def(nb::new_([](Engine& engine, Ring& ring, std::uint64_t inline_limit, double slowest_rate,
                       std::size_t most_reads, std::size_t most_unsent, std::uint32_t numbers) {
             return std::make_shared<Service>(engine, ring,
                                              Limits{inline_limit, slowest_rate, most_reads, most_unsent, numbers});
           }),
           "engine"_a, "ring"_a, nb::kw_only(), "inline_limit"_a, "slowest_rate"_a, "most_reads"_a, "most_unsent"_a,
           "numbers"_a, nb::keep_alive<0, kSecond>())
      .def("register_payloads", &Service::register_payloads, nb::call_guard<GilReleased>(),
           "Register the ring's payloads as a whole, so that no read registers any.")
      .def_rw("draining", &Service::draining, "While set, reads are refused: the listener is busy.")
      .def_prop_ro("inline_limit", &Service::inline_limit)
      .def_prop_ro("attempts", &Service::attempts)
      .def_prop_ro("waiting", &Service::waiting)
      .def_prop_ro("demand_descriptor", &Service::demand_descriptor)
      .def("look", &Service::look, nb::call_guard<GilReleased>(),
           "Answer demands that have waited for what is published now, or long enough.")
      .def("dismiss", &Service::dismiss, nb::call_guard<GilReleased>(),
           "Tell all who wait that the listener is busy.")
      .def("watch_no_more", &Service::watch_no_more, nb::call_guard<GilReleased>(),
           "End the thread that waits for what is published, and the descriptor.")
      .def(
          "when_quiet", [](Service& service, nb::handle future) { service.when_quiet(own(future)); }, "future"_a,
          "Resolve the future as soon as no attempt is active.");

  nb::class_<Connection>(module, "Connection", nb::is_final(), "A client's connection after WELCOME.")
      .def(nb::new_(&open), "service"_a, "endpoint"_a, "tag_base"_a, "client_base"_a,
           "ended"_a, "lease_s"_a = 0.0, "takes"_a = false,
           nb::keep_alive<0, kFirst>())
      .def_prop_ro("last_active", &Connection::last_active)
      .def_prop_ro("attempts", &Connection::attempts)
      .def_prop_ro("unsent", &Connection::unsent)
      .def_prop_ro("waiting", &Connection::waiting)
      .def_prop_ro("reason", &Connection::reason)
      .def(
          "count_as",
          [](Connection& connection, const std::string& name) {
            connection.count_as(counter_named(name));
          },
          "counter"_a, "Count the bytes of its payloads under this name, such as bytes_shm.")
      .def("end_consumed", &Connection::end_consumed, nb::call_guard<GilReleased>())
      .def("expire", &Connection::expire, "before"_a, nb::call_guard<GilReleased>())
      .def("close", &Connection::close, nb::call_guard<GilReleased>())
      .def("part", &Connection::part, nb::kw_only(), "again"_a);
}

}  // namespace transport::ucp::python
