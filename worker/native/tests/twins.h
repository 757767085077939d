// What the kernels compute, the plain way and in double where they add up.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "../src/pack.h"
#include "matrix.h"

inline std::vector<float> random_floats(int64_t count, uint64_t seed) {
  std::vector<float> out(static_cast<size_t>(count));
  Random random(seed);
  for (float& value : out) value = random.uniform();
  return out;
}

inline pagecast::PackedMatrix pack_one(const std::vector<float>& plain, int64_t num_columns) {
  const pagecast::Part part{plain.data(), static_cast<int64_t>(plain.size()) / num_columns};
  return pagecast::PackedMatrix({&part, 1}, num_columns);
}

// A weight as rows and in panels.
struct TestWeight {
  TestWeight(int64_t num_rows, int64_t num_columns, uint64_t seed)
      : plain(random_floats(num_rows * num_columns, seed)), packed(pack_one(plain, num_columns)) {}

  float at(int64_t n, int64_t k) const { return plain[static_cast<size_t>(n * packed.num_columns() + k)]; }

  std::vector<float> plain;
  pagecast::PackedMatrix packed;
};

// A sum and how far a chain of rounded multiply-adds may be off it.
struct Sum {
  double value;
  double tolerance;
};

inline Sum dot_twin(const Matrix& x, int64_t t, const TestWeight& w, int64_t n) {
  double value = 0, size = 0;
  for (int64_t k = 0; k < x.width; ++k) {
    const double product = static_cast<double>(x.at(t, k)) * w.at(n, k);
    value += product;
    size += std::fabs(product);
  }
  return {value, std::ldexp(static_cast<double>(2 * x.width) * size, -24)};
}

inline double silu_twin(double g) { return g / (1 + std::exp(-g)); }

// One row of rms_norm.
inline std::vector<double> rms_norm_twin(const Matrix& x, int64_t t, const float* weight, float eps) {
  double squares = 0;
  for (int64_t k = 0; k < x.width; ++k) squares += static_cast<double>(x.at(t, k)) * x.at(t, k);
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.width) + static_cast<double>(eps));
  std::vector<double> out;
  for (int64_t k = 0; k < x.width; ++k) out.push_back(x.at(t, k) * scale * weight[k]);
  return out;
}

// One row of rope, to the bit: every product and sum is rounded.
inline std::vector<float> rope_twin(const Matrix& x, int64_t t, int head_size, int32_t position,
                                    const std::vector<float>& cos, const std::vector<float>& sin) {
  std::vector<float> out(static_cast<size_t>(x.width));
  for (int64_t at = 0; at < x.width; at += 2) {
    const auto angle = static_cast<size_t>(position * (head_size / 2) + at % head_size / 2);
    const float a = x.at(t, at), b = x.at(t, at + 1);
    out[static_cast<size_t>(at)] = a * cos[angle] - b * sin[angle];
    out[static_cast<size_t>(at + 1)] = a * sin[angle] + b * cos[angle];
  }
  return out;
}

inline bool close(double actual, double expected, double relative = 1e-6, double absolute = 1e-30) {
  return std::fabs(actual - expected) <= std::fabs(expected) * relative + absolute;
}
