// PackedMatrix: where elements come to lie, and what it refuses.
#include <stdexcept>
#include <string>

#include "../src/pack.h"
#include "check.h"
#include "gguf_twin.h"
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
          CHECK(panels.floats(n / 16)[k * 16 + n % 16] == expected, "row %ld column %ld", long{n}, long{k});
        }
    }
}

void test_large_weights_lie_on_huge_pages() {
  const std::vector<float> data(1024 * 1024, 1.0f);
  const Part part{data.data(), 1024};
  const PackedMatrix packed({&part, 1}, 1024);
  CHECK(reinterpret_cast<uintptr_t>(packed.panels().data) % 64 == 0, "alignment");
  CHECK(packed.panels().floats(63)[1024 * 16 - 1] == 1.0f, "the last element");
}

// Neighbours of one kind make a segment; each begins on a line of the cache with a panel of its own.
void test_kinds_make_segments() {
  const gguf_twin::Rows a(Kind::kQ4_0, 20, 64, 1), b(Kind::kQ4_0, 12, 64, 2), c(Kind::kQ8_0, 7, 64, 3);
  const Part parts[] = {a.part(), b.part(), c.part()};
  const PackedMatrix packed(parts, 64);
  CHECK(packed.num_rows() == 39 && packed.segments().size() == 2, "segments");
  CHECK(packed.kinds()[0] == Kind::kQ4_0 && packed.kinds()[1] == Kind::kQ8_0, "kinds");
  CHECK(packed.segments()[0].num_rows == 32 && packed.segments()[1].num_rows == 7, "rows");
  CHECK(packed.segments()[0].offset == 8 && packed.segments()[1].offset == 128, "offsets");
  CHECK(packed.num_bytes() == 2 * 2 * 288 + 2 * 544, "%zu bytes", packed.num_bytes());
  CHECK(packed.is_quantised(), "is_quantised");
  for (const Panels& segment : packed.segments())
    CHECK(reinterpret_cast<uintptr_t>(segment.data) % 64 == 0, "alignment");
  bool refused = false;
  try {
    packed.panels();
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused, "panels of two formats");
  const gguf_twin::Rows half(Kind::kF16, 16, 64, 4);
  const Part with_floats[] = {half.part(), c.part()};
  CHECK(!PackedMatrix(with_floats, 64).is_quantised(), "float16 is not quantised");
}

// By the definition in panels.h: what lies where.
void test_quants_lie_as_panels_say() {
  const gguf_twin::Rows rows(Kind::kQ4_1, 17, 64, 5);
  const PackedMatrix packed = rows.pack();
  const Panels& panels = packed.panels();
  for (int64_t n = 0; n < 32; ++n)
    for (int64_t k = 0; k < 64; ++k) {
      const auto* group = reinterpret_cast<const uint8_t*>(panels.panel(n / 16)) + k / 32 * 320;
      const int64_t i = k % 16;
      const uint8_t byte = group[64 + i / 4 * 64 + n % 16 * 4 + i % 4];
      const float quant = static_cast<float>(k % 32 < 16 ? byte & 15 : byte >> 4);
      const float value =
          gguf_twin::half_at(group + 2 * (n % 16)) * quant + gguf_twin::half_at(group + 32 + 2 * (n % 16));
      CHECK(value == (n < 17 ? rows.at(n, k) : 0.0f), "row %ld column %ld", long{n}, long{k});
    }
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
  const gguf_twin::Rows odd(Kind::kQ4_0, 17, 64, 1), other(Kind::kQ4_1, 16, 64, 2);
  const Part within_a_panel[] = {odd.part(), other.part()};
  check_refused(within_a_panel, 64, "parts: 17 rows in front of one of q4_1, must be a multiple of 16");
  const Part part = odd.part(), large{odd.bytes.data(), 1, Kind::kQ6_K};
  check_refused({&part, 1}, 33, "parts: 33 columns of q4_0, must be a multiple of 32");
  check_refused({&large, 1}, 64, "parts: 64 columns of q6_k, must be a multiple of 256");
}

}  // namespace

int main() {
  test_parts_are_stacked();
  test_large_weights_lie_on_huge_pages();
  test_kinds_make_segments();
  test_quants_lie_as_panels_say();
  test_nothing_is_refused();
  return report();
}
