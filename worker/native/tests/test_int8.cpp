// Rounding to eight bits and products of quantised weights, of every set this machine runs: bit by bit what
// int8.h says.
#include <cmath>

#include "check.h"
#include "int8_case.h"
#include "sets.h"

namespace {

using namespace pagecast;

constexpr int kMostRows = 33;

int name(Format format) { return static_cast<int>(format); }

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

Matrix run_linear(const Kernels& set, const Quantised& x, int rows, const QuantisedWeight& w, int64_t cut) {
  Matrix out(rows, w.panels().num_rows);
  const auto linear = set.int8->linear[name(w.panels().format)];
  linear(x.rows, rows, w.panels(), 0, cut, out.rows());
  linear(x.rows, rows, w.panels(), cut, w.panels().num_panels(), out.rows());
  return out;
}

Matrix run_linear_swiglu(const Kernels& set, const Quantised& x, int rows, const QuantisedWeight& w,
                         int64_t cut) {
  Matrix out(rows, w.panels().num_rows / 2);
  const auto linear_swiglu = set.int8->linear_swiglu[name(w.panels().format)];
  linear_swiglu(x.rows, rows, w.panels(), 0, cut, out.rows());
  linear_swiglu(x.rows, rows, w.panels(), cut, w.panels().num_panels() / 2, out.rows());
  return out;
}

void check_group(const Kernels& set, const Matrix& x, int64_t t, int64_t g, int offset,
                 const Quantised& out) {
  float largest = 0;
  bool is_finite = true;
  for (int64_t k = g * 32; k < g * 32 + 32; ++k) {
    largest = std::max(largest, std::fabs(x.at(t, k)));
    is_finite = is_finite && std::isfinite(x.at(t, k));
  }
  const bool is_small = !(largest >= 0x1p-120f);
  int sums[2] = {0, 0};
  for (int64_t k = g * 32; k < g * 32 + 32; ++k) {
    const float scaled = x.at(t, k) * (127.0f / largest);
    const int expected = !is_finite || is_small ? 0 : static_cast<int>(std::nearbyint(scaled));
    CHECK(out.rows.quants[t * x.width + k] == expected, "%s row %ld column %ld", set.name, long{t}, long{k});
    sums[k % 32 / 16] += expected;
  }
  const auto at = static_cast<size_t>(t * x.width / 32 + g);
  if (is_finite) {
    const float scale = largest / 127.0f;
    CHECK(same_bits(out.scales[at], scale), "%s row %ld: %g, not %g", set.name, long{t}, out.scales[at],
          scale);
    CHECK(same_bits(out.scaled_sums[at], scale * static_cast<float>(sums[0] + sums[1])), "%s row %ld",
          set.name, long{t});
  } else {
    CHECK(std::isnan(out.scales[at]) && std::isnan(out.scaled_sums[at]), "%s row %ld", set.name, long{t});
  }
  CHECK(out.biases[2 * at] == -offset * (sums[0] + sums[1]), "%s row %ld", set.name, long{t});
  CHECK(out.biases[2 * at + 1] == -offset * sums[1], "%s row %ld", set.name, long{t});
}

// Groups of every size, of zeros, halves and tiny numbers, with one element that is none.
void test_quantise(const Kernels& set) {
  for (const int64_t columns : {32, 64, 576}) {
    Matrix x = Matrix::random(40, columns, 1);
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t k = 0; k < columns; ++k) {
        if (t < 20) x.at(t, k) = std::ldexp(x.at(t, k), static_cast<int>(t * 13 - 135));
        if (t == 20) x.at(t, k) = k % 2 == 0 ? 0.0f : -0.0f;
        if (t == 21) x.at(t, k) = k % 32 == 0 ? 127.0f : static_cast<float>(k % 200 - 100) + 0.5f;
        if (t >= 22 && t < 27 && k == columns - 7 * (t - 21) + 6)
          x.at(t, k) = t == 22 ? kNaN : t == 23 ? -kNaN : t == 24 ? kInf : t == 25 ? -kInf : 3e38f;
      }
    const int offset = 8;
    const Quantised all = quantise(set, x, offset);
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t g = 0; g < columns / 32; ++g) check_group(set, x, t, g, offset, all);
    // A range of rows and no other.
    Quantised some(x.num_rows, columns);
    std::memset(some.rows.quants, 77, static_cast<size_t>(x.num_rows * columns));
    set.int8->quantise(x.rows(), offset, 3, 5, some.rows);
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t k = 0; k < columns; ++k) {
        const bool is_own = t == 3 || t == 4;
        const int expected = is_own ? all.rows.quants[t * columns + k] : 77;
        CHECK(some.rows.quants[t * columns + k] == expected, "%s row %ld", set.name, long{t});
        CHECK(std::isnan(some.scales[static_cast<size_t>((t * columns + k) / 32)]) != is_own, "%s", set.name);
      }
  }
}

// All numbers of rows, alone and among others, panels cut in any two.
void check_products(const Kernels& set, const QuantisedWeight& w, Matrix x) {
  const Panels& panels = w.panels();
  const bool gates = panels.num_rows % (2 * kLanes) == 0;
  const Quantised x8 = quantise(set, x, panels.offset);
  const auto count = static_cast<int>(x.num_rows);
  Matrix twin(count, panels.num_rows);
  for (int64_t t = 0; t < count; ++t)
    for (int64_t n = 0; n < panels.num_rows; ++n) twin.at(t, n) = dot_int8_twin(set.fused, x8, t, w, n);
  // Of SiLU a test of its own shows what it is; here it is what the set's float32 kernel makes of the same.
  Matrix gated(count, panels.num_rows / 2);
  if (gates) {
    const int half = static_cast<int>(panels.num_rows / 2);
    Rows up = twin.rows();
    up.data += half;
    set.swiglu(twin.rows(), up, half, 0, count, gated.rows());
  }
  for (int rows = 1; rows <= count; ++rows) {
    const Matrix out = run_linear(set, x8, rows, w, rows % (panels.num_panels() + 1));
    for (int64_t t = 0; t < rows; ++t)
      CHECK(out.same_row(t, twin, t), "%s format %d offset %d: %ld x %ld, row %ld of %d", set.name,
            name(panels.format), panels.offset, long{panels.num_rows}, long{panels.num_columns}, long{t},
            rows);
    CHECK(out.fence_holds(), "%s format %d wrote beyond", set.name, name(panels.format));
    if (!gates) continue;
    const Matrix swiglu = run_linear_swiglu(set, x8, rows, w, rows % (panels.num_panels() / 2 + 1));
    for (int64_t t = 0; t < rows; ++t)
      CHECK(swiglu.same_row(t, gated, t), "%s swiglu, format %d: %ld x %ld, row %ld of %d", set.name,
            name(panels.format), long{panels.num_rows}, long{panels.num_columns}, long{t}, rows);
    CHECK(swiglu.fence_holds(), "%s format %d wrote beyond", set.name, name(panels.format));
  }
}

void test_products(const Kernels& set) {
  constexpr uint64_t kSeed = 2;
  for (const Format format : kQuantised)
    for (const int offset : {0, 8, 16, 32, 128})
      check_products(set, QuantisedWeight(format, offset, 32, 64, kSeed),
                     Matrix::random(kMostRows, 64, kSeed));
  for (const Format format : kQuantised) {
    for (const int64_t outputs : {1, 17, 64, 72})
      for (const int64_t columns : {32, 96, 800})
        check_products(set, QuantisedWeight(format, 16, outputs, columns, kSeed),
                       Matrix::random(outputs == 17 ? kMostRows : 9, columns, kSeed, 30.0f));
    check_products(set, QuantisedWeight(format, 8, 96, 1536, kSeed), Matrix::random(6, 1536, kSeed));
    check_products(set, QuantisedWeight(format, 8, 32, 32, kSeed), Matrix::random(131, 32, kSeed));
    // Gates in pairs of panels and one left over; more rows than a block of tiles has, and some left over.
    for (const int offset : {0, 8})
      check_products(set, QuantisedWeight(format, offset, 160, 96, kSeed), Matrix::random(41, 96, kSeed));
    check_products(set, QuantisedWeight(format, 8, 96, 32, kSeed), Matrix::random(147, 32, kSeed));
    // Three chunks of groups, and more tiles of rows than read a panel as it is packed.
    check_products(set, QuantisedWeight(format, 8, 64, 1600, kSeed), Matrix::random(17, 1600, kSeed));
  }
}

// The largest sums there are: nothing saturates on the way.
void test_extremes(const Kernels& set) {
  for (const Format format : kQuantised)
    for (const int quant : {0, 1, has_nibbles(format) ? 15 : 255})
      for (const float sign : {1.0f, -1.0f}) {
        Matrix x(kMostRows, 64);
        for (int64_t t = 0; t < x.num_rows; ++t)
          for (int64_t k = 0; k < x.width; ++k) x.at(t, k) = t % 2 == 0 || k % 3 == 0 ? sign : -sign;
        check_products(set, QuantisedWeight(format, 128, 32, 64, 5, quant), x);
      }
}

void test_a_bad_row_stays_alone(const Kernels& set) {
  for (const Format format : kQuantised) {
    const QuantisedWeight w(format, 8, 64, 96, 6);
    for (const int rows : {3, 9, 13, 20})
      for (const float bad : {kNaN, kInf})
        for (int64_t at = 0; at < rows; ++at) {
          Matrix x = Matrix::random(rows, 96, 7);
          const Matrix good = run_linear(set, quantise(set, x, 8), rows, w, 2);
          const Matrix good_swiglu = run_linear_swiglu(set, quantise(set, x, 8), rows, w, 1);
          x.at(at, 40) = bad;
          const Matrix out = run_linear(set, quantise(set, x, 8), rows, w, 2);
          const Matrix swiglu = run_linear_swiglu(set, quantise(set, x, 8), rows, w, 1);
          for (int64_t t = 0; t < rows; ++t) {
            CHECK(t == at ? std::isnan(out.at(t, 47)) : out.same_row(t, good, t), "%s row %ld", set.name,
                  long{t});
            CHECK(t == at ? std::isnan(swiglu.at(t, 7)) : swiglu.same_row(t, good_swiglu, t), "%s row %ld",
                  set.name, long{t});
          }
        }
  }
}

void test_products_write_their_panels_only(const Kernels& set) {
  for (const Format format : kQuantised)
    for (const int rows : {2, 7, 16, 18}) {
      const QuantisedWeight w(format, 8, 128, 32, 8);
      Matrix x = Matrix::random(rows, 32, 9), out(rows + 1, 128), swiglu(rows + 1, 64);
      const Quantised x8 = quantise(set, x, 8);
      set.int8->linear[name(format)](x8.rows, rows, w.panels(), 1, 3, out.rows());
      set.int8->linear_swiglu[name(format)](x8.rows, rows, w.panels(), 1, 3, swiglu.rows());
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t n = 0; n < out.stride; ++n)
          CHECK(std::isnan(out.at(t, n)) == (n < 16 || n >= 48), "%s at %ld, %ld", set.name, long{t},
                long{n});
        for (int64_t n = 0; n < swiglu.stride; ++n)
          CHECK(std::isnan(swiglu.at(t, n)) == (n < 16 || n >= 48), "%s at %ld, %ld", set.name, long{t},
                long{n});
      }
      CHECK(out.untouched(rows) && swiglu.untouched(rows), "%s wrote a row too many", set.name);
    }
}

void test_other_formats_have_none(const Kernels& set) {
  for (int format = 0; format < kNumFormats; ++format) {
    const bool expected = is_quantised(static_cast<Format>(format));
    CHECK((set.int8->linear[format] != nullptr) == expected, "%s format %d", set.name, format);
    CHECK((set.int8->linear_swiglu[format] != nullptr) == expected, "%s format %d", set.name, format);
  }
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine()) {
    std::printf("%s\n", set->name);
    test_quantise(*set);
    test_products(*set);
    test_extremes(*set);
    test_a_bad_row_stays_alone(*set);
    test_products_write_their_panels_only(*set);
    test_other_formats_have_none(*set);
  }
  return report();
}
