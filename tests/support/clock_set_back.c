// Preloaded into a process: its wall clock is set back by an hour again and again, every 40 ms. The monotonic clock goes
// on, as it does when a system's clock is set.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#define HOUR_S 3600
#define EVERY_NS 40000000L

static int (*theirs)(clockid_t, struct timespec*);

static long steps(void) {
  struct timespec since_boot;
  theirs(CLOCK_MONOTONIC, &since_boot);
  return (long)((since_boot.tv_sec * 1000000000L + since_boot.tv_nsec) / EVERY_NS % 100000);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  if (theirs == NULL) theirs = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int status = theirs(clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec -= HOUR_S * steps();
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
