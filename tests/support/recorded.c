// Preloaded into a process: what it writes to files of the folder RECORDED is recorded there in RECORDED/record, in the
// order in which it happens, with each flush (power_loss.py). One entry: kind, the file's name's length, offset and length
// of what follows, then the name and the bytes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define THEIRS(name)                \
  static __typeof__(name)* theirs; \
  if (theirs == NULL) theirs = (__typeof__(name)*)dlsym(RTLD_NEXT, #name)

struct entry {
  uint32_t kind, name_bytes;
  uint64_t offset, bytes;
};

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static int record = -1;

// The name within the folder of a file; NULL for any other. "." is the folder.
static const char* within(const char* path) {
  const char* folder = getenv("RECORDED");
  if (folder == NULL) return NULL;
  const size_t begin = strlen(folder);
  if (strncmp(path, folder, begin) != 0) return NULL;
  if (path[begin] == 0) return ".";
  return path[begin] == '/' && strcmp(path + begin, "/record") != 0 ? path + begin + 1 : NULL;
}

static void note_of(char kind, const char* name, uint64_t offset, const void* data, uint64_t bytes) {
  if (name == NULL) return;
  pthread_mutex_lock(&one);
  if (record < 0) {
    char place[PATH_MAX];
    snprintf(place, sizeof place, "%s/record", getenv("RECORDED"));
    record = open(place, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  }
  const struct entry head = {(uint32_t)kind, (uint32_t)strlen(name), offset, data == NULL ? 0 : bytes};
  const struct iovec parts[] = {
      {(void*)&head, sizeof head}, {(void*)name, head.name_bytes}, {(void*)data, head.bytes}};
  if (writev(record, parts, 3) < 0) abort();
  pthread_mutex_unlock(&one);
}

static void note(char kind, int fd, uint64_t offset, const void* data, uint64_t bytes) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return;
  path[length] = 0;
  note_of(kind, within(path), offset, data, bytes);
}

ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  THEIRS(pwrite64);
  const ssize_t done = theirs(fd, data, bytes, offset);
  if (done > 0) note('w', fd, (uint64_t)offset, data, (uint64_t)done);
  return done;
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }

ssize_t write(int fd, const void* data, size_t bytes) {
  THEIRS(write);
  const off_t offset = lseek(fd, 0, SEEK_CUR);
  const ssize_t done = theirs(fd, data, bytes);
  if (done > 0 && offset >= 0) note('w', fd, (uint64_t)offset, data, (uint64_t)done);
  return done;
}

int ftruncate64(int fd, off64_t length) {
  THEIRS(ftruncate64);
  const int status = theirs(fd, length);
  if (status == 0) note('t', fd, (uint64_t)length, NULL, 0);
  return status;
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

int fdatasync(int fd) {
  THEIRS(fdatasync);
  const int status = theirs(fd);
  if (status == 0) note('s', fd, 0, NULL, 0);
  return status;
}

int fsync(int fd) {
  THEIRS(fsync);
  const int status = theirs(fd);
  if (status == 0) note('s', fd, 0, NULL, 0);
  return status;
}

int unlink(const char* path) {
  THEIRS(unlink);
  const int status = theirs(path);
  if (status == 0) note_of('u', within(path), 0, NULL, 0);
  return status;
}
