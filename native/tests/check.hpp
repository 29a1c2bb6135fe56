// A test is a function named after a behaviour; CHECK ends the process at the first one that fails.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <unistd.h>

#include "common/error.hpp"
#include "ring/ring.hpp"

namespace transport::test {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

#define TEST(name)                                                               \
  static void name();                                                            \
  static const ::transport::test::Registration registration_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

template <class Call>
bool refused(Fault code, Call call) {
  try {
    call();
  } catch (const RingFault& fault) {
    return fault.code() == code;
  }
  return false;
}

inline std::string ring_name(const char* what) {
  return std::string(kNamePrefix) + "test-" + what + "-" + std::to_string(getpid());
}

// Removes what a test leaves, also when another owner has it by now.
struct NameGuard {
  std::string name;
  ~NameGuard() {
    try {
      Segment::unlink_if_dead(name);
    } catch (const RingFault&) {
    }
  }
};

// One argument: run only the tests whose name contains it.
inline int run_all(int argc, char** argv) {
  int ran = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    test.run();
    std::printf("ok %s\n", test.name);
    std::fflush(stdout);
    ++ran;
  }
  return ran > 0 ? 0 : 1;
}

}  // namespace transport::test
