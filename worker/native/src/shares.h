// How the threads of a run divide a launch's units. Knows neither what a unit is nor who runs it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pagecast {

// A thread takes many units at first and few at the end, in multiples of what a kernel works on at once.
inline constexpr int64_t kUnitsAtOnce = 8;

// Calls do_units(first, last) for this thread's shares of [0, num_units). Every thread of the launch calls it
// with one `claimed`, a std::atomic<int64_t> that starts from 0; together they do each unit once, whoever
// comes when.
template <typename Counter, typename DoUnits>
void share_units(Counter& claimed, int64_t num_units, int num_threads, int thread, DoUnits&& do_units) {
  const int64_t shares = 2 * num_threads;
  const auto share = [shares](int64_t left) {
    const int64_t count = left / shares;
    return count > kUnitsAtOnce ? count - count % kUnitsAtOnce : count;
  };
  // The first share of each thread is its own from the start; the rest goes to whoever comes.
  const int64_t own = share(num_units);
  if (own > 0) do_units(thread * own, (thread + 1) * own);
  const int64_t rest = own * num_threads;
  int64_t first = claimed.load(std::memory_order_relaxed);
  while (rest + first < num_units) {
    const int64_t count = std::max<int64_t>(1, share(num_units - rest - first));
    if (!claimed.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) continue;
    do_units(rest + first, rest + first + count);
    first = claimed.load(std::memory_order_relaxed);
  }
}

}  // namespace pagecast
