// Rows in bfloat16 and what products of them give, number by number as bfloat16.h says.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../src/bfloat16.h"
#include "matrix.h"

// bf(x): of the two nearest numbers of eight significant bits the nearer one, the even one of two as near.
inline float bfloat_twin(float x) {
  if (std::isnan(x) || std::isinf(x)) return x;
  int exponent;
  const double fraction = std::frexp(static_cast<double>(x), &exponent);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
  if (std::fabs(rounded) < static_cast<double>(pagecast::kLeastBFloat)) return 0.0f;
  return std::fabs(rounded) >= std::ldexp(1.0, 128) ? std::copysign(kInf, x) : static_cast<float>(rounded);
}

inline float value_of(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// A sum in blocks, of two chains each, a rounding where the set has one. x[k] and w[k] are bfloat16.
template <typename X, typename W>
float sum_twin(bool fused, int64_t num_columns, X x, W w) {
  const auto fma = [fused](float a, float b, float c) {
    const volatile float product = a * b;
    return fused ? std::fma(a, b, c) : product + c;
  };
  float y = 0;
  for (int64_t first = 0; first < num_columns; first += pagecast::kSumColumns) {
    float chain[2] = {0, 0};
    for (int64_t k = first; k < first + pagecast::kSumColumns && k < num_columns; ++k)
      chain[k % 2] = fma(x(k), w(k), chain[k % 2]);
    const volatile float both = chain[0] + chain[1];
    y = y + both;
  }
  return y;
}

// Memory for rows in bfloat16, with what no product may read in it.
class BFloats {
 public:
  BFloats(int64_t num_rows, int64_t num_columns)
      : num_columns_(num_columns),
        tiles_(static_cast<size_t>((num_rows + 15) / 16 *
                                   pagecast::BFloat16Rows{nullptr, num_columns}.num_tiles())) {
    for (Tile& tile : tiles_)
      for (uint16_t& bits : tile.numbers) bits = kUntouched;
  }
  pagecast::BFloat16Rows rows() { return {tiles_.empty() ? nullptr : tiles_.front().numbers, num_columns_}; }
  int64_t padded_columns() { return rows().num_tiles() * pagecast::kSumColumns; }

  static constexpr uint16_t kUntouched = 0x7fc1;  // NaN

 private:
  struct alignas(64) Tile {
    uint16_t numbers[pagecast::BFloat16Rows::kTileNumbers];
  };
  int64_t num_columns_;
  std::vector<Tile> tiles_;
};

inline BFloats round_rows(const pagecast::Kernels& set, Matrix& x) {
  BFloats out(x.num_rows, x.width);
  set.bfloat16->round(x.rows(), 0, x.num_rows, out.rows());
  return out;
}
