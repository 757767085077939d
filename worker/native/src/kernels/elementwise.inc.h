// Row by row: sums, gating, and rows copied from elsewhere.
#pragma once

#include <cstring>

#include "silu.inc.h"
#include "weights.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

void add(Rows x, Rows y, int width, int64_t first, int64_t last, Rows out) {
  for (int64_t t = first; t < last; ++t)
    for (int k = 0; k < width; k += kLanes) {
      const int n = width - k;
      store_n(out.row(t) + k, load_n(x.row(t) + k, n) + load_n(y.row(t) + k, n), n);
    }
}

void swiglu(Rows gate, Rows up, int width, int64_t first, int64_t last, Rows out) {
  for (int64_t t = first; t < last; ++t)
    for (int k = 0; k < width; k += kLanes) {
      const int n = width - k;
      store_n(out.row(t) + k, silu(load_n(gate.row(t) + k, n)) * load_n(up.row(t) + k, n), n);
    }
}

void embedding(const Panels& w, const int32_t* token_ids, int64_t first, int64_t last, Rows out) {
  for (int64_t t = first; t < last; ++t) {
    const int64_t panel = token_ids[t] / kLanes, lane = token_ids[t] % kLanes;
    float* row = out.row(t);
    if (w.format == Format::kFloat32) {
      const float* column = w.floats(panel) + lane;
      for (int64_t k = 0; k < w.num_columns; ++k) row[k] = column[k * kLanes];
      continue;
    }
    alignas(64) float columns[kGroup * kLanes];
    for (int64_t k = 0; k < w.num_columns; k += kGroup) {
      const int64_t count = k + kGroup < w.num_columns ? kGroup : w.num_columns - k;
      unpack(w, panel, k, k + count, columns);
      for (int64_t i = 0; i < count; ++i) row[k + i] = columns[i * kLanes + lane];
    }
  }
}

void select_rows(Rows x, const int32_t* index, int width, int64_t first, int64_t last, Rows out) {
  for (int64_t i = first; i < last; ++i)
    std::memcpy(out.row(i), x.row(index[i]), static_cast<size_t>(width) * sizeof(float));
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
