// The sets of kernels that are linked and that this machine runs, best first.
#pragma once

#include <vector>

#include "../src/kernels.h"

inline std::vector<const pagecast::Kernels*> sets_of_this_machine() {
  std::vector<const pagecast::Kernels*> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    sets.push_back(&pagecast::avx512_kernels());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    sets.push_back(&pagecast::avx2_kernels());
#elif defined(__aarch64__)
  sets.push_back(&pagecast::neon_kernels());
#endif
  sets.push_back(&pagecast::baseline_kernels());
  return sets;
}
