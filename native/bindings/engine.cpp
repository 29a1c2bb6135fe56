// Engine, endpoints and listeners for transport/wire/ucx.py.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/ucp_bindings.hpp"

namespace transport::ucp::python {

using namespace nb::literals;

Place Place::of(nb::handle object, bool writable) {
  if (PyTuple_CheckExact(object.ptr())) {
    const auto place = nb::borrow<nb::tuple>(object);
    if (place.size() != 3) throw nb::value_error("memory is a buffer, or (address, bytes, object that keeps it)");
    auto keep = std::make_shared<nb::object>(nb::borrow(place[2]));
    return {reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(place[0])), nb::cast<std::size_t>(place[1]),
            UCS_MEMORY_TYPE_UNKNOWN, std::move(keep)};
  }
  auto memory = std::make_shared<BufferView>(object, writable);
  std::byte* const data = memory->data();
  const std::size_t size = memory->size();
  return {data, size, UCS_MEMORY_TYPE_HOST, std::move(memory)};
}

namespace {

// The engine as Python holds it: it keeps the object that owns the worker, and gives references back.
class PyEngine final : public Engine {
 public:
  PyEngine(std::uintptr_t context, std::uintptr_t worker, nb::object owner)
      : Engine(reinterpret_cast<ucp_context_h>(context), reinterpret_cast<ucp_worker_h>(worker)),
        owner_(std::move(owner)) {}
  ~PyEngine() override {
    if (!closed()) {
      const GilReleased release;  // as `close` below
      close();
    }
    let_go();
    hand_over();
  }

  nb::list hand_over() {
    take_garbage();
    nb::list handed;
    for (Event& event : take_events()) {
      auto* const object = static_cast<PyObject*>(event.token);
      const nb::object token = event.of_listener ? nb::borrow(object) : nb::steal(object);
      if (event.outcomes)
        handed.append(nb::make_tuple(token, nb::cast(*event.outcomes)));
      else if (event.outcome < 0)
        handed.append(nb::make_tuple(token, nb::make_tuple(event.outcome, event.endpoint ? event.endpoint->peer() : "")));
      else if (event.of_listener)
        handed.append(nb::make_tuple(token, nb::cast(event.endpoint)));
      else
        handed.append(nb::make_tuple(token, event.outcome));
    }
    return handed;
  }

  // In a forked child the worker is left to the end of the process: destroying it would reach into the parent's.
  void let_go() {
    if (foreign())
      owner_.release();
    else
      owner_.reset();
  }

 private:
  nb::object owner_;
};

nb::list drive(PyEngine& engine, double spin_s) {
  {
    const GilReleased release;
    engine.drive(static_cast<std::int64_t>(spin_s * 1e9));
  }
  return engine.hand_over();
}

nb::list collect(PyEngine& engine) {
  engine.settle();
  return engine.hand_over();
}

nb::list close(PyEngine& engine) {
  {
    const GilReleased release;  // it may wait for UCX's own thread
    engine.close();
  }
  engine.let_go();
  return engine.hand_over();
}

// Tells the future that was passed when the request has come to an end.
void tell(void* self, std::uint32_t, ucs_status_t status, std::size_t);

struct Told {
  std::shared_ptr<Endpoint> endpoint;
  void* token;
};

Waiter waiter(const std::shared_ptr<Endpoint>& endpoint, nb::handle token) {
  return {&tell, new Told{endpoint, own(token)}};
}

void tell(void* self, std::uint32_t, ucs_status_t status, std::size_t) {
  const std::unique_ptr<Told> told(static_cast<Told*>(self));
  Endpoint& endpoint = *told->endpoint;
  const ucs_status_t seen = endpoint.failure();
  if (status == UCS_ERR_CANCELED && seen != UCS_OK) status = seen;
  endpoint.engine().emit({told->token, status, nullptr, status == UCS_OK ? nullptr : told->endpoint});
}

void send(const std::shared_ptr<Endpoint>& endpoint, nb::handle token, nb::handle memory, std::uint64_t tag) {
  Place place = Place::of(memory, false);
  endpoint->send(place.data, place.size, tag, waiter(endpoint, token), std::move(place.keep), place.memory);
  endpoint->engine().expect_soon();
}

void receive(const std::shared_ptr<Endpoint>& endpoint, nb::handle token, nb::handle memory, std::uint64_t tag) {
  Place place = Place::of(memory, true);
  endpoint->receive(place.data, place.size, tag, waiter(endpoint, token), std::move(place.keep), place.memory);
}

void abort_endpoint(Endpoint& endpoint) {
  const GilReleased release;
  endpoint.abort();
}

class PyListener final {
 public:
  PyListener(PyEngine& engine, const std::string& address, std::uint16_t port, std::size_t most, nb::object arrived)
      : arrived_(std::move(arrived)), listener_(engine, address, port, most, arrived_.ptr()) {}
  std::uint16_t port() const { return listener_.port(); }
  bool end_strangers(double patience_s) {
    const GilReleased release;
    return listener_.end_strangers(static_cast<std::int64_t>(patience_s * 1e9));
  }
  bool shut() const { return listener_.shut(); }
  void close() {
    listener_.close();
    arrived_.reset();  // mostly a method of what holds this: no collector sees that circle
  }

 private:
  nb::object arrived_;
  Listener listener_;
};

PyObject* fault_type = nullptr;

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const UcxFault& fault) {
    const nb::tuple arguments = nb::make_tuple(static_cast<int>(fault.status()), fault.what());
    PyErr_SetObject(fault_type, arguments.ptr());
  }
}

}  // namespace

void bind_engine(nb::module_& module) {
  fault_type = PyErr_NewExceptionWithDoc("transport._ucp.UcxFault", "args = (status, message)", nullptr, nullptr);
  if (fault_type == nullptr) throw nb::python_error();
  module.attr("UcxFault") = nb::borrow(fault_type);
  nb::register_exception_translator(translate);
  const std::pair<const char*, ucs_status_t> statuses[] = {
      {"ERR_BUSY", UCS_ERR_BUSY},
      {"ERR_NO_DEVICE", UCS_ERR_NO_DEVICE},
      {"ERR_UNREACHABLE", UCS_ERR_UNREACHABLE},
      {"ERR_NOT_CONNECTED", UCS_ERR_NOT_CONNECTED},
      {"ERR_REJECTED", UCS_ERR_REJECTED},
      {"ERR_INVALID_PARAM", UCS_ERR_INVALID_PARAM},
      {"ERR_INVALID_ADDR", UCS_ERR_INVALID_ADDR},
      {"ERR_CANCELED", UCS_ERR_CANCELED},
      {"ERR_CONNECTION_RESET", UCS_ERR_CONNECTION_RESET},
  };
  for (const auto& [name, status] : statuses) module.attr(name) = static_cast<int>(status);
  module.def("knows_cuda_memory", [](std::uintptr_t context) {
    ucp_context_attr_t attributes{};
    attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    const ucs_status_t status = ucp_context_query(reinterpret_cast<ucp_context_h>(context), &attributes);
    return status == UCS_OK && (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  }, "context"_a);
  module.def("status_text", [](int status) { return std::string(ucs_status_string(static_cast<ucs_status_t>(status))); });

  nb::class_<Engine>(module, "_Engine");
  nb::class_<PyEngine, Engine>(module, "Engine", nb::is_final(), "One UCX worker, driven from one event loop.")
      .def(nb::new_([](std::uintptr_t context, std::uintptr_t worker, nb::object owner) {
             return std::make_shared<PyEngine>(context, worker, std::move(owner));
           }),
           "context"_a, "worker"_a, "owner"_a)
      .def_prop_ro("descriptor", &Engine::descriptor)
      .def_prop_ro("abandoned", &Engine::abandoned)
      .def_prop_ro("requests", [](const Engine& engine) {
        std::size_t sum = 0;
        for (const Endpoint* endpoint : engine.endpoints()) sum += endpoint->under_way();
        return sum;
      })
      .def_prop_ro("closed", &Engine::closed)
      .def_prop_ro("armed", &Engine::armed)
      .def_prop_ro("dropped", &Engine::dropped, "Messages that matched no posted receive.")
      .def(
          "drop_unexpected",
          [](PyEngine& engine) { engine.sort_unexpected = [](auto...) { return false; }; },
          "From now on drop messages that match no posted receive.")
      .def("drive", drive, "spin_s"_a)
      .def("collect", collect)
      .def("close", close);

  nb::class_<Endpoint>(module, "Endpoint", nb::is_final(), "One connection.")
      .def_static(
          "connect",
          [](PyEngine& engine, const std::string& address, std::uint16_t port) {
            return Endpoint::connect(engine, address, port);
          },
          "engine"_a, "address"_a, "port"_a)
      .def_prop_ro("peer", &Endpoint::peer)
      .def_prop_ro("open", &Endpoint::open)
      .def_prop_ro("alive", &Endpoint::alive)
      .def_prop_ro("failure", [](const Endpoint& endpoint) { return static_cast<int>(endpoint.failure()); })
      .def_prop_ro("refused", &Endpoint::refused)
      .def_prop_ro("under_way", &Endpoint::under_way)
      .def("send", send, "token"_a, "memory"_a, "tag"_a)
      .def("receive", receive, "token"_a, "memory"_a, "tag"_a)
      .def(
          "send_stream",
          [](const std::shared_ptr<Endpoint>& endpoint, nb::handle token, nb::handle memory) {
            Place place = Place::of(memory, false);
            endpoint->send_stream(place.data, place.size, waiter(endpoint, token), std::move(place.keep));
          },
          "token"_a, "memory"_a)
      .def(
          "receive_stream",
          [](const std::shared_ptr<Endpoint>& endpoint, nb::handle token, nb::handle memory) {
            Place place = Place::of(memory, true);
            endpoint->receive_stream(place.data, place.size, waiter(endpoint, token), std::move(place.keep));
          },
          "token"_a, "memory"_a)
      .def("abort", abort_endpoint, "Close at once; on return UCX no longer uses the memory of its requests.")
      .def("probe", &Endpoint::probe, "Whether an empty message, which has no receiver, left without waiting.")
      .def("transports", &Endpoint::transports);

  nb::class_<PyListener>(module, "Listener", nb::is_final(), "A listening port.")
      .def(nb::init<PyEngine&, const std::string&, std::uint16_t, std::size_t, nb::object>(), "engine"_a, "address"_a,
           "port"_a, "most"_a, "arrived"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("port", &PyListener::port)
      .def("end_strangers", &PyListener::end_strangers, "patience_s"_a)
      .def_prop_ro("shut", &PyListener::shut)
      .def("close", &PyListener::close);
}

}  // namespace transport::ucp::python
