// Any machine: four vectors of 4 lanes in the compilers' own vector types (SSE2 on x86). Multiplies, then
// adds.
#pragma once

#include <cstdint>
#include <cstring>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  typedef float Vec __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kFused = false;

  PAGECAST_INLINE Vec broadcast(float value) { return Vec{value, value, value, value}; }
  PAGECAST_INLINE Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  PAGECAST_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
  PAGECAST_INLINE Vec load_n(const float* from, int n) {
    Vec v = {};
    for (int i = 0; i < n && i < kWidth; ++i) v[i] = from[i];
    return v;
  }
  PAGECAST_INLINE void store_n(float* to, Vec v, int n) {
    for (int i = 0; i < n && i < kWidth; ++i) to[i] = v[i];
  }
  PAGECAST_INLINE Vec add(Vec a, Vec b) { return a + b; }
  PAGECAST_INLINE Vec sub(Vec a, Vec b) { return a - b; }
  PAGECAST_INLINE Vec mul(Vec a, Vec b) { return a * b; }
  PAGECAST_INLINE Vec div(Vec a, Vec b) { return a / b; }
  PAGECAST_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  PAGECAST_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
  PAGECAST_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
  PAGECAST_INLINE Vec sqrt(Vec a) {
    for (int i = 0; i < kWidth; ++i) a[i] = __builtin_sqrtf(a[i]);
    return a;
  }
  PAGECAST_INLINE Mask less(Vec a, Vec b) { return a < b; }
  PAGECAST_INLINE Vec select(Mask where, Vec yes, Vec no) { return where ? yes : no; }

  PAGECAST_INLINE Mask first_n(int n) {
    const Mask lane = {0, 1, 2, 3};
    return lane < Mask{n, n, n, n};
  }

  // v times 2^n, n being the integer in the lowest bits of `shifted`.
  PAGECAST_INLINE Vec add_to_exponent(Vec v, Vec shifted) { return (Vec)((Bits)v + ((Bits)shifted << 23)); }

  PAGECAST_INLINE float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

  PAGECAST_INLINE float max_lane(Vec v) {
    const float even = v[0] > v[2] ? v[0] : v[2];
    const float odd = v[1] > v[3] ? v[1] : v[3];
    return even > odd ? even : odd;
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
