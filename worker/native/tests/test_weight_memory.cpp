// Memory of weights: small ones side by side on huge pages, large ones on their own.
#include <cstdint>
#include <cstring>
#include <vector>

#include "../src/weight_memory.h"
#include "check.h"

using pagecast::allocate_weights;

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

uintptr_t address(const std::shared_ptr<std::byte>& memory) {
  return reinterpret_cast<uintptr_t>(memory.get());
}

void small_ones_lie_side_by_side() {
  const auto first = allocate_weights(100);
  const auto second = allocate_weights(1 << 20);
  const auto third = allocate_weights(1);
  CHECK(address(first) % kHugePage == 0, "the first begins a huge page");
  CHECK(address(second) == address(first) + 128, "the second follows at a cache line");
  CHECK(address(third) == address(second) + (1 << 20), "and the third");
}

void large_ones_begin_a_huge_page() {
  const auto memory = allocate_weights(9 << 20);
  CHECK(address(memory) % kHugePage == 0, "alignment");
  std::memset(memory.get(), 1, 9 << 20);
}

void none_overlaps_whatever_is_let_go_meanwhile() {
  std::vector<std::shared_ptr<std::byte>> kept;
  for (int i = 0; i < 200; ++i) {
    auto memory = allocate_weights(300000);
    std::memset(memory.get(), i, 300000);
    if (i % 3 != 0) memory.reset();
    kept.push_back(std::move(memory));
  }
  for (int i = 0; i < 200; i += 3)
    for (size_t at = 0; at < 300000; at += 4096)
      CHECK(kept[static_cast<size_t>(i)].get()[at] == static_cast<std::byte>(i), "memory %d byte %zu", i, at);
}

}  // namespace

int main() {
  small_ones_lie_side_by_side();
  large_ones_begin_a_huge_page();
  none_overlaps_whatever_is_let_go_meanwhile();
  return report();
}
