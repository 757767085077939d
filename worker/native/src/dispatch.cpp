// Which kernel sets were built, and which of them this machine runs.
#include "dispatch.h"

#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagecast {
namespace {

#if defined(__x86_64__)
// The compiler's runtime asks cpuid and whether the operating system saves the registers.
[[maybe_unused]] bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
[[maybe_unused]] bool runs_avx512vnni() { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }

// Tiles are there for a process that has asked the system for them: its threads' signal stacks must hold
// them, too. Where it can't be asked it hasn't them.
bool get_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

[[maybe_unused]] bool runs_avx512amx() {
  constexpr unsigned kTiles = 1u << 24 | 1u << 25 | 1u << 22;  // the registers, int8, bfloat16
  constexpr unsigned kBFloat16 = 1u << 5;                      // vectors of it
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!runs_avx512vnni() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kTiles) != kTiles) return false;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax & kBFloat16) == 0) return false;
  static const bool has = get_tiles();
  return has;
}

// Not every compiler's runtime knows F16C and AVX-VNNI by name. They use the registers of AVX2.
[[maybe_unused]] bool runs_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
[[maybe_unused]] bool runs_avx2vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return runs_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
}
#endif

}  // namespace

std::vector<const Kernels*> kernel_sets() {
  std::vector<const Kernels*> sets;
#ifdef PAGECAST_HAS_AVX512AMX
  if (runs_avx512amx()) sets.push_back(&avx512amx_kernels());
#endif
#ifdef PAGECAST_HAS_AVX512VNNI
  if (runs_avx512vnni()) sets.push_back(&avx512vnni_kernels());
#endif
#ifdef PAGECAST_HAS_AVX512
  if (runs_avx512()) sets.push_back(&avx512_kernels());
#endif
#ifdef PAGECAST_HAS_AVX2VNNI
  if (runs_avx2vnni()) sets.push_back(&avx2vnni_kernels());
#endif
#ifdef PAGECAST_HAS_AVX2
  if (runs_avx2()) sets.push_back(&avx2_kernels());
#endif
#ifdef PAGECAST_HAS_NEON
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
