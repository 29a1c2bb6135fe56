#include "ring/segment.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/checksum.hpp"
#include "common/clock.hpp"
#include "common/error.hpp"
#include "common/fault.hpp"

namespace transport {

namespace {

class OwnFd {
 public:
  explicit OwnFd(int fd) : fd_(fd) {}
  ~OwnFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  OwnFd(const OwnFd&) = delete;
  OwnFd& operator=(const OwnFd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

constexpr char kSharedMemory[] = "/dev/shm";

// Where the entry of this name leads, if it is a symbolic link.
std::optional<std::string> link_of(const std::string& name) {
  char target[PATH_MAX];
  const ssize_t length = readlink((kSharedMemory + name).c_str(), target, sizeof target);
  if (length < 0) return std::nullopt;
  return std::string(target, static_cast<std::size_t>(length));
}

// The last step of a path is never a link: what another user puts there is not followed.
int open_at(const Place& place, int flags) {
  return ::open(place.path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
}

// Leads to an open file, whether it has a name or not.
std::string this_file(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

}  // namespace

Place Place::in_memory(const std::string& name) { return {kSharedMemory + name, name, false}; }

Place Place::of(const std::string& name) {
  const auto target = link_of(name);
  if (!target) return in_memory(name);
  struct stat link {
  };
  if (lstat((kSharedMemory + name).c_str(), &link) == 0 && link.st_uid != geteuid())
    fail(Fault::denied, name + " belongs to user " + std::to_string(link.st_uid) + ", we are " + std::to_string(geteuid()));
  return in_file(*target);
}

// Every open description of this process, so that a forked child can close what it inherited.
struct OpenDescriptions {
  std::mutex mutex;
  std::vector<Description*> all;

  static OpenDescriptions& instance() {
    // Never destroyed: attachments may outlive the static destructors.
    static OpenDescriptions* const open = [] {
      auto* made = new OpenDescriptions;
      pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                     [] {
                       for (Description* description : instance().all) {
                         ::close(description->fd());
                         description->fd_.store(-1, std::memory_order_relaxed);
                       }
                       instance().all.clear();
                       instance().mutex.unlock();
                     });
      return made;
    }();
    return *open;
  }
};

std::unique_ptr<Description> Description::try_open(const Place& place, int flags) {
  OpenDescriptions& open = OpenDescriptions::instance();
  const std::lock_guard hold(open.mutex);  // no fork between opening and being known
  open.all.reserve(open.all.size() + 1);   // may throw; nothing after open_at but `new` does
  const int fd = open_at(place, flags);
  if (fd < 0) return nullptr;
  std::unique_ptr<Description> description(new Description(fd));
  open.all.push_back(description.get());
  return description;
}

std::unique_ptr<Description> Description::open(const Place& place, int flags) {
  auto description = try_open(place, flags);
  if (!description) fail_errno(errno, "open", place.shown);
  return description;
}

std::unique_ptr<Description> Description::nameless() {
  return try_open(Place::in_memory("/."), O_RDWR | O_TMPFILE);
}

bool Description::enter(const Place& place) const {
  if (linkat(AT_FDCWD, this_file(fd()).c_str(), AT_FDCWD, place.path.c_str(), AT_SYMLINK_FOLLOW) == 0) return true;
  if (errno != EEXIST) fail_errno(errno, "linkat", place.shown);
  return false;
}

Description::~Description() { close(); }

void Description::close() {
  OpenDescriptions& open = OpenDescriptions::instance();
  const std::lock_guard hold(open.mutex);
  const int fd = fd_.exchange(-1, std::memory_order_relaxed);
  if (fd < 0) return;
  std::erase(open.all, this);
  // A child between fork and exec may still share the description: give the locks up by name.
  unlock(fd, kKeeperByte, kLockBytes);
  ::close(fd);
}

int Description::reopen(int flags) const { return ::open(this_file(fd()).c_str(), flags | O_CLOEXEC); }

bool Description::is(const Description& other) const {
  struct stat mine {
  }, theirs{};
  if (fstat(fd(), &mine) != 0 || fstat(other.fd(), &theirs) != 0) fail_errno(errno, "fstat", "a segment");
  return mine.st_dev == theirs.st_dev && mine.st_ino == theirs.st_ino;
}

bool Description::still_at(const Place& place) const {
  const auto there = try_open(place, O_RDONLY);
  if (!there && errno != ENOENT) fail_errno(errno, "open", place.shown);
  return there && is(*there);
}

bool Geometry::compute(std::uint64_t slot_count, std::uint64_t slot_capacity, std::uint64_t page_bytes, Geometry& out) {
  bool fits = true;
  const auto plus = [&fits](std::uint64_t a, std::uint64_t b) {
    std::uint64_t sum = 0;
    fits = !__builtin_add_overflow(a, b, &sum) && sum >> 62 == 0 && fits;
    return sum;
  };
  const auto times = [&fits](std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    fits = !__builtin_mul_overflow(a, b, &product) && product >> 62 == 0 && fits;
    return product;
  };
  const auto aligned = [&plus](std::uint64_t value, std::uint64_t to) { return plus(value, to - 1) / to * to; };

  out.failure_count = std::clamp(times(slot_count, 2), kLeastFailures, kMostFailures);
  out.owners_offset = kHeaderBytes;
  out.counts_offset = plus(out.owners_offset, (kMaxOwners + 1) * sizeof(OwnerRow));
  out.failures_offset = plus(out.counts_offset, (kMaxOwners + 1) * kMaxReaders * sizeof(RankCounts));
  out.takers_offset = plus(out.failures_offset, out.failure_count * sizeof(FailureEntry));
  out.controls_offset = plus(out.takers_offset, kTakers * sizeof(TakerEntry));
  out.claims_offset = plus(out.controls_offset, times(slot_count, sizeof(SlotControl)));
  out.hints_offset = plus(out.claims_offset, times(slot_count, sizeof(SlotClaim)));
  out.ready_offset = aligned(plus(out.hints_offset, FreeHints::bytes_for(slot_count)), 64);
  out.notes_offset = aligned(plus(out.ready_offset, ReadyHints::bytes_for(slot_count)), 64);
  out.payload_offset = aligned(plus(out.notes_offset, times(slot_count, kNoteCapacity)), page_bytes);
  out.payload_stride = aligned(slot_capacity, page_bytes);
  out.total_bytes = plus(out.payload_offset, times(slot_count, out.payload_stride));
  return fits;
}

Mapping::Mapping(const Description& description, const Place& place, const Geometry& geometry,
                 bool writable_payload)
    : control_bytes_(geometry.payload_offset),
      payload_bytes_(geometry.total_bytes - geometry.payload_offset),
      writable_(writable_payload) {
  const OwnFd control_fd(description.reopen(O_RDWR));
  // Opened for reading only, the payload cannot be made writable later either.
  const OwnFd payload_fd(description.reopen(writable_payload ? O_RDWR : O_RDONLY));
  if (control_fd.get() < 0 || payload_fd.get() < 0) fail_errno(errno, "open", place.shown);
  void* control = mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd.get(), 0);
  if (control == MAP_FAILED) fail_errno(errno, "mmap", place.shown);
  const int protection = PROT_READ | (writable_payload ? PROT_WRITE : 0);
  const auto offset = static_cast<off_t>(geometry.payload_offset);
  void* payload = mmap(nullptr, payload_bytes_, protection, MAP_SHARED, payload_fd.get(), offset);
  if (payload == MAP_FAILED) {
    const int error = errno;
    munmap(control, control_bytes_);
    fail_errno(error, "mmap", place.shown);
  }
  control_ = static_cast<std::byte*>(control);
  payload_ = static_cast<std::byte*>(payload);
}

void Mapping::make_writable(const Description& description, const Place& place) {
  if (writable_) return;
  const OwnFd fd(description.reopen(O_RDWR));
  if (fd.get() < 0) fail_errno(errno, "open", place.shown);
  const auto offset = static_cast<off_t>(control_bytes_);
  if (mmap(payload_, payload_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), offset) == MAP_FAILED)
    fail_errno(errno, "mmap", place.shown);
  writable_ = true;
}

Mapping::~Mapping() {
  munmap(payload_, payload_bytes_);
  munmap(control_, control_bytes_);
}

namespace {

std::uint64_t page_bytes() { return std::max<std::uint64_t>(4096, static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))); }

constexpr std::string_view kPrefix = kNamePrefix;

bool names_a_ring(std::string_view name) {
  return name.size() > kPrefix.size() && name.size() <= 255 && name.starts_with(kPrefix) &&
         std::all_of(name.begin() + 1, name.end(), [](char c) { return c > ' ' && c < 127 && c != '/'; });
}

void check_name(const std::string& name) {
  if (!names_a_ring(name))
    fail(Fault::argument,
         "a ring is named " + std::string(kPrefix) + "…, printable ASCII without a slash, at most 255 bytes");
}

struct stat checked_stat(const Description& description, const Place& place) {
  struct stat status {};
  if (fstat(description.fd(), &status) != 0) fail_errno(errno, "fstat", place.shown);
  if (status.st_uid != geteuid())
    fail(Fault::denied,
         place.shown + " belongs to user " + std::to_string(status.st_uid) + ", we are " + std::to_string(geteuid()));
  return status;
}

// The beginning of a segment's file, mapped for a look.
class HeaderPage {
 public:
  HeaderPage(const Description& description, const Place& place) {
    const OwnFd fd(description.reopen(O_RDONLY));
    if (fd.get() < 0) fail_errno(errno, "open", place.shown);
    page_ = mmap(nullptr, kHeaderBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (page_ == MAP_FAILED) fail_errno(errno, "mmap", place.shown);
  }
  ~HeaderPage() { munmap(page_, kHeaderBytes); }
  HeaderPage(const HeaderPage&) = delete;
  HeaderPage& operator=(const HeaderPage&) = delete;
  const Header* operator->() const { return static_cast<const Header*>(page_); }
  bool blank() const {
    const auto* bytes = static_cast<const std::byte*>(page_);
    return std::all_of(bytes, bytes + kHeaderBytes, [](std::byte each) { return each == std::byte{0}; });
  }

 private:
  void* page_;
};

// The header of an initialised segment whose sizes agree with each other and with the file.
// not_ready: it is not initialised. layout: it is, but not for us.
Identity read_identity(const Description& description, const Place& place, Geometry& geometry) {
  const struct stat status = checked_stat(description, place);
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  if (file_bytes < kHeaderBytes) fail(Fault::not_ready, place.shown + " has no header yet");

  const HeaderPage header(description, place);
  const auto refuse = [&place](const std::string& what) { fail(Fault::layout, place.shown + ": " + what); };
  if (header->initialised.load(std::memory_order_acquire) == 0)  // SYNC I
    fail(Fault::not_ready, place.shown + " is not initialised");
  if (header->magic != kMagic) refuse("magic differs, not a ring");
  if (header->layout_version != kLayoutVersion)
    refuse("its segment has layout version " + std::to_string(header->layout_version) + ", this build knows " +
           std::to_string(kLayoutVersion) + "; processes that share a ring are of one build");
  const Identity identity = header->identity;
  if (identity.page_bytes != page_bytes()) refuse("page size differs");
  if (identity.slot_count == 0 || identity.slot_count > kMaxSlots || identity.slot_capacity == 0 ||
      !Geometry::compute(identity.slot_count, identity.slot_capacity, identity.page_bytes, geometry) ||
      geometry.total_bytes != identity.total_bytes)
    refuse("sizes contradict each other");
  if (geometry.total_bytes != file_bytes)
    refuse("file has " + std::to_string(file_bytes) + " bytes, header says " + std::to_string(geometry.total_bytes));
  if (header->identity_checksum != checksum(&identity, sizeof identity)) refuse("its header is damaged");
  return identity;
}

// Whether a creator that died has left this: then there is nothing to lose. Other files that are no ring may be something
// else of their user's, or what is left of a ring.
bool is_rubbish(const Description& description, const Place& place) {
  const auto file_bytes = static_cast<std::uint64_t>(checked_stat(description, place).st_size);
  if (file_bytes < kHeaderBytes) return file_bytes == 0;
  const HeaderPage header(description, place);
  return header.blank() || (header->magic == kMagic && header->layout_version == kLayoutVersion &&
                            header->initialised.load(std::memory_order_acquire) == 0 &&
                            header->sequence.load(std::memory_order_relaxed) == 0);
}

void sync_entry(const Place& place) {
  const OwnFd folder(::open(place.path.substr(0, place.path.rfind('/') + 1).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0 || fsync(folder.get()) != 0) fail_errno(errno, "fsync", "the folder of " + place.shown);
}

Bytes16 random_bytes() {
  Bytes16 bytes{};
  if (getentropy(bytes.data(), bytes.size()) != 0) fail_errno(errno, "getentropy", "16");
  return bytes;
}

// In pieces, since tmpfs undoes a whole request when a signal arrives: a profiler's timer would never let
// a large one end. What can be seen not to fit is refused before it has taken the memory of all processes.
void reserve_memory(const Description& description, const Place& place, std::uint64_t bytes) {
  struct statvfs space {};
  if (fstatvfs(description.fd(), &space) != 0) fail_errno(errno, "fstatvfs", place.shown);
  const bool limited = space.f_blocks != 0;  // a tmpfs mounted with size=0 is not
  const std::uint64_t free_bytes = limited ? std::uint64_t{space.f_bavail} * space.f_frsize
                                           : static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
  if (bytes > free_bytes)
    fail(Fault::no_memory, place.shown + " needs " + std::to_string(bytes) + " bytes" +
                               (place.file ? "" : " of shared memory") + ", " + std::to_string(free_bytes) + " are free");
  constexpr std::uint64_t kPiece = std::uint64_t{16} << 20;
  for (std::uint64_t at = 0; at < bytes;) {
    const std::uint64_t piece = std::min(kPiece, bytes - at);
    const int error = posix_fallocate(description.fd(), static_cast<off_t>(at), static_cast<off_t>(piece));
    if (error == 0)
      at += piece;
    else if (error != EINTR)
      fail_errno(error, "posix_fallocate", place.shown + ", " + std::to_string(bytes));
  }
}

// `description` is that of a new, empty file, which only this process has locked.
void initialise(Segment& segment, const Identity& identity, Kept kept) {
  FAULT_POINT("create.locked");
  reserve_memory(*segment.description, segment.place, segment.geometry.total_bytes);
  FAULT_POINT("create.allocated");
  segment.mapping = std::make_shared<Mapping>(*segment.description, segment.place, segment.geometry, true);
  segment.identity = identity;
  // The file is zero-filled: slots are FREE in generation 0, owner places vacant, boards empty.
  auto* header = reinterpret_cast<Header*>(segment.mapping->control());
  header->identity = identity;
  header->identity_checksum = checksum(&identity, sizeof identity);
  header->kept.store(kept, std::memory_order_relaxed);
  header->layout_version = kLayoutVersion;
  header->magic = kMagic;
  FreeHints hints(segment.mapping->control() + segment.geometry.hints_offset, identity.slot_count);
  for (std::uint64_t slot = 0; slot < identity.slot_count; ++slot) hints.offer(slot);
  FAULT_POINT("create.header");
  if (kept == Kept::synced) {  // before it counts as a ring, whose size has to be that of its file
    if (fsync(segment.description->fd()) != 0) fail_errno(errno, "fsync", segment.place.shown);
    sync_entry(segment.place);
  }
  header->initialised.store(1, std::memory_order_release);  // SYNC I
}

// At its place from the beginning. False: another process was faster, with a segment or by taking ours for rubbish.
bool make_in_place(Segment& segment, const Identity& identity, Kept kept) {
  const Place& place = segment.place;
  segment.description = Description::try_open(place, O_RDWR | O_CREAT | O_EXCL);
  if (!segment.description && errno == EEXIST) return false;
  if (!segment.description) fail_errno(errno, "open", place.shown);
  FAULT_POINT("create.opened");
  if (!try_lock(segment.description->fd(), kKeeperByte) || !segment.description->still_at(place)) return false;
  try {
    initialise(segment, identity, kept);
  } catch (...) {
    ::unlink(place.path.c_str());
    throw;
  }
  FAULT_POINT("create.initialised");
  return true;
}

// In memory, where what a killed maker leaves would cost memory: without a name until it is whole, if the kernel can.
// False: another process was faster.
bool make_nameless(Segment& segment, const Identity& identity) {
  const Place& place = segment.place;
  segment.description = Description::nameless();
  if (!segment.description && (errno == EOPNOTSUPP || errno == EISDIR)) return make_in_place(segment, identity, Kept::no);
  if (!segment.description) fail_errno(errno, "open", kSharedMemory);
  FAULT_POINT("create.opened");
  if (!try_lock(segment.description->fd(), kKeeperByte)) return false;
  initialise(segment, identity, Kept::no);
  if (!segment.description->enter(place)) return false;
  FAULT_POINT("create.initialised");
  // What is mapped before has no name in /proc/PID/maps, where one looks who uses a segment.
  try {
    const auto named = Description::open(place, O_RDWR);
    if (!segment.description->is(*named)) fail(Fault::not_found, place.shown + " was removed");
    segment.mapping = std::make_shared<Mapping>(*named, place, segment.geometry, true);
  } catch (...) {
    if (segment.description->still_at(place)) ::unlink(place.path.c_str());
    throw;
  }
  return true;
}

// Of a dead ring at the place of `segment`, which has the file open. False: it is gone by now, or was rubbish, and is.
bool take_over(Segment& segment, const Identity& wanted, Kept kept) {
  const Place& place = segment.place;
  checked_stat(*segment.description, place);
  FAULT_POINT("create.found");
  if (!try_keep(segment.description->fd())) fail(Fault::exists, place.shown + " exists and is kept by a live process");
  if (!segment.description->still_at(place)) return false;
  try {
    segment.identity = read_identity(*segment.description, place, segment.geometry);
  } catch (const RingFault& fault) {
    if (fault.code() != Fault::not_ready) throw;
    if (!is_rubbish(*segment.description, place)) fail(Fault::layout, place.shown + ": not a ring, or truncated");
    ::unlink(place.path.c_str());
    return false;
  }
  if (segment.identity.slot_count != wanted.slot_count || segment.identity.slot_capacity != wanted.slot_capacity ||
      segment.identity.fingerprint != wanted.fingerprint)
    fail(Fault::layout, place.shown + " is a dead ring of other sizes or another fingerprint");
  segment.mapping = std::make_shared<Mapping>(*segment.description, place, segment.geometry, true);
  reinterpret_cast<Header*>(segment.mapping->control())->kept.store(kept, std::memory_order_relaxed);
  return segment.taken_over = true;
}

}  // namespace

// A place goes through three states: absent; present and kept; present and not kept, which is a ring to
// take over, or rubbish of a creator that died. The keeper lock decides, and it lies on the file and
// not on its place: the process that gets it checks whether the file is still there, and else starts over.
Segment Segment::create(const std::string& name, std::uint64_t slot_count, std::uint64_t slot_capacity,
                        const Bytes16& fingerprint, const std::string& file, Kept kept) {
  check_name(name);
  if (slot_count == 0 || slot_count > kMaxSlots)
    fail(Fault::argument, "slot_count is 1 to " + std::to_string(kMaxSlots));
  if (slot_capacity == 0) fail(Fault::argument, "slot_capacity is at least 1");
  if (file.empty() ? kept != Kept::no : file[0] != '/' || kept == Kept::no)
    fail(Fault::argument, "a ring is kept in a file, which has an absolute path");
  Segment segment;
  segment.name = name;
  segment.place = file.empty() ? Place::in_memory(name) : Place::in_file(file);
  if (const auto target = link_of(name); target && file.empty())
    fail(Fault::argument, name + " is the name of the ring in " + *target + ": give that file");
  if (!Geometry::compute(slot_count, slot_capacity, page_bytes(), segment.geometry))
    fail(Fault::no_memory, segment.place.shown + " would have more than 2^62 bytes");

  const Identity wanted{slot_count,    slot_capacity,  page_bytes(),   segment.geometry.total_bytes,
                        realtime_ns(), random_bytes(), random_bytes(), fingerprint};
  for (bool done = false; !done;) {
    segment.description = Description::try_open(segment.place, O_RDWR);
    if (!segment.description && errno != ENOENT) fail_errno(errno, "open", segment.place.shown);
    done = segment.description ? take_over(segment, wanted, kept)
           : file.empty()      ? make_nameless(segment, wanted)
                               : make_in_place(segment, wanted, kept);
  }
  return segment;
}

void Segment::forget_names(const std::string& but) const {
  for (const std::string& each : list())
    if (each != but && link_of(each) == place.path) unname(each);
}

void Segment::enter() const {
  forget_names(name);  // of a former run
  while (symlink(place.path.c_str(), (kSharedMemory + name).c_str()) != 0) {
    if (errno != EEXIST) fail_errno(errno, "symlink", name);
    const auto target = link_of(name);
    if (target == place.path) return;
    if (!target && Description::try_open(Place::in_memory(name), O_RDONLY))
      fail(Fault::exists, name + " is a ring in /dev/shm");
    if (!unname(name) && errno != ENOENT) fail_errno(errno, "unlink", name);  // of a file that is another ring's by now
  }
}

bool Segment::unname(const std::string& name) { return ::unlink((kSharedMemory + name).c_str()) == 0; }

Segment Segment::attach(const std::string& name, bool writable_payload, std::shared_ptr<Mapping> same) {
  check_name(name);
  Segment segment;
  segment.name = name;
  segment.place = Place::of(name);
  segment.description = Description::open(segment.place, O_RDWR);
  segment.identity = read_identity(*segment.description, segment.place, segment.geometry);
  segment.mapping = same ? std::move(same)
                         : std::make_shared<Mapping>(*segment.description, segment.place, segment.geometry, writable_payload);
  return segment;
}

bool Segment::may_go(const Mapping& mapping, const Geometry& geometry, std::uint64_t slot_count,
                     std::uint64_t gives_up_to) {
  const auto* header = reinterpret_cast<const Header*>(mapping.control());
  const auto* controls = reinterpret_cast<const SlotControl*>(mapping.control() + geometry.controls_offset);
  if (header->sequence.load(std::memory_order_relaxed) > gives_up_to)
    for (std::uint64_t slot = 0; slot < slot_count; ++slot)
      if (Word{controls[slot].word.load(std::memory_order_relaxed)}.unread()) return false;
  FAULT_POINT("unlink.checked");
  return true;
}

bool Segment::unlink_if_dead(const std::string& name, std::uint64_t gives_up_to) {
  check_name(name);
  const Place place = Place::of(name);
  const auto description = Description::try_open(place, O_RDWR);
  if (!description && place.file && errno == ENOENT) return unname(name);  // its file was deleted
  if (!description) fail_errno(errno, "open", place.shown);
  checked_stat(*description, place);
  if (!try_remove(description->fd()) || !try_lock(description->fd(), kOwnerByte, off_t{kMaxOwners})) return false;
  if (!description->still_at(Place::of(name))) fail(Fault::not_found, name + " is gone");
  if (gives_up_to != kGivesUpAll && !is_rubbish(*description, place)) {  // else what is no ring can be removed as well
    Geometry geometry{};
    const Identity identity = read_identity(*description, place, geometry);
    const Mapping mapping(*description, place, geometry, false);
    if (!may_go(mapping, geometry, identity.slot_count, gives_up_to)) return false;
  }
  if (!unname(name)) fail_errno(errno, "unlink", name);
  return true;
}

std::vector<std::string> Segment::list() {
  std::vector<std::string> names;
  DIR* const directory = opendir(kSharedMemory);
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory)) {
    std::string name = std::string("/") + entry->d_name;
    if (names_a_ring(name)) names.push_back(std::move(name));
  }
  closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace transport
