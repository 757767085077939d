// Products of quantised weights with activations that are rounded to eight bits, group by group.
//
// A group of kGroup elements of a row of activations becomes, with a = the largest |x|:
//   sx = a / 127;  x8 = round(x * (127 / a)), halves to even, all 0 where a < 2^-120
// and sx is NaN, x8 all 0, where an element is infinite or NaN. A product is a chain over groups, ascending,
// from 0:
//   y = fma(d * sx, float(sum of (q - offset) * x8), y)     the sum is exact; of Q6_K once for each half
//   y = fma(min, sx * float(sum of x8), y)                  where the format has a min
// with d and min as float32. So no bit depends on how rows and panels are cut into tiles, nor on whether the
// machine adds four products at once. Source of the scheme: Dettmers et al., "LLM.int8()" (2022),
// arXiv:2208.07339, with groups as GGUF's Q8_0 has them.
#pragma once

#include "kernels.h"

namespace pagecast {

// Rows of activations in eight bits, dense: row t's quants are at quants + t * num_columns, its groups' at
// t * num_groups. num_columns is a multiple of kGroup.
struct Int8Rows {
  int8_t* quants;      // 64-byte aligned
  float* scales;       // sx
  float* scaled_sums;  // sx * float(sum of x8)
  int32_t* biases;     // -offset * (sum of x8), two of a group: of all of it, and of its second half
  int64_t num_columns;
  PAGECAST_MEMBER int64_t num_groups() const { return num_columns / kGroup; }
};

struct Int8Kernels {
  // By rows. `offset` is that of the weight which the rows will be multiplied with.
  void (*quantise)(Rows x, int offset, int64_t first, int64_t last, Int8Rows out);
  // As Kernels' linear and linear_swiglu, by format; null for formats that are not quantised.
  void (*linear[kNumFormats])(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last,
                              Rows out);
  void (*linear_swiglu[kNumFormats])(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last,
                                     Rows out);
};

}  // namespace pagecast
