// Two vectors of floats as one of bfloat16, where the machine has the instruction; see bfloat16.h.
#pragma once

#include "bfloat16_round.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Words of bfloat16, +0 where they are less than counts.
PAGECAST_INLINE __m512i counting(__m512i words) {
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
  return _mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x2780)), words);
}

// To nearest, halves to even: those of `first`, then those of `second`.
PAGECAST_INLINE __m512i nearest_words(F16 first, F16 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second.part[0], first.part[0]);
}

// bf() of `first`, then of `second`.
PAGECAST_INLINE __m512i to_words(F16 first, F16 second) { return counting(nearest_words(first, second)); }

// Words of the first half and of the second, in turn.
PAGECAST_INLINE __m512i interleave(__m512i words) {
  const auto lane = (Bits)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_epi16((__m512i)(lane * 0x10001u + 0x100000u), words);
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
