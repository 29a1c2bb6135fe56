// Preloaded into a writer: what fdatasync has put on disk is copied to the file that SYNCED_COPY names, which a test
// takes for what a loss of power leaves, and the pages of the last msync to the file that SYNCED_PAGES names. While the file SYNCED_BROKEN exists, the disk cannot write.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int copied(int descriptor, const char* path) {
  char next[4096], buffer[65536];
  struct stat status;
  snprintf(next, sizeof next, "%s.next", path);
  if (fstat(descriptor, &status) != 0) return -1;
  const int to = open(next, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (to < 0) return -1;
  for (off_t at = 0; at < status.st_size;) {
    const ssize_t count = pread(descriptor, buffer, sizeof buffer, at);
    if (count <= 0 || write(to, buffer, (size_t)count) != count) return -1;
    at += count;
  }
  return close(to) == 0 ? rename(next, path) : -1;
}

int msync(void* begin, size_t length, int how) {
  int (*const theirs)(void*, size_t, int) = (int (*)(void*, size_t, int))dlsym(RTLD_NEXT, "msync");
  const char* const pages = getenv("SYNCED_PAGES");
  if (theirs(begin, length, how) != 0) return -1;
  if (pages == NULL) return 0;
  char next[4096];
  snprintf(next, sizeof next, "%s.next", pages);
  const int to = open(next, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (to < 0 || write(to, begin, length) != (ssize_t)length || close(to) != 0 || rename(next, pages) != 0) abort();
  return 0;
}

int fdatasync(int descriptor) {
  int (*const theirs)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
  const char* const broken = getenv("SYNCED_BROKEN");
  if (broken != NULL && access(broken, F_OK) == 0) {
    errno = EIO;
    return -1;
  }
  const char* const copy = getenv("SYNCED_COPY");
  const int done = theirs(descriptor);
  if (done == 0 && copy != NULL && copied(descriptor, copy) != 0) abort();
  return done;
}
