// Which kernel sets were built, and which of them this machine runs.
#include "dispatch.h"

#include <stdexcept>
#include <string>

namespace pagecast {
namespace {

#if defined(__x86_64__)
// The compiler's runtime asks cpuid and whether the operating system saves the registers.
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

}  // namespace

std::vector<const Kernels*> kernel_sets() {
  std::vector<const Kernels*> sets;
#if defined(__x86_64__)
  if (runs_avx512()) sets.push_back(&avx512_kernels());
  if (runs_avx2()) sets.push_back(&avx2_kernels());
#elif defined(__aarch64__)
  sets.push_back(&neon_kernels());
#endif
  sets.push_back(&baseline_kernels());
  return sets;
}

const Kernels& kernels_for(const char* name) {
  const std::vector<const Kernels*> sets = kernel_sets();
  if (name == nullptr) return *sets.front();
  std::string known;
  for (const Kernels* set : sets) {
    if (std::string(name) == set->name) return *set;
    known += known.empty() ? set->name : std::string(", ") + set->name;
  }
  throw std::invalid_argument("kernel_set: \"" + std::string(name) + "\", this machine runs " + known);
}

}  // namespace pagecast
