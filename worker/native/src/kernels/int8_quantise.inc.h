// Rows of activations to eight bits.
#pragma once

#include "../int8.h"
#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

void quantise(Rows x, int offset, int64_t first, int64_t last, Int8Rows out) {
  const int64_t num_groups = out.num_groups();
  for (int64_t t = first; t < last; ++t)
    for (int64_t g = 0; g < num_groups; ++g) {
      const float* from = x.row(t) + g * kGroup;
      const F16 low = load(from), high = load(from + kLanes);
      // A NaN may get lost here. But it, or an infinity that is times 0, makes a NaN of `sum8`.
      const float largest = max_lane(max(absolute(low), absolute(high)));
      const F16 factor = broadcast(largest >= 0x1p-120f ? 127.0f / largest : 0.0f);
      F16 low8 = round_even(low * factor), high8 = round_even(high * factor);
      // Sums of small integers, so exact as floats.
      float sum8 = sum(low8 + high8), scale = largest / 127.0f;
      if (__builtin_isnan(sum8)) {
        low8 = high8 = zero();
        sum8 = 0;
        scale = __builtin_nanf("");
      }
      int8_t* quants = out.quants + t * out.num_columns + g * kGroup;
      store_int8(quants, low8);
      store_int8(quants + kLanes, high8);
      const int64_t at = t * num_groups + g;
      out.scales[at] = scale;
      out.scaled_sums[at] = scale * sum8;
      out.biases[2 * at] = -offset * static_cast<int32_t>(sum8);
      out.biases[2 * at + 1] = offset == 0 ? 0 : -offset * static_cast<int32_t>(sum(high8));
    }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
