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
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef int16_t Pairs __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 16;
  static constexpr int kRegistersOfDots = 1;
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

  // As many numbers of 8 or 16 bits as there are lanes: those with a sign, these without; their lowest bits.
  PAGECAST_INLINE Ints load_chars(const int8_t* from) { return Ints{from[0], from[1], from[2], from[3]}; }
  PAGECAST_INLINE void store_chars(int8_t* to, Ints v) {
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<int8_t>(v[i]);
  }
  PAGECAST_INLINE Ints load_shorts(const uint16_t* from) { return Ints{from[0], from[1], from[2], from[3]}; }
  PAGECAST_INLINE void store_shorts(uint16_t* to, Ints v) {
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<uint16_t>(v[i]);
  }

  PAGECAST_INLINE Vec load_half(const uint16_t* from) {
    Bits half = (Bits)load_shorts(from);
    const Bits sign = (half & 0x8000u) << 16;
    half = (half & 0x7fffu) << 13;
    // Read as a float it has an exponent 112 too small, also where it is subnormal; but infinities and NaN
    // have the largest one.
    const Bits finite = (Bits)((Vec)half * 0x1p112f);
    const Bits is_finite = (Bits)(half < 0x0f800000u);
    return (Vec)(sign | (is_finite & finite) | (~is_finite & (half | 0x7f800000u)));
  }
  PAGECAST_INLINE void store_half(uint16_t* to, Vec v) {
    const Bits bits = (Bits)v, size = bits & 0x7fffffffu;
    // From 0.5 to 1 floats are as far apart as subnormal float16 are.
    const Bits small = (Bits)((Vec)size + 0.5f) - 0x3f000000u;
    const Bits normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    const Bits nan = 0x7e00u | (size >> 13 & 0x1ffu);
    const Bits is_small = (Bits)(size < 0x38800000u), is_large = (Bits)(size >= 0x477ff000u);
    const Bits is_nan = (Bits)(size > 0x7f800000u);
    const Bits finite = (is_small & small) | (~is_small & normal);
    const Bits half = (is_nan & nan) | (~is_nan & ((is_large & 0x7c00u) | (~is_large & finite)));
    store_shorts(to, (Ints)(half | (bits >> 16 & 0x8000u)));
  }

  // Products of bytes without a sign (15 at most) and bytes with one (-127 at least), four of a lane summed,
  // exactly. A sum takes eight `dot`s.
  static constexpr bool kNibblesOnly = true;
  using Dots = Pairs;  // in 16 bits: 8 * 2 * 15 * 127 fits
  PAGECAST_INLINE Dots start_dots(int32_t) { return Pairs{}; }
  PAGECAST_INLINE Dots dot(Dots sum, Ints bytes, int32_t four) {
    const Pairs low = (Pairs)(bytes & 0x00ff00ff), high = (Pairs)((Bits)bytes >> 8 & 0x00ff00ffu);
    const Ints fours = {four, four, four, four};
    const Pairs signed_high = (Pairs)fours >> 8, signed_low = (Pairs)((Pairs)fours << 8) >> 8;
    return sum + low * signed_low + high * signed_high;
  }
  PAGECAST_INLINE Ints finish_dots(Dots sum, int32_t bias) {
    return ((Ints)((Bits)sum << 16) >> 16) + ((Ints)sum >> 16) + bias;
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
