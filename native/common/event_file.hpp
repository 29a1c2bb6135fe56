// An event counter in the first bytes of a file, for processes that share a directory and no ring.
#pragma once

#include <cerrno>
#include <memory>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/error.hpp"
#include "common/futex.hpp"

namespace transport {

// The mapped counter. The file's memory is reserved, so that touching it cannot fail later.
class EventFile {
 public:
  explicit EventFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) fail_errno(errno, "open", path);
    struct stat status {};
    int error = fstat(fd, &status) == 0 ? 0 : errno;
    // Never shrinks, so processes that have mapped it are not affected.
    if (error == 0 && status.st_size < static_cast<off_t>(sizeof(EventWord)))
      error = posix_fallocate(fd, 0, sizeof(EventWord));
    void* memory = MAP_FAILED;
    if (error == 0) {
      memory = mmap(nullptr, sizeof(EventWord), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (memory == MAP_FAILED) error = errno;
    }
    ::close(fd);
    if (error != 0) fail_errno(error, "map", path);
    word_ = static_cast<EventWord*>(memory);
  }
  ~EventFile() { munmap(word_, sizeof(EventWord)); }
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  EventWord& word() const { return *word_; }

 private:
  EventWord* word_;
};

}  // namespace transport
