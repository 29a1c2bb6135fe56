// Copies, checksums, slot keys, and Event.
#include <nanobind/stl/string.h>

#include <cstring>
#include <mutex>
#include <optional>

#include "bindings/ring_bindings.hpp"
#include "common/checksum.hpp"
#include "common/copy.hpp"
#include "common/event_file.hpp"
#include "common/siphash.hpp"
#include "common/tree_check.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

class GilReleaseIfLarge {
 public:
  explicit GilReleaseIfLarge(std::size_t bytes) {
    if (bytes >= kReleaseGilBytes) release_.emplace();
  }

 private:
  std::optional<GilReleased> release_;
};

void check_same_size(const BufferView& destination, const BufferView& source) {
  if (destination.size() != source.size())
    fail(Fault::argument, std::to_string(source.size()) + " bytes into " + std::to_string(destination.size()));
}

void copy_buffers(nb::handle destination, nb::handle source) {
  const BufferView to(destination, true), from(source, false);
  check_same_size(to, from);
  const GilReleaseIfLarge release(to.size());
  copy_bytes(to.data(), from.data(), to.size());
}

std::uint64_t checksum_of(nb::handle data) {
  const BufferView view(data, false);
  const GilReleaseIfLarge release(view.size());
  return checksum(view.data(), view.size());
}

nb::object check_tree(nb::handle data, unsigned most_depth, std::uint64_t most_values) {
  const BufferView view(data, false);
  TreeCheck check(reinterpret_cast<const std::uint8_t*>(view.data()), view.size(), most_depth, most_values);
  const char* const wrong = check.run();
  return wrong == nullptr ? nb::none() : nb::object(nb::str(wrong));
}

std::uint64_t key_of(nb::bytes secret, std::uint32_t slot, std::uint32_t generation) {
  std::array<std::uint8_t, 16> key;
  if (secret.size() != key.size()) fail(Fault::argument, "a ring's secret has 16 bytes");
  std::memcpy(key.data(), secret.c_str(), key.size());
  return slot_key(key, slot, generation);
}

// The mutex is taken after the GIL was released and given back before it is taken again: a thread that
// waits for it may hold the GIL, the one that has it never waits for the GIL.
class PyChecksum {
 public:
  void update(nb::handle data) {
    const BufferView view(data, false);
    const GilReleaseIfLarge release(view.size());
    const std::lock_guard hold(mutex_);
    checksum_.update(view.data(), view.size());
  }
  void copy(nb::handle destination, nb::handle source) {
    const BufferView to(destination, true), from(source, false);
    check_same_size(to, from);
    if (overlap(to.data(), from.data(), to.size())) fail(Fault::argument, "destination and source overlap");
    const GilReleaseIfLarge release(to.size());
    const std::lock_guard hold(mutex_);
    copy_and_update(checksum_, to.data(), from.data(), to.size());
  }
  std::uint64_t digest() {
    const std::lock_guard hold(mutex_);
    return checksum_.digest();
  }

 private:
  std::mutex mutex_;
  Checksum checksum_;
};

class PyEvent {
 public:
  explicit PyEvent(const std::string& path) : file_(std::make_shared<EventFile>(path)) {}
  std::uint32_t value() const { return seen(open().word()); }
  void advance() const { transport::advance(open().word()); }
  bool wait(std::uint32_t before, double timeout_s) const {
    const Deadline deadline(timeout_s);
    const std::shared_ptr<EventFile> file = file_;  // close() in another thread does not unmap under us
    do {
      open();
      if (sleep_without_gil(file->word(), before, deadline)) return true;
    } while (deadline.left_ns() > 0);
    return false;
  }
  void close() { file_.reset(); }

 private:
  const EventFile& open() const {
    if (!file_) fail(Fault::detached, "the event is closed");
    return *file_;
  }
  std::shared_ptr<EventFile> file_;
};

}  // namespace

void bind_bytes(nb::module_& module) {
  module.def("copy", copy_buffers, "destination"_a, "source"_a,
             "Contiguous bytes to contiguous bytes of the same length.");
  module.def("checksum", checksum_of, "data"_a, "XXH3, 64 bits.");
  module.def("check_tree", check_tree, "data"_a, "most_depth"_a, "most_values"_a,
             "What is wrong with these bytes as a MessagePack tree; None: nothing.");
  module.def("slot_key", key_of, "secret"_a, "slot"_a, "generation"_a, "SipHash-2-4 of slot and generation.");

  nb::class_<PyChecksum>(module, "Checksum", nb::is_final(), "XXH3 over several pieces.")
      .def(nb::init<>())
      .def("update", &PyChecksum::update, "data"_a)
      .def("copy", &PyChecksum::copy, "destination"_a, "source"_a, "Copy and hash in one pass over memory.")
      .def("digest", &PyChecksum::digest);

  nb::class_<PyEvent>(module, "Event", nb::is_final(), "A futex counter in the first 4 bytes of a file, mapped shared.")
      .def(nb::init<const std::string&>(), "path"_a)
      .def("value", &PyEvent::value)
      .def("advance", &PyEvent::advance, "Add one and wake every waiter.")
      .def("wait", &PyEvent::wait, "seen"_a, "timeout_s"_a)
      .def("close", &PyEvent::close);
}

}  // namespace transport::python
