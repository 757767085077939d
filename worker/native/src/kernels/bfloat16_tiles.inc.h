// Weights of any format as tiles of bfloat16: of a panel's block of kSumColumns columns, row j has columns 2j
// and 2j + 1 of each lane, side by side.
#pragma once

#include "bfloat16_words.inc.h"
#include "weights.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int64_t kTileWords = kSumColumns / 2 * kLanes;  // of 32 bits: two columns of a lane

// kChecked: what is below kLeastBFloat becomes 0. Where scales are float16 nothing is: a weight is a multiple
// of 2^-24 then.
template <bool kChecked>
PAGECAST_INLINE void store_pair(uint32_t* to, F16 even, F16 odd) {
  const __m512i words = kChecked ? to_words(even, odd) : nearest_words(even, odd);
  _mm512_storeu_si512(to, interleave(words));
}

template <class Quants, bool kChecked>
PAGECAST_INLINE void make_quant_tile(const Panels& w, const std::byte* group, int64_t head_size,
                                     uint32_t* to) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Head head = Quants::head(group, w, half);
#pragma GCC unroll 4
    for (int index = 0; index < 4; ++index, to += 2 * kLanes) {
      const I16 words = Quants::load(Quants::word(group + head_size, half, index), half);
      store_pair<kChecked>(to, weight_of<Quants, 0>(head, words), weight_of<Quants, 1>(head, words));
      store_pair<kChecked>(to + kLanes, weight_of<Quants, 2>(head, words), weight_of<Quants, 3>(head, words));
    }
  }
}

// Of `num_columns`, kSumColumns at most; columns beyond are zeros.
template <class Plain>
PAGECAST_INLINE void make_plain_tile(const std::byte* from, int64_t num_columns, uint32_t* to) {
  for (int64_t k = 0; k < kSumColumns; k += 2, to += kLanes) {
    const F16 even = k < num_columns ? Plain::load(from + k * Plain::kColumnBytes) : zero();
    const F16 odd = k + 1 < num_columns ? Plain::load(from + (k + 1) * Plain::kColumnBytes) : zero();
    store_pair<true>(to, even, odd);
  }
}

// Blocks [first, last) of a panel. Meanwhile what lies `ahead` bytes further on is fetched.
[[gnu::noinline]] void make_tiles(const Panels& w, int64_t panel, int64_t first, int64_t last, int64_t ahead,
                                  uint32_t* to) {
  const auto make = [&](int64_t block_bytes, auto make_tile) {
    const std::byte* from = w.panel(panel) + first * block_bytes;
    for (int64_t block = first; block < last; ++block, from += block_bytes, to += kTileWords) {
      for (int64_t line = 0; line < block_bytes; line += 64) __builtin_prefetch(from + ahead + line, 0, 2);
      make_tile(from, block);
    }
  };
  const int64_t head_size = head_bytes(w.format);
  with_weights(w.format, [&](auto weights) {
    using Weights = decltype(weights);
    if constexpr (!Weights::kIsQuantised)
      make(kSumColumns * Weights::kColumnBytes, [&](const std::byte* from, int64_t block) {
        make_plain_tile<Weights>(from, w.num_columns - block * kSumColumns, to);
      });
    else if (has_half_scales(w.format))
      make(group_bytes(w.format),
           [&](const std::byte* from, int64_t) { make_quant_tile<Weights, false>(w, from, head_size, to); });
    else
      make(group_bytes(w.format),
           [&](const std::byte* from, int64_t) { make_quant_tile<Weights, true>(w, from, head_size, to); });
  });
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
