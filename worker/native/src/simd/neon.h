// AArch64 NEON: four registers of 4 lanes.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  using Vec = float32x4_t;
  using Mask = uint32x4_t;
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 32;
  static constexpr int kRegistersOfDots = 2;
  static constexpr bool kFused = true;

  PAGECAST_INLINE Vec broadcast(float value) { return vdupq_n_f32(value); }
  PAGECAST_INLINE Vec load(const float* from) { return vld1q_f32(from); }
  PAGECAST_INLINE void store(float* to, Vec v) { vst1q_f32(to, v); }
  PAGECAST_INLINE Vec load_n(const float* from, int n) {
    float lanes[kWidth] = {};
    for (int i = 0; i < n && i < kWidth; ++i) lanes[i] = from[i];
    return vld1q_f32(lanes);
  }
  PAGECAST_INLINE void store_n(float* to, Vec v, int n) {
    float lanes[kWidth];
    vst1q_f32(lanes, v);
    for (int i = 0; i < n && i < kWidth; ++i) to[i] = lanes[i];
  }
  PAGECAST_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  PAGECAST_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  PAGECAST_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  PAGECAST_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  PAGECAST_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  // Not vmaxq and vminq, which treat NaN and signed zeros otherwise than x86.
  PAGECAST_INLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  PAGECAST_INLINE Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  PAGECAST_INLINE Vec sqrt(Vec a) { return vsqrtq_f32(a); }
  PAGECAST_INLINE Mask less(Vec a, Vec b) { return vcltq_f32(a, b); }
  PAGECAST_INLINE Vec select(Mask where, Vec yes, Vec no) { return vbslq_f32(where, yes, no); }

  PAGECAST_INLINE Mask first_n(int n) {
    const int32x4_t lane = {0, 1, 2, 3};
    return vcltq_s32(lane, vdupq_n_s32(n));
  }

  // v times 2^n, n being the integer in the lowest bits of `shifted`.
  PAGECAST_INLINE Vec add_to_exponent(Vec v, Vec shifted) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), n));
  }

  PAGECAST_INLINE float sum(Vec v) {
    const float32x2_t two = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }

  PAGECAST_INLINE float max_lane(Vec v) {
    const Vec two = max(v, vextq_f32(v, v, 2));
    return vgetq_lane_f32(max(two, vextq_f32(two, two, 1)), 0);
  }

  // As many numbers of 8 or 16 bits as there are lanes: those with a sign, these without; their lowest bits.
  PAGECAST_INLINE Ints load_chars(const int8_t* from) {
    int32_t four;
    __builtin_memcpy(&four, from, sizeof four);
    return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
  }
  PAGECAST_INLINE void store_chars(int8_t* to, Ints v) {
    const int16x4_t shorts = vmovn_s32((int32x4_t)v);
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(shorts, shorts))), 0);
    __builtin_memcpy(to, &four, sizeof four);
  }
  PAGECAST_INLINE Ints load_shorts(const uint16_t* from) { return (Ints)vmovl_u16(vld1_u16(from)); }
  PAGECAST_INLINE void store_shorts(uint16_t* to, Ints v) { vst1_u16(to, vmovn_u32((uint32x4_t)v)); }

  PAGECAST_INLINE Vec load_half(const uint16_t* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
  }
  PAGECAST_INLINE void store_half(uint16_t* to, Vec v) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v)));
  }

  // Products of bytes without a sign (15 at most) and bytes with one (-127 at least), four of a lane summed,
  // exactly. A sum takes eight `dot`s.
  static constexpr bool kNibblesOnly = true;
  struct Dots {
    int16x8_t low, high;  // products of bytes 0..7 and 8..15: 8 * 15 * 127 fits
  };
  PAGECAST_INLINE Dots start_dots(int32_t) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  PAGECAST_INLINE Dots dot(Dots sum, Ints bytes, int32_t four) {
    const int8x16_t a = (int8x16_t)bytes, b = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return {vmlal_s8(sum.low, vget_low_s8(a), vget_low_s8(b)), vmlal_high_s8(sum.high, a, b)};
  }
  PAGECAST_INLINE Ints finish_dots(Dots sum, int32_t bias) {
    const int32x4_t fours = vpaddq_s32(vpaddlq_s16(sum.low), vpaddlq_s16(sum.high));
    return (Ints)vaddq_s32(fours, vdupq_n_s32(bias));
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
