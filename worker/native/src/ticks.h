// A counter that rises at a steady rate and is read without touching memory: a clock call brings its code and
// data back into a cache that a launch has just swept.
#pragma once

#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <chrono>
#endif

namespace pagecast {

inline int64_t ticks() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__builtin_ia32_rdtsc());
#elif defined(__aarch64__)
  int64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

}  // namespace pagecast
