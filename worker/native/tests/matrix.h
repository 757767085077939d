// Rows for tests: random, in padding that gives itself away.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../src/kernels.h"

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// The same numbers on every machine, whatever its library's distributions do.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

  // In [0, bound).
  int64_t below(int64_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(bound));
  }

  // In (-limit, limit).
  float uniform(float limit = 1.0f) {
    return limit * static_cast<float>(below(1 << 24) - (1 << 23)) / static_cast<float>(1 << 23);
  }

 private:
  uint64_t state_;
};

// `num_rows` rows of `width` floats, one vector more than the padding each row needs apart. What is not a
// row's own holds NaN, so a result that read it shows; a kernel may write it up to a multiple of kLanes.
class Matrix {
 public:
  Matrix(int64_t num_rows, int64_t width)
      : num_rows(num_rows),
        width(width),
        stride(pagecast::round_up(width) + pagecast::kLanes),
        data_(static_cast<size_t>(num_rows * stride), kNaN) {}

  static Matrix random(int64_t num_rows, int64_t width, uint64_t seed, float limit = 1.0f) {
    Matrix out(num_rows, width);
    Random random(seed);
    for (int64_t t = 0; t < num_rows; ++t)
      for (int64_t k = 0; k < width; ++k) out.at(t, k) = random.uniform(limit);
    return out;
  }

  float& at(int64_t t, int64_t k) { return data_[static_cast<size_t>(t * stride + k)]; }
  float at(int64_t t, int64_t k) const { return data_[static_cast<size_t>(t * stride + k)]; }
  pagecast::Rows rows(int64_t first = 0) { return {data_.data() + first * stride, stride}; }

  bool same_row(int64_t t, const Matrix& other, int64_t other_t) const {
    return std::memcmp(&data_[static_cast<size_t>(t * stride)],
                       &other.data_[static_cast<size_t>(other_t * other.stride)],
                       static_cast<size_t>(width) * sizeof(float)) == 0;
  }

  bool same(const Matrix& other) const {
    if (num_rows != other.num_rows || width != other.width) return false;
    for (int64_t t = 0; t < num_rows; ++t)
      if (!same_row(t, other, t)) return false;
    return true;
  }

  // Whether nothing was written past the padding that a kernel may fill.
  bool fence_holds() const {
    for (int64_t t = 0; t < num_rows; ++t)
      for (int64_t k = pagecast::round_up(width); k < stride; ++k)
        if (!std::isnan(at(t, k))) return false;
    return true;
  }

  // Whether row t was never written.
  bool untouched(int64_t t) const {
    for (int64_t k = 0; k < stride; ++k)
      if (!std::isnan(at(t, k))) return false;
    return true;
  }

  const int64_t num_rows;
  const int64_t width;
  const int64_t stride;

 private:
  std::vector<float> data_;
};
