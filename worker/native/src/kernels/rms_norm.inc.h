// out = x / sqrt(mean(x^2) + eps) * weight. Source: Zhang and Sennrich (2019), arXiv:1910.07467.
#pragma once

#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

PAGECAST_INLINE void scale_by_root_mean_square(const float* x, F16 squares, const float* weight, int width,
                                               float eps, float* out) {
  const float mean = sum(squares) / static_cast<float>(width);
  const F16 scale = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for (int k = 0; k < width; k += kLanes) {
    const int n = width - k;
    store_n(out + k, load_n(x + k, n) * scale * load_n(weight + k, n), n);
  }
}

void rms_norm(Rows x, const float* weight, int width, float eps, int64_t first, int64_t last, Rows out) {
  for (int64_t t = first; t < last; ++t) {
    const float* row = x.row(t);
    F16 squares = zero();
    for (int k = 0; k < width; k += kLanes) {
      const F16 value = load_n(row + k, width - k);
      squares = fma(value, value, squares);
    }
    scale_by_root_mean_square(row, squares, weight, width, eps, out.row(t));
  }
}

void add_rms_norm(Rows x, Rows y, const float* weight, int width, float eps, int64_t first, int64_t last,
                  Rows sum, Rows out) {
  for (int64_t t = first; t < last; ++t) {
    F16 squares = zero();
    for (int k = 0; k < width; k += kLanes) {
      const int n = width - k;
      const F16 value = load_n(x.row(t) + k, n) + load_n(y.row(t) + k, n);
      store_n(sum.row(t) + k, value, n);
      squares = fma(value, value, squares);
    }
    scale_by_root_mean_square(sum.row(t), squares, weight, width, eps, out.row(t));
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
