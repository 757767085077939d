// A span's keys and values as tiles of bfloat16, and the weights of its values. The order of additions is
// that of attention.h; so are the bits.
#pragma once

#include "amx_tiles.inc.h"
#include "attention_place.inc.h"
#include "bfloat16_words.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int64_t kTileShorts = int64_t{kTileRows} * kSumColumns;

// A span for the query vectors of an item that share a KV head. Row j of a tile of keys holds d = 2 j and 2 j
// + 1 of each token, that of a tile of values t = 2 j and 2 j + 1 of each d.
struct SpanTiles {
  int head_size;
  int depth;         // head_size up to a multiple of kSumColumns
  uint16_t* keys;    // [depth / kSumColumns][kSpanGroups] tiles
  uint16_t* values;  // [kSpanTokens / kSumColumns][head_size / kLanes] tiles
  float* scores;     // [kTileRows, kSpanTokens]: sums over d
  uint16_t* shares;  // the same: weights of the values
};

// Sixteen numbers at `even` and at `odd`, in turn.
template <typename Kv>
PAGECAST_INLINE __m512i load_pairs(const typename Kv::Element* even, const typename Kv::Element* odd) {
  __m512i words;
  if constexpr (kIsShort<Kv>) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(even)));
    words = counting(_mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(odd)), 1));
  } else {
    words = to_words(Kv::load(even), Kv::load(odd));
  }
  return interleave(words);
}

// Columns beyond head_size: zeros, as those of the queries are.
PAGECAST_INLINE void clear_padding(const SpanTiles& tiles) {
  if (tiles.depth == tiles.head_size) return;
  uint16_t* last = tiles.keys + int64_t{tiles.depth / kSumColumns - 1} * kSpanGroups * kTileShorts;
  for (int group = 0; group < kSpanGroups; ++group)
    for (int row = kTileRows / 2; row < kTileRows; ++row)
      _mm512_storeu_si512(last + group * kTileShorts + row * kSumColumns, _mm512_setzero_si512());
}

// Keys of `num_groups` groups. Meanwhile the values are fetched.
template <typename Kv>
void make_keys(const SpanTiles& tiles, const Place<Kv>& place, int num_groups) {
  for (int d = 0; d < tiles.head_size; d += 2)
    for (int group = 0; group < num_groups; ++group) {
      const auto* from = place.keys[group] + d * place.key_stride;
      uint16_t* tile = tiles.keys + (d / kSumColumns * kSpanGroups + group) * kTileShorts;
      _mm512_storeu_si512(tile + d % kSumColumns / 2 * kSumColumns,
                          load_pairs<Kv>(from, from + place.key_stride));
      for (int n = d; n < d + 2; ++n)
        if (n % kPerLine<Kv> == 0) fetch_values(place, group, n);
    }
}

// Values of `live` tokens, and zeros up to a whole block. Meanwhile the keys of what comes next are fetched.
template <typename Kv>
void make_values(const SpanTiles& tiles, const Place<Kv>& place, int live, const Place<Kv>& next) {
  const int num_columns = tiles.head_size / kLanes;
  for (int t = 0; t < live || t % kSumColumns != 0; t += 2) {
    uint16_t* row =
        tiles.values + t / kSumColumns * num_columns * kTileShorts + t % kSumColumns / 2 * kSumColumns;
    const int group = t / kLanes;
    const __mmask32 seen = t + 1 < live ? 0xffffffffu : t < live ? 0x55555555u : 0u;
    const auto* from = place.values[group] + int64_t{t % kLanes} * tiles.head_size;
    for (int column = 0; column < num_columns; ++column, from += kLanes, row += kTileShorts) {
      const __m512i pairs = load_pairs<Kv>(from, from + tiles.head_size);
      _mm512_storeu_si512(row, _mm512_maskz_mov_epi16(seen, pairs));
      const int n = t % kLanes * num_columns + column;
      if (n % kPerLine<Kv> == 0) fetch_keys(next, group, n);
      if ((n + num_columns) % kPerLine<Kv> == 0) fetch_keys(next, group, n + num_columns);
    }
  }
}

// simd.h's exp of x <= 0 and NaN, without what that does for greater ones.
PAGECAST_INLINE F16 exp_of_negative(F16 x) {
  const Exponential e = split_exp(x);
  const __mmask16 counts = _mm512_cmp_ps_mask(x.part[0], _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
  return {{_mm512_maskz_scalef_ps(counts, e.fraction.part[0], e.n.part[0])}};
}

// Of each of four rows: lane i with lane i + 8, then i + 4, i + 2, i + 1, all by `add`. That of row r is in
// the lanes from 4 r.
template <typename Add>
PAGECAST_INLINE __m512 reduce_four(const F16 (&rows)[4], Add add) {
  const auto halves = [&](F16 a, F16 b) __attribute__((always_inline)) {
    return add(_mm512_shuffle_f32x4(a.part[0], b.part[0], 0x44),
               _mm512_shuffle_f32x4(a.part[0], b.part[0], 0xee));
  };
  const __m512 first = halves(rows[0], rows[1]), second = halves(rows[2], rows[3]);
  __m512 out = add(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
  out = add(out, _mm512_permute_ps(out, 0x4e));
  return add(out, _mm512_permute_ps(out, 0xb1));
}

// Lanes 0, 4, 8 and 12.
PAGECAST_INLINE void store_four(float* to, __m512 from) {
  const __m512i index = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(index, from)));
}

// Makes of the scores of four rows from `row` their m, their l and their shares; row i sees live[i] tokens,
// the first one fewest, and all of the span where kIsWhole. Rows that are nobody's may come along.
template <typename Kv, bool kIsWhole>
PAGECAST_INLINE void weigh_rows(const SpanTiles& tiles, const Place<Kv>& place, int row, const int (&live)[4],
                                float scale, float* m, float* l) {
  const F16 none = broadcast(-__builtin_inff());
  F16 s[4][kSpanGroups], tops[4], sums[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; ++g) {
      s[i][g] = load(tiles.scores + (row + i) * kSpanTokens + g * kLanes);
      if constexpr (kHasScales<Kv>) s[i][g] = s[i][g] * load(place.key_scales[g]);
      s[i][g] = s[i][g] * broadcast(scale);
      if constexpr (!kIsWhole) s[i][g] = select(first_n(live[i] - g * kLanes), s[i][g], none);
    }
    tops[i] = max(max(s[i][0], s[i][1]), max(s[i][2], s[i][3]));
  }
  const __m512 top = reduce_four(
      tops, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); });
  // -inf in place of NaN: `a > b ? a : b`.
  const __m512 peaks = _mm512_max_ps(top, none.part[0]);
  store_four(m + row, peaks);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const F16 peak = {{_mm512_permutexvar_ps(_mm512_set1_epi32(4 * i), peaks)}};
#pragma GCC unroll 4
    for (int g = 0; g < kSpanGroups; ++g) s[i][g] = exp_of_negative(s[i][g] - peak);
    sums[i] = (s[i][0] + s[i][1]) + (s[i][2] + s[i][3]);
    if constexpr (kHasScales<Kv>)
#pragma GCC unroll 4
      for (int g = 0; g < kSpanGroups; ++g) {
        s[i][g] = s[i][g] * load(place.value_scales[g]);
        // A scale of a token that isn't seen may be anything.
        if constexpr (!kIsWhole) s[i][g] = select(first_n(live[i] - g * kLanes), s[i][g], zero());
      }
    uint16_t* shares = tiles.shares + (row + i) * kSpanTokens;
    _mm512_storeu_si512(shares, to_words(s[i][0], s[i][1]));
    _mm512_storeu_si512(shares + kSumColumns, to_words(s[i][2], s[i][3]));
  }
  store_four(l + row, reduce_four(sums, [](__m512 a, __m512 b)
                                            __attribute__((always_inline)) { return _mm512_add_ps(a, b); }));
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
