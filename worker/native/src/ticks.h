// A counter that rises at a steady rate and is read without touching memory: a clock call brings its code and
// data back into a cache that a launch has just swept.
#pragma once

#include <chrono>
#include <cstdint>

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

// How long a tick lasts, by the clock. That is looked at until enough of them have passed to know.
class TickLength {
 public:
  // In ns, over the time since this was made.
  double ns() {
    if (!is_known_) {
      const int64_t passed = ticks() - first_tick_;
      const std::chrono::duration<double, std::nano> time = Clock::now() - start_;
      if (passed > 0) ns_ = time.count() / static_cast<double>(passed);
      // Not where the thread was away between the two clocks.
      is_known_ = time > kEnough && (ticks() - first_tick_ - passed) * 1000 < passed;
    }
    return ns_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kEnough{100};

  int64_t first_tick_ = ticks();
  Clock::time_point start_ = Clock::now();
  double ns_ = 0.0;
  bool is_known_ = false;
};

}  // namespace pagecast
