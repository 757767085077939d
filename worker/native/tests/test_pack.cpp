// PackedMatrix: where elements come to lie, and what it refuses.
#include <stdexcept>
#include <string>

#include "../src/pack.h"
#include "check.h"
#include "matrix.h"

namespace {

using namespace pagecast;

void test_parts_are_stacked() {
  for (const int64_t columns : {1, 7, 33})
    for (const int64_t second : {1, 15, 16, 17}) {
      std::vector<float> a(static_cast<size_t>(3 * columns)), b(static_cast<size_t>(second * columns));
      Random random(1);
      for (float& value : a) value = 1 + random.uniform();
      for (float& value : b) value = 1 + random.uniform();
      const Part parts[] = {{a.data(), 3}, {b.data(), second}};
      const PackedMatrix packed(parts, columns);
      const Panels& panels = packed.panels();
      CHECK(packed.num_rows() == 3 + second && packed.num_columns() == columns, "shape");
      CHECK(reinterpret_cast<uintptr_t>(panels.data) % 64 == 0, "alignment");
      CHECK(packed.num_bytes() == static_cast<size_t>(round_up(3 + second) * columns * 4), "bytes");
      for (int64_t n = 0; n < round_up(packed.num_rows()); ++n)
        for (int64_t k = 0; k < columns; ++k) {
          const float expected = n < 3            ? a[static_cast<size_t>(n * columns + k)]
                                 : n < 3 + second ? b[static_cast<size_t>((n - 3) * columns + k)]
                                                  : 0.0f;
          CHECK(panels.panel(n / 16)[k * 16 + n % 16] == expected, "row %ld column %ld", long{n}, long{k});
        }
    }
}

void test_large_weights_lie_on_huge_pages() {
  const std::vector<float> data(1024 * 1024, 1.0f);
  const Part part{data.data(), 1024};
  const PackedMatrix packed({&part, 1}, 1024);
  CHECK(reinterpret_cast<uintptr_t>(packed.panels().data) % (2 << 20) == 0, "alignment");
  CHECK(packed.panels().panel(63)[1024 * 16 - 1] == 1.0f, "the last element");
}

void check_refused(std::span<const Part> parts, int64_t columns, const char* field) {
  try {
    const PackedMatrix packed(parts, columns);
    CHECK(false, "%s was not refused", field);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find(field) == 0, "%s", error.what());
  }
}

void test_nothing_is_refused() {
  const float value = 1;
  const Part good[] = {{&value, 1}}, none[] = {{&value, 0}}, lost[] = {{nullptr, 1}};
  check_refused({}, 1, "parts");
  check_refused(none, 1, "parts");
  check_refused(lost, 1, "parts");
  check_refused(good, 0, "num_columns");
}

}  // namespace

int main() {
  test_parts_are_stacked();
  test_large_weights_lie_on_huge_pages();
  test_nothing_is_refused();
  return report();
}
