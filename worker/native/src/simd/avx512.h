// AVX-512 (F, BW, DQ, VL): one register of 16 lanes.
#pragma once

// GCC 12 warns of its own "undefined" operands once these are inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  using Vec = __m512;
  using Mask = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;
  static constexpr bool kFused = true;

  PAGECAST_INLINE Vec broadcast(float value) { return _mm512_set1_ps(value); }
  PAGECAST_INLINE Vec load(const float* from) { return _mm512_loadu_ps(from); }
  PAGECAST_INLINE void store(float* to, Vec v) { _mm512_storeu_ps(to, v); }
  PAGECAST_INLINE Vec load_n(const float* from, int n) { return _mm512_maskz_loadu_ps(first_n(n), from); }
  PAGECAST_INLINE void store_n(float* to, Vec v, int n) { _mm512_mask_storeu_ps(to, first_n(n), v); }
  PAGECAST_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  PAGECAST_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  PAGECAST_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  PAGECAST_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  PAGECAST_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  PAGECAST_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  PAGECAST_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  PAGECAST_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
  PAGECAST_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  PAGECAST_INLINE Vec select(Mask where, Vec yes, Vec no) { return _mm512_mask_blend_ps(where, no, yes); }

  PAGECAST_INLINE Mask first_n(int n) {
    const unsigned bits = n <= 0 ? 0u : n >= kWidth ? 0xffffu : (1u << n) - 1u;
    return static_cast<Mask>(bits);
  }

  // v times 2^n, n being the integer in the lowest bits of `shifted`.
  PAGECAST_INLINE Vec add_to_exponent(Vec v, Vec shifted) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), n));
  }

  PAGECAST_INLINE float sum(Vec v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  PAGECAST_INLINE float max_lane(Vec v) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
