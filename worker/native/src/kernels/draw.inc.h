// Scans of logits and their weights, see draw.h.
#pragma once

#include "../draw_kernels.h"
#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kSpanVectors = kDrawSpan / kLanes;

PAGECAST_INLINE F16 scan_span(const float* logits, int count, F16& check) {
  const F16 none = broadcast(-__builtin_inff());
  F16 best = none;
  if (count >= kDrawSpan) {
    // Four chains each, so that none waits for the last addition: their number changes no result.
    F16 bests[4] = {none, none, none, none};
    F16 checks[4] = {check, zero(), zero(), zero()};
    for (int v = 0; v < kSpanVectors; v += 4) {
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
        const F16 value = load(logits + (v + i) * kLanes);
        bests[i] = max(value, bests[i]);
        checks[i] = fma(value, zero(), checks[i]);  // NaN from here on for what is not finite
      }
    }
    check = (checks[0] + checks[1]) + (checks[2] + checks[3]);
    return max(max(bests[0], bests[1]), max(bests[2], bests[3]));
  }
  for (int first = 0; first < count; first += kLanes) {
    const F16 value = load_n(logits + first, count - first);
    best = max(select(first_n(count - first), value, none), best);
    check = fma(value, zero(), check);
  }
  return best;
}

PAGECAST_INLINE int64_t first_span_with(const float* maxima, int64_t num_spans, float largest) {
  constexpr int64_t kAtOnce = 8;
  for (int64_t span = 0; span < num_spans; span += kAtOnce) {
    const int64_t end = span + kAtOnce < num_spans ? span + kAtOnce : num_spans;
    F16 best = load(maxima + span * kLanes);
    for (int64_t other = span + 1; other < end; ++other) best = max(load(maxima + other * kLanes), best);
    if (max_lane(best) != largest) continue;
    for (int64_t one = span; one < end; ++one)
      if (max_lane(load(maxima + one * kLanes)) == largest) return one;
  }
  return 0;
}

void scan_logits(const float* logits, int64_t count, float* maxima, LogitScan* found) {
  F16 check = zero();
  F16 best = broadcast(-__builtin_inff());
  int64_t span = 0;
  for (int64_t first = 0; first < count; first += kDrawSpan, ++span) {
    const int64_t left = count - first;
    const F16 of_span =
        scan_span(logits + first, left < kDrawSpan ? static_cast<int>(left) : kDrawSpan, check);
    store(maxima + span * kLanes, of_span);
    best = max(of_span, best);
  }
  found->largest = max_lane(best);
  found->all_finite = sum(check) == 0.0f;
  found->first_span = first_span_with(maxima, span, found->largest);
}

PAGECAST_INLINE double multiply_add(double a, double b, double c) {
  if constexpr (Native::kFused) return __builtin_fma(a, b, c);
  return a * b + c;
}

// e^y within 1 ulp for -708 <= y <= 0, 0 below, exactly 1 at 0: y = n ln 2 + r, |r| <= ln(2) / 2, e^r by its
// Taylor polynomial of degree 13, times 2^n by adding to the exponent.
PAGECAST_INLINE double exp_below(double y) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded to an integer,
                                                 // which then sits in the lowest bits
  const double shifted = multiply_add(y, 1.4426950408889634, kMagic);
  const double n = shifted - kMagic;
  // ln 2 in two parts, the first of so few bits that its product with n is exact.
  double r = multiply_add(n, -0.693147180369123816490, y);
  r = multiply_add(n, -1.90821492927058770002e-10, r);
  double p = 1.0 / 6227020800.0;
  p = multiply_add(p, r, 1.0 / 479001600.0);
  p = multiply_add(p, r, 1.0 / 39916800.0);
  p = multiply_add(p, r, 1.0 / 3628800.0);
  p = multiply_add(p, r, 1.0 / 362880.0);
  p = multiply_add(p, r, 1.0 / 40320.0);
  p = multiply_add(p, r, 1.0 / 5040.0);
  p = multiply_add(p, r, 1.0 / 720.0);
  p = multiply_add(p, r, 1.0 / 120.0);
  p = multiply_add(p, r, 1.0 / 24.0);
  p = multiply_add(p, r, 1.0 / 6.0);
  p = multiply_add(p, r, 0.5);
  p = multiply_add(p, r * r, r) + 1.0;
  const uint64_t bits = __builtin_bit_cast(uint64_t, p) + (__builtin_bit_cast(uint64_t, shifted) << 52);
  return y < -708.0 ? 0.0 : __builtin_bit_cast(double, bits);
}

double weigh_logits(const float* logits, int count, double largest, double scale, double* weights) {
  for (int i = 0; i < count; ++i) weights[i] = exp_below((static_cast<double>(logits[i]) - largest) * scale);
  const int end = static_cast<int>(round_up(count));
  for (int i = count; i < end; ++i) weights[i] = 0.0;
  double lanes[kLanes] = {};
  for (int first = 0; first < end; first += kLanes)
    for (int i = 0; i < kLanes; ++i) lanes[i] += weights[first + i];
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

constexpr DrawKernels kDraw = {.scan = scan_logits, .weigh = weigh_logits};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
