// Preloaded into a client: it can join no shared memory of another process, as if that had been killed an instant ago.
// UCX opens the memory by /proc/PID/fd/N, or attaches to a System V segment.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/shm.h>
#include <unistd.h>

static int of_another(const char* path) {
  int pid = 0, descriptor = 0;
  return sscanf(path, "/proc/%d/fd/%d", &pid, &descriptor) == 2 && pid != getpid();
}

static int opened(const char* function, const char* path, int flags, va_list more) {
  int (*const theirs)(const char*, int, ...) = (int (*)(const char*, int, ...))dlsym(RTLD_NEXT, function);
  const int mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, int) : 0;
  if (!of_another(path)) return theirs(path, flags, mode);
  errno = ENOENT;
  return -1;
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int descriptor = opened("open", path, flags, more);
  va_end(more);
  return descriptor;
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int descriptor = opened("open64", path, flags, more);
  va_end(more);
  return descriptor;
}

void* shmat(int segment, const void* at, int flags) {
  void* (*const theirs)(int, const void*, int) = (void* (*)(int, const void*, int))dlsym(RTLD_NEXT, "shmat");
  struct shmid_ds status;
  if (shmctl(segment, IPC_STAT, &status) == 0 && status.shm_cpid == getpid()) return theirs(segment, at, flags);
  errno = EINVAL;
  return (void*)-1;
}
