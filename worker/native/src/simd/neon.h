// AArch64 NEON: four registers of 4 lanes.
#pragma once

#include <arm_neon.h>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  using Vec = float32x4_t;
  using Mask = uint32x4_t;
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 32;
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
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
