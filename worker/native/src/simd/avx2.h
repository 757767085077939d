// AVX2 with FMA and F16C, and VNNI where the flags have it: two registers of 8 lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  using Vec = __m256;
  using Mask = __m256;
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;
  static constexpr int kRegistersOfDots = 1;
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

  // As many numbers of 8 or 16 bits as there are lanes: those with a sign, these without; their lowest bits.
  PAGECAST_INLINE Ints load_chars(const int8_t* from) {
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from)));
  }
  PAGECAST_INLINE void store_chars(int8_t* to, Ints v) {
    const __m128i shorts = narrow(v), low = _mm_and_si128(shorts, _mm_set1_epi16(0xff));
    _mm_storel_epi64(reinterpret_cast<__m128i_u*>(to), _mm_packus_epi16(low, low));
  }
  PAGECAST_INLINE Ints load_shorts(const uint16_t* from) {
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
  }
  PAGECAST_INLINE void store_shorts(uint16_t* to, Ints v) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), narrow(v));
  }
  PAGECAST_INLINE __m128i narrow(Ints v) {
    const __m256i low = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  }

  PAGECAST_INLINE Vec load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
  }
  PAGECAST_INLINE void store_half(uint16_t* to, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  // Products of bytes without a sign (15 at most where they are kNibblesOnly) and bytes with one (-127 at
  // least), four of a lane summed, exactly. A sum takes eight `dot`s.
#ifdef __AVXVNNI__
  static constexpr bool kNibblesOnly = false;
  using Dots = Ints;
  PAGECAST_INLINE Dots start_dots(int32_t bias) { return (Ints)_mm256_set1_epi32(bias); }
  PAGECAST_INLINE Dots dot(Dots sum, Ints bytes, int32_t four) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, _mm256_set1_epi32(four));
  }
  PAGECAST_INLINE Ints finish_dots(Dots sum, int32_t) { return sum; }
#else
  static constexpr bool kNibblesOnly = true;
  using Dots = __m256i;  // pairs, in 16 bits: 8 * 2 * 15 * 127 fits
  PAGECAST_INLINE Dots start_dots(int32_t) { return _mm256_setzero_si256(); }
  PAGECAST_INLINE Dots dot(Dots sum, Ints bytes, int32_t four) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi32(four)));
  }
  PAGECAST_INLINE Ints finish_dots(Dots sum, int32_t bias) {
    return (Ints)_mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), _mm256_set1_epi32(bias));
  }
#endif
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
