// AVX2 with FMA: two registers of 8 lanes.
#pragma once

#include <immintrin.h>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  using Vec = __m256;
  using Mask = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;
  static constexpr bool kFused = true;

  PAGECAST_INLINE Vec broadcast(float value) { return _mm256_set1_ps(value); }
  PAGECAST_INLINE Vec load(const float* from) { return _mm256_loadu_ps(from); }
  PAGECAST_INLINE void store(float* to, Vec v) { _mm256_storeu_ps(to, v); }
  PAGECAST_INLINE Vec load_n(const float* from, int n) {
    return _mm256_maskload_ps(from, _mm256_castps_si256(first_n(n)));
  }
  PAGECAST_INLINE void store_n(float* to, Vec v, int n) {
    _mm256_maskstore_ps(to, _mm256_castps_si256(first_n(n)), v);
  }
  PAGECAST_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  PAGECAST_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  PAGECAST_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  PAGECAST_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  PAGECAST_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  PAGECAST_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  PAGECAST_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  PAGECAST_INLINE Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
  PAGECAST_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  PAGECAST_INLINE Vec select(Mask where, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, where); }

  PAGECAST_INLINE Mask first_n(int n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
  }

  // v times 2^n, n being the integer in the lowest bits of `shifted`.
  PAGECAST_INLINE Vec add_to_exponent(Vec v, Vec shifted) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), n));
  }

  PAGECAST_INLINE float sum(Vec v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  PAGECAST_INLINE float max_lane(Vec v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
