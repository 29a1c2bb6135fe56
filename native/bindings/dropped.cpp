// Claims that an object of this process owns and a connection holds: what nothing became of is noted when the object
// goes, and the loop of the connection gives it back. No code of Python runs, so no interrupt can come between.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <sys/eventfd.h>
#include <unistd.h>

#include "bindings/ring_bindings.hpp"

namespace transport::python {

using namespace nb::literals;

namespace {

struct Dropped {
  std::uint64_t number;
  std::uint32_t begin, end;
};

// Shared by the list and by every owner, whichever goes last. A forked child neither locks nor signals.
class Shared {
 public:
  Shared() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), process_(getpid()) {
    if (fd_ < 0) fail_errno(errno, "make", "an eventfd");
  }
  ~Shared() { close(); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  int fd() const { return fd_; }
  void close() noexcept {
    if (getpid() != process_) {  // the lock may be held for ever, and the descriptor is this process's own
      if (fd_ >= 0) ::close(std::exchange(fd_, -1));
      return;
    }
    const std::lock_guard<std::mutex> hold(lock_);
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    dropped_.clear();
  }
  void add(const Dropped& dropped) noexcept {
    if (getpid() != process_) return;
    try {
      const std::lock_guard<std::mutex> hold(lock_);
      if (fd_ < 0) return;
      if (dropped_.empty()) {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);  // fails only where it is readable already
      }
      dropped_.push_back(dropped);
    } catch (const std::exception&) {  // no memory: the claims end with their connection
    }
  }
  std::vector<Dropped> take() {
    const std::lock_guard<std::mutex> hold(lock_);
    if (fd_ < 0) return {};
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(fd_, &count, sizeof count);
    return std::exchange(dropped_, {});
  }

 private:
  int fd_;
  pid_t process_;
  std::mutex lock_;
  std::vector<Dropped> dropped_;
};

// Positions begin..end of what has this number.
class OwnedClaims {
 public:
  OwnedClaims(std::shared_ptr<Shared> shared, std::uint64_t number, std::uint32_t begin, std::uint32_t end)
      : shared_(std::move(shared)), number_(number), begin_(begin), end_(end) {}
  OwnedClaims(OwnedClaims&& other) noexcept
      : shared_(std::move(other.shared_)), number_(other.number_), begin_(other.begin_),
        end_(std::exchange(other.end_, other.begin_)) {}
  ~OwnedClaims() {
    if (begin_ < end_) shared_->add({number_, begin_, end_});
  }

  std::uint32_t begin() const { return begin_; }
  std::uint32_t size() const { return end_ - begin_; }
  OwnedClaims take(std::uint32_t count) {
    const std::uint32_t from = begin_;
    begin_ += std::min(count, size());
    return {shared_, number_, from, begin_};
  }
  void settled() { end_ = begin_; }

 private:
  std::shared_ptr<Shared> shared_;
  std::uint64_t number_;
  std::uint32_t begin_, end_;
};

class DroppedClaims {
 public:
  DroppedClaims() : shared_(std::make_shared<Shared>()) {}
  int fileno() const { return shared_->fd(); }
  void close() { shared_->close(); }
  OwnedClaims owned(std::uint64_t number, std::uint32_t count) { return {shared_, number, 0, count}; }
  nb::list take() {
    nb::list all;
    for (const Dropped& each : shared_->take()) all.append(nb::make_tuple(each.number, each.begin, each.end));
    return all;
  }

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace

void bind_dropped(nb::module_& module) {
  nb::class_<OwnedClaims>(module, "OwnedClaims", nb::is_final(), "Claims that go back with this object.")
      .def_prop_ro("begin", &OwnedClaims::begin)
      .def("__len__", &OwnedClaims::size)
      .def("__bool__", [](const OwnedClaims& owned) { return owned.size() > 0; })
      .def("take", &OwnedClaims::take, "count"_a)
      .def("settled", &OwnedClaims::settled);
  nb::class_<DroppedClaims>(module, "DroppedClaims", nb::is_final(), "Claims whose owners have gone.")
      .def(nb::init<>())
      .def("fileno", &DroppedClaims::fileno)
      .def("close", &DroppedClaims::close)
      .def("owned", &DroppedClaims::owned, "number"_a, "count"_a)
      .def("take", &DroppedClaims::take);
}

}  // namespace transport::python
