// What a set's kernels do for a draw of tokens: they scan logits and weigh them. See draw.h.
#pragma once

#include <cstdint>

#include "panels.h"

namespace pagecast {

inline constexpr int kDrawSpan = 256;

struct LogitScan {
  float largest;       // anything where not all are finite
  bool all_finite;     // -inf is not
  int64_t first_span;  // the first that holds `largest`
};

struct DrawKernels {
  // `maxima` gets kLanes numbers for each span of kDrawSpan logits: number i is the largest of the span's
  // logits i, i + kLanes, i + 2 * kLanes, ..., -inf where there is none.
  void (*scan)(const float* logits, int64_t count, float* maxima, LogitScan* found);
  // weights[i] = exp((logits[i] - largest) * scale), exactly 1 for the largest and exactly 0 where the power
  // is below -708; count <= kDrawSpan. Up to a multiple of kLanes the rest of `weights` is set to 0. Returns
  // their sum, added as draw.h says.
  double (*weigh)(const float* logits, int count, double largest, double scale, double* weights);
};

}  // namespace pagecast
