// Attention in bfloat16, the plain way and to the bit: what every set that fuses gives.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention_case.h"
#include "bfloat16_case.h"

// The kernels' e^x, operation by operation, of x <= 0 and NaN.
inline float exp_twin(float x) {
  if (x < -87.33f) return 0.0f;
  if (std::isnan(x)) return x;
  const float n = std::fma(x, 1.44269504f, 12582912.0f) - 12582912.0f;
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  for (const float term :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = std::fma(p, r, term);
  p = std::fma(p, r * r, r) + 1.0f;
  return std::ldexp(p, static_cast<int>(n));
}

// Pairwise: 16, 8, 4, 2, 1 lanes of groups 0 + 1 and 2 + 3.
inline float lanes_sum_twin(const float (&p)[64]) {
  float lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = (p[i] + p[16 + i]) + (p[32 + i] + p[48 + i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// Results of one query and head.
inline std::vector<float> bfloat16_twin(AttentionCase& rows, int64_t row, int query, int head) {
  const pagecast::KvShape& shape = rows.shape;
  const int h = head / (shape.num_heads / shape.num_kv_heads), size = shape.head_size;
  const auto& lengths = rows.rows[static_cast<size_t>(row)];
  const int last = lengths.context - lengths.num_queries + query;
  const float* from = rows.q.data() + (rows.query_start[static_cast<size_t>(row)] + query) * rows.width +
                      int64_t{head} * size;
  std::vector<float> q, total(static_cast<size_t>(size));
  for (int d = 0; d < size; ++d) q.push_back(bfloat_twin(from[d]));
  float total_m = 0, total_l = 0;
  for (int start = 0; start <= last; start += 64) {
    const int live = std::min(64, last + 1 - start);
    float s[64], p[64] = {}, weight[64];
    float m = -kInf;
    for (int t = 0; t < live; ++t) {
      const int64_t slot = rows.slot(row, start + t);
      s[t] = sum_twin(
          true, size, [&](int64_t d) { return q[static_cast<size_t>(d)]; },
          [&](int64_t d) { return bfloat_twin(rows.pool.element(true, slot, h, d)); });
      if (shape.type == pagecast::KvType::kInt8) s[t] *= rows.pool.scale(true, slot, h);
      s[t] *= rows.scale;
      m = std::max(m, s[t]);
    }
    for (int t = 0; t < live; ++t) {
      p[t] = exp_twin(s[t] - m);
      weight[t] = bfloat_twin(p[t] * rows.pool.scale(false, rows.slot(row, start + t), h));
    }
    const float l = lanes_sum_twin(p);
    const float peak = start == 0 ? m : std::max(total_m, m);
    const float total_share = start == 0 ? 0.0f : exp_twin(total_m - peak), share = exp_twin(m - peak);
    total_m = peak;
    total_l = start == 0 ? l : std::fma(l, share, total_l * total_share);
    for (int d = 0; d < size; ++d) {
      const float acc = sum_twin(
          true, live, [&](int64_t t) { return weight[t]; },
          [&](int64_t t) { return bfloat_twin(rows.pool.element(false, rows.slot(row, start + t), h, d)); });
      float& sum = total[static_cast<size_t>(d)];
      sum = start == 0 ? acc : std::fma(acc, share, sum * total_share);
    }
  }
  for (float& x : total) x /= total_l;
  return total;
}
