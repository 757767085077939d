// CHECK, for tests without a framework: counts failures and says where; main returns them.
#pragma once

#include <cstdio>

inline int failed_checks = 0;

#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (!(condition)) {                                           \
      ++failed_checks;                                            \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (false)

// What main returns: 0 where all checks held.
inline int report() {
  std::printf(failed_checks == 0 ? "ok\n" : "%d checks failed\n", failed_checks);
  return failed_checks == 0 ? 0 : 1;
}
