// AVX-512 (F, BW, DQ, VL; VNNI where the flags have it): one register of 16 lanes.
#pragma once

// GCC 12 warns of its own "undefined" operands once these are inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Native {
  using Vec = __m512;
  using Mask = __mmask16;
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;
  static constexpr int kRegistersOfDots = 1;
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

  // As many numbers of 8 or 16 bits as there are lanes: those with a sign, these without; their lowest bits.
  PAGECAST_INLINE Ints load_chars(const int8_t* from) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
  }
  PAGECAST_INLINE void store_chars(int8_t* to, Ints v) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm512_cvtepi32_epi8((__m512i)v));
  }
  PAGECAST_INLINE Ints load_shorts(const uint16_t* from) {
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
  }
  PAGECAST_INLINE void store_shorts(uint16_t* to, Ints v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), _mm512_cvtepi32_epi16((__m512i)v));
  }

  PAGECAST_INLINE Vec load_half(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
  }
  PAGECAST_INLINE void store_half(uint16_t* to, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  // Products of bytes without a sign (15 at most where they are kNibblesOnly) and bytes with one (-127 at
  // least), four of a lane summed, exactly. A sum takes eight `dot`s.
#ifdef __AVX512VNNI__
  static constexpr bool kNibblesOnly = false;
  using Dots = Ints;
  PAGECAST_INLINE Dots start_dots(int32_t bias) { return (Ints)_mm512_set1_epi32(bias); }
  PAGECAST_INLINE Dots dot(Dots sum, Ints bytes, int32_t four) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, _mm512_set1_epi32(four));
  }
  PAGECAST_INLINE Ints finish_dots(Dots sum, int32_t) { return sum; }
#else
  static constexpr bool kNibblesOnly = true;
  using Dots = __m512i;  // pairs, in 16 bits: 8 * 2 * 15 * 127 fits
  PAGECAST_INLINE Dots start_dots(int32_t) { return _mm512_setzero_si512(); }
  PAGECAST_INLINE Dots dot(Dots sum, Ints bytes, int32_t four) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16((__m512i)bytes, _mm512_set1_epi32(four)));
  }
  PAGECAST_INLINE Ints finish_dots(Dots sum, int32_t bias) {
    return (Ints)_mm512_add_epi32(_mm512_madd_epi16(sum, _mm512_set1_epi16(1)), _mm512_set1_epi32(bias));
  }
#endif
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
