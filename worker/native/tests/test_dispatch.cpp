// Which kernel sets this machine runs, and how one is picked.
#include <stdexcept>
#include <string>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "../src/dispatch.h"
#include "../src/int8.h"
#include "check.h"

namespace {

using namespace pagecast;

// Best first, each name once, all of them complete.
void test_the_sets() {
  const char* order[] = {"avx512amx", "avx512vnni", "avx512", "avx2vnni", "avx2", "neon", "baseline"};
  size_t at = 0;
  for (const Kernels* set : kernel_sets()) {
    while (at < std::size(order) && std::string_view(set->name) != order[at]) ++at;
    CHECK(at < std::size(order), "%s is unknown or out of order", set->name);
    ++at;
    CHECK(set->fused == (std::string_view(set->name) != "baseline"), "%s", set->name);
    CHECK(set->linear != nullptr && set->int8 != nullptr && set->attention != nullptr, "%s", set->name);
  }
  CHECK(std::string_view(kernel_sets().back()->name) == "baseline", "any machine runs it");
}

// What needs more instructions comes with what needs fewer.
void test_a_machine_with_vnni_runs_the_set_without() {
  const auto runs = [](std::string_view name) {
    for (const Kernels* set : kernel_sets())
      if (set->name == name) return true;
    return false;
  };
  CHECK(!runs("avx512amx") || runs("avx512vnni"), "avx512vnni");
  CHECK(!runs("avx512vnni") || runs("avx512"), "avx512");
  CHECK(!runs("avx2vnni") || runs("avx2"), "avx2");
#if defined(__x86_64__)
  CHECK(runs("avx512vnni") == (runs("avx512") && __builtin_cpu_supports("avx512vnni") != 0), "avx512vnni");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & (3u << 24)) == 3u << 24;
  CHECK(!runs("avx512amx") || has_amx, "avx512amx");
  CHECK(!runs("neon"), "neon");
#endif
}

void test_a_set_by_its_name() {
  for (const Kernels* set : kernel_sets()) CHECK(&kernels_for(set->name) == set, "%s", set->name);
  CHECK(&kernels_for(nullptr) == kernel_sets().front(), "the best");
  for (const char* name : {"", "avx", "avx512VNNI"}) {
    std::string message;
    try {
      kernels_for(name);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CHECK(message.find("kernel_set") == 0 && message.find("baseline") != message.npos, "\"%s\": %s", name,
          message.c_str());
  }
}

}  // namespace

int main() {
  test_the_sets();
  test_a_machine_with_vnni_runs_the_set_without();
  test_a_set_by_its_name();
  return report();
}
