// F16: sixteen float lanes, whatever the machine's registers hold, and the operations that kernels are
// written in.
//
// Include after one of simd/*.h, which defines `Native`: its register, its mask and the operations on them.
// All of it sits in an unnamed namespace within pagecast::PAGECAST_SET, so sets never share a function.
// Lane i of a result depends on lane i of the operands alone and `sum` adds in one fixed order: sets that
// fuse give the same bits as each other. Needs -ffp-contract=off, so that nothing is fused but `fma`.
#pragma once

#include "kernels.h"

#ifndef PAGECAST_SET
#error "define PAGECAST_SET and include one of simd/*.h first"
#endif

#define PAGECAST_EACH_PART _Pragma("GCC unroll 4") for (int part = 0; part < kParts; ++part)

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kParts = kLanes / Native::kWidth;

struct F16 {
  Native::Vec part[kParts];
};

// What a comparison of lanes gives.
struct M16 {
  Native::Mask part[kParts];
};

PAGECAST_INLINE F16 broadcast(float value) {
  F16 out;
  PAGECAST_EACH_PART out.part[part] = Native::broadcast(value);
  return out;
}

PAGECAST_INLINE F16 zero() { return broadcast(0.0f); }

// `from` needs no alignment.
PAGECAST_INLINE F16 load(const float* from) {
  F16 out;
  PAGECAST_EACH_PART out.part[part] = Native::load(from + part * Native::kWidth);
  return out;
}

PAGECAST_INLINE void store(float* to, F16 value) {
  PAGECAST_EACH_PART Native::store(to + part * Native::kWidth, value.part[part]);
}

// The first n lanes (n <= 0: none, n >= 16: all), zeros in the rest; touches no memory beyond them.
PAGECAST_INLINE F16 load_n(const float* from, int n) {
  if (n >= kLanes) return load(from);
  F16 out;
  PAGECAST_EACH_PART out.part[part] = Native::load_n(from + part * Native::kWidth, n - part * Native::kWidth);
  return out;
}

PAGECAST_INLINE void store_n(float* to, F16 value, int n) {
  if (n >= kLanes) return store(to, value);
  PAGECAST_EACH_PART Native::store_n(to + part * Native::kWidth, value.part[part], n - part * Native::kWidth);
}

PAGECAST_INLINE F16 operator+(F16 a, F16 b) {
  PAGECAST_EACH_PART a.part[part] = Native::add(a.part[part], b.part[part]);
  return a;
}

PAGECAST_INLINE F16 operator-(F16 a, F16 b) {
  PAGECAST_EACH_PART a.part[part] = Native::sub(a.part[part], b.part[part]);
  return a;
}

PAGECAST_INLINE F16 operator*(F16 a, F16 b) {
  PAGECAST_EACH_PART a.part[part] = Native::mul(a.part[part], b.part[part]);
  return a;
}

PAGECAST_INLINE F16 operator/(F16 a, F16 b) {
  PAGECAST_EACH_PART a.part[part] = Native::div(a.part[part], b.part[part]);
  return a;
}

// a * b + c, rounded once where Native::kFused, else twice.
PAGECAST_INLINE F16 fma(F16 a, F16 b, F16 c) {
  PAGECAST_EACH_PART c.part[part] = Native::fma(a.part[part], b.part[part], c.part[part]);
  return c;
}

// a > b ? a : b, so a NaN in b stays and one in a is dropped: keep NaNs alive by other means (a sum).
PAGECAST_INLINE F16 max(F16 a, F16 b) {
  PAGECAST_EACH_PART a.part[part] = Native::max(a.part[part], b.part[part]);
  return a;
}

// a < b ? a : b; NaN as for max.
PAGECAST_INLINE F16 min(F16 a, F16 b) {
  PAGECAST_EACH_PART a.part[part] = Native::min(a.part[part], b.part[part]);
  return a;
}

PAGECAST_INLINE F16 sqrt(F16 a) {
  PAGECAST_EACH_PART a.part[part] = Native::sqrt(a.part[part]);
  return a;
}

// a < b, false where either is NaN.
PAGECAST_INLINE M16 less(F16 a, F16 b) {
  M16 out;
  PAGECAST_EACH_PART out.part[part] = Native::less(a.part[part], b.part[part]);
  return out;
}

// True in the first n lanes (n <= 0: none, n >= 16: all).
PAGECAST_INLINE M16 first_n(int n) {
  M16 out;
  PAGECAST_EACH_PART out.part[part] = Native::first_n(n - part * Native::kWidth);
  return out;
}

PAGECAST_INLINE F16 select(M16 where, F16 yes, F16 no) {
  PAGECAST_EACH_PART no.part[part] = Native::select(where.part[part], yes.part[part], no.part[part]);
  return no;
}

// Lane i with i + 8, then i + 4, i + 2, i + 1.
PAGECAST_INLINE float sum(F16 a) {
  for (int half = kParts / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.part[i] = Native::add(a.part[i], a.part[i + half]);
  return Native::sum(a.part[0]);
}

// The largest lane, in the order of `sum`; NaN as for max.
PAGECAST_INLINE float max_lane(F16 a) {
  for (int half = kParts / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.part[i] = Native::max(a.part[i], a.part[i + half]);
  return Native::max_lane(a.part[0]);
}

// e^x = fraction * 2^n; n is in the lowest bits of `shifted` as well.
struct Exponential {
  F16 fraction;
  F16 n;
  F16 shifted;
};

// After Cephes' expf: x = n ln 2 + r, |r| <= ln(2) / 2, e^r by a polynomial. |x| small enough for n to be an
// integer of 22 bits; whoever has others leaves them out of the result.
PAGECAST_INLINE Exponential split_exp(F16 x) {
  const F16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: a small number added to it is rounded to an
                                             // integer, which then sits in the lowest bits
  const F16 shifted = fma(x, broadcast(1.44269504f), magic);
  const F16 n = shifted - magic;
  // ln 2 in two parts, the first of so few bits that its product with n is exact.
  F16 r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  return {p, n, shifted};
}

// e^x within 2 ulp. Exactly 0 below -87.33 (results are never subnormal), inf from 88.72284 on; NaN stays
// NaN.
PAGECAST_INLINE F16 exp(F16 x) {
  const Exponential e = split_exp(x);
  F16 p = e.fraction;
  PAGECAST_EACH_PART p.part[part] = Native::add_to_exponent(p.part[part], e.shifted.part[part]);
  p = select(less(x, broadcast(88.72284f)), p, x + broadcast(__builtin_inff()));
  return select(less(x, broadcast(-87.33f)), zero(), p);
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET

#include "simd_words.h"
