// Rounding to bfloat16 and products of it, of every set this machine runs: bit by bit what bfloat16.h says.
#include <cmath>

#include "bfloat16_case.h"
#include "check.h"
#include "gguf_twin.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void test_round(const Kernels& set) {
  const std::vector<float> edges = {0.0f,
                                    -0.0f,
                                    1.0f,
                                    0x1.01p0f,        // half of the last bit: to even, down
                                    0x1.03p0f,        // to even, up
                                    0x1.010002p0f,    // above the half
                                    0x1.fffffep127f,  // to infinity
                                    -0x1.fefffep127f,
                                    kInf,
                                    -kInf,
                                    kNaN,
                                    kLeastBFloat,
                                    -0x1.fffffep-49f,  // rounded to the least one
                                    0x1.fdp-49f,       // just below it
                                    0x1p-126f,
                                    -0x1p-140f};
  for (const int64_t columns : {1, 15, 16, 33, 64, 100}) {
    Matrix x = Matrix::random(9, columns, 1, 3.0f);
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t k = 0; k < columns; ++k)
        if ((t + k) % 3 == 0) x.at(t, k) = edges[static_cast<size_t>(t * columns + k) % edges.size()];
    BFloats out(x.num_rows, columns);
    set.bfloat16->round(x.rows(), 2, 7, out.rows());
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t k = 0; k < out.padded_columns(); ++k) {
        const float value = value_of(*out.rows().at(t, k)),
                    expected = k < columns ? bfloat_twin(x.at(t, k)) : 0.0f;
        if (t < 2 || t >= 7)
          CHECK(*out.rows().at(t, k) == BFloats::kUntouched, "%s wrote row %ld", set.name, long{t});
        else if (std::isnan(expected))
          CHECK(std::isnan(value), "%s row %ld column %ld", set.name, long{t}, long{k});
        else
          CHECK(same_bits(value, expected), "%s: %a of %a", set.name, value, x.at(t, k));
      }
  }
}

Matrix multiply(const Kernels& set, bool is_swiglu, BFloats x, int num_rows, const Panels& w, int64_t cut) {
  const int64_t halves = is_swiglu ? 2 : 1;
  Matrix out(num_rows, w.num_rows / halves);
  const auto run = [&](int64_t first, int64_t last) {
    if (is_swiglu)
      set.bfloat16->linear_swiglu(x.rows(), num_rows, w, first, last, out.rows(), nullptr);
    else
      set.bfloat16->linear(x.rows(), num_rows, w, first, last, out.rows());
  };
  run(0, cut);
  run(cut, w.num_panels() / halves);
  return out;
}

// All numbers of rows, alone and among others, panels cut in any two.
void check_products(const Kernels& set, Kind kind, int64_t outputs, int64_t columns, Matrix x) {
  const gguf_twin::Rows weights(kind, outputs, columns, 3);
  const std::vector<float> floats = weights.floats();
  const PackedMatrix packed = weights.pack();
  const BFloats rounded = round_rows(set, x);
  const char* name = info_of(kind).name;
  Matrix twin(x.num_rows, outputs);
  for (int64_t t = 0; t < x.num_rows; ++t)
    for (int64_t n = 0; n < outputs; ++n)
      twin.at(t, n) = sum_twin(
          set.fused, columns, [&](int64_t k) { return bfloat_twin(x.at(t, k)); },
          [&](int64_t k) { return bfloat_twin(floats[static_cast<size_t>(n * columns + k)]); });
  const bool gates = outputs % (2 * kLanes) == 0;
  Matrix gated(x.num_rows, outputs / 2);
  if (gates) {
    Rows up = twin.rows();
    up.data += outputs / 2;
    set.swiglu(twin.rows(), up, static_cast<int>(outputs / 2), 0, x.num_rows, gated.rows());
  }
  for (int rows = 1; rows <= x.num_rows; rows += rows < 34 ? 1 : 29) {
    const int64_t panels = packed.panels().num_panels();
    const Matrix out = multiply(set, false, rounded, rows, packed.panels(), rows % (panels + 1));
    for (int64_t t = 0; t < rows; ++t)
      CHECK(out.same_row(t, twin, t), "%s %s %ld x %ld, row %ld of %d", set.name, name, long{outputs},
            long{columns}, long{t}, rows);
    CHECK(out.fence_holds(), "%s %s wrote beyond", set.name, name);
    if (!gates) continue;
    const Matrix half = multiply(set, true, rounded, rows, packed.panels(), rows % (panels / 2 + 1));
    for (int64_t t = 0; t < rows; ++t)
      CHECK(half.same_row(t, gated, t), "%s %s gates %ld x %ld, row %ld of %d", set.name, name, long{outputs},
            long{columns}, long{t}, rows);
    CHECK(half.fence_holds(), "%s %s gates wrote beyond", set.name, name);
  }
}

constexpr Kind kKinds[] = {Kind::kF32,  Kind::kF16,  Kind::kBF16, Kind::kQ4_0, Kind::kQ4_1, Kind::kQ5_0,
                           Kind::kQ5_1, Kind::kQ8_0, Kind::kQ4_K, Kind::kQ5_K, Kind::kQ6_K};

void test_products(const Kernels& set) {
  for (const Kind kind : kKinds) {
    const int64_t unit = info_of(kind).block_columns;
    for (const int64_t columns : {unit == 1 ? int64_t{77} : unit, 3 * std::max<int64_t>(unit, 32)})
      for (const int64_t outputs : {33, 96})
        check_products(set, kind, outputs, columns, Matrix::random(35, columns, 2, 2.0f));
  }
  // Several chunks of columns, and more rows than go together.
  check_products(set, Kind::kQ4_1, 32, 1600, Matrix::random(18, 1600, 4));
  check_products(set, Kind::kF32, 64, 97, Matrix::random(150, 97, 5));
}

// Numbers so small that a machine may take their products for zeros, were they not zeros before.
void test_small_numbers(const Kernels& set) {
  for (const Kind kind : {Kind::kF32, Kind::kBF16}) {
    constexpr int64_t kColumns = 64, kOutputs = 32;
    std::vector<float> plain(kOutputs * kColumns);
    Random random(6);
    for (float& value : plain) value = std::ldexp(random.uniform(), -static_cast<int>(random.below(100)));
    std::vector<uint16_t> shorts;
    for (const float value : plain) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      shorts.push_back(static_cast<uint16_t>(bits >> 16));
    }
    if (kind == Kind::kBF16)
      for (size_t i = 0; i < plain.size(); ++i) plain[i] = value_of(shorts[i]);
    const Part part{kind == Kind::kF32 ? static_cast<const void*>(plain.data()) : shorts.data(), kOutputs,
                    kind};
    const PackedMatrix packed({&part, 1}, kColumns);
    Matrix x = Matrix::random(19, kColumns, 7);
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t k = 0; k < kColumns; ++k)
        x.at(t, k) = std::ldexp(x.at(t, k), -static_cast<int>(random.below(100)));
    const Matrix out = multiply(set, false, round_rows(set, x), 19, packed.panels(), 0);
    for (int64_t t = 0; t < x.num_rows; ++t)
      for (int64_t n = 0; n < kOutputs; ++n) {
        const float expected = sum_twin(
            set.fused, kColumns, [&](int64_t k) { return bfloat_twin(x.at(t, k)); },
            [&](int64_t k) { return bfloat_twin(plain[static_cast<size_t>(n * kColumns + k)]); });
        CHECK(same_bits(out.at(t, n), expected), "%s: %a, not %a", set.name, out.at(t, n), expected);
      }
  }
}

// Also where all of a NaN's own bits are in the half that is cut off; in either place of a pair of columns.
void test_a_nan_stays_one(const Kernels& set) {
  constexpr int64_t kColumns = 32;
  for (const uint32_t bits : {0x7f800001u, 0xff80ffffu, 0x7fc00000u, 0x7fffffffu})
    for (const int64_t column : {6, 7}) {
      float nan;
      std::memcpy(&nan, &bits, sizeof nan);
      std::vector<float> plain(16 * kColumns, 1.0f);
      std::memcpy(&plain[static_cast<size_t>(3 * kColumns + column)], &nan, sizeof nan);
      const PackedMatrix packed = pack_one(plain, kColumns);
      Matrix x(2, kColumns);
      for (int64_t k = 0; k < kColumns; ++k) x.at(0, k) = x.at(1, k) = 1.0f;
      std::memcpy(&x.at(1, column), &nan, sizeof nan);
      BFloats rounded = round_rows(set, x);
      CHECK(std::isnan(value_of(*rounded.rows().at(1, column))), "%s made %08x a number", set.name, bits);
      const Matrix out = multiply(set, false, rounded, 2, packed.panels(), 0);
      for (int64_t n = 0; n < 16; ++n) {
        CHECK(std::isnan(out.at(0, n)) == (n == 3), "%s: %08x in a weight, result %ld", set.name, bits,
              long{n});
        CHECK(std::isnan(out.at(1, n)), "%s: %08x in a row, result %ld", set.name, bits, long{n});
      }
    }
}

// What is not a number, or infinite, stays in its row.
void test_rows_are_alone(const Kernels& set) {
  const gguf_twin::Rows weights(Kind::kQ4_1, 32, 96, 8);
  const PackedMatrix packed = weights.pack();
  Matrix x = Matrix::random(20, 96, 9);
  const Matrix clean = multiply(set, false, round_rows(set, x), 20, packed.panels(), 1);
  x.at(3, 40) = kNaN;
  x.at(17, 0) = kInf;
  const Matrix out = multiply(set, false, round_rows(set, x), 20, packed.panels(), 1);
  for (int64_t t = 0; t < 20; ++t)
    if (t == 3)
      CHECK(std::isnan(out.at(3, 0)), "%s lost a NaN", set.name);
    else if (t == 17)
      CHECK(!std::isfinite(out.at(17, 0)), "%s lost an infinity", set.name);
    else
      CHECK(out.same_row(t, clean, t), "%s row %ld", set.name, long{t});
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine()) {
    test_round(*set);
    test_products(*set);
    test_small_numbers(*set);
    test_rows_are_alone(*set);
    test_a_nan_stays_one(*set);
  }
  return report();
}
