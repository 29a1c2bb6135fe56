// Preloaded into the processes of a soak: their wall clock is off by what stands in a file, in seconds. Their monotonic
// clock is left alone, as a step of the system's clock leaves it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long* offset_s;
static int (*real_clock_gettime)(clockid_t, struct timespec*);

__attribute__((constructor)) static void open_file(void) {
  real_clock_gettime = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const char* path = getenv("SOAK_CLOCK");
  const int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void* mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) offset_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  if (real_clock_gettime == NULL) open_file();  // somebody's constructor was first
  const int status = real_clock_gettime(clock, now);
  if (status == 0 && offset_s != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += *offset_s;
  return status;
}

time_t time(time_t* also) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (also != NULL) *also = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec exact;
  const int status = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return status;
}
