// The sums of a span in bfloat16, of numbers rounded beforehand; see bfloat16.h for their order.
#pragma once

#include "attention_place.inc.h"
#include "bfloat16_round.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// As InFloat32, in bfloat16.
struct InBFloat16 {
  static constexpr int kChains = 2;
  PAGECAST_INLINE F16 round(F16 x) { return to_bfloat(x); }
  template <typename Kv>
  PAGECAST_INLINE F16 load(const typename Kv::Element* from) {
    if constexpr (kIsShort<Kv>) return load_counting(from);
    const F16 x = Kv::load(from);
    if constexpr (kIsRounded<Kv>) return x;
    if constexpr (!Native::kFused) return to_bfloat(x);
    // (2^16 - 1) x loses what is to be lost of x, by the same rule, and 2^16 x nothing. Scaled, for no
    // product to overflow. A half is no less than counts, but 0 may be -0: it adds nothing.
    const float unit = kIsHalf<Kv> ? 0x1p16f : 0x1p-4f;
    F16 rounded = fma(x, broadcast(unit), x * broadcast(-unit * 0xffffp-16f));
    if constexpr (!kIsHalf<Kv>) rounded = rounded * broadcast(0x1p20f);
    const F16 magnitude = absolute(x);
    const F16 finite = select(less(magnitude, broadcast(__builtin_inff())), rounded, x);
    if constexpr (kIsHalf<Kv>) return finite;
    // From half a step below the least one that counts, numbers are rounded up to it.
    return select(less(magnitude, broadcast(kLeastBFloat - kLeastBFloat / 512)), zero(), finite);
  }

  // weights[i][t] = sum over d of q[i][d] * k[t][d], for M vectors from `first` and G groups of tokens.
  // Meanwhile the values are fetched.
  template <typename Kv, int M, int G>
  PAGECAST_INLINE void add_products(const Tile& tile, int first, const Place<Kv>& place, int group) {
    float* to = tile.weights + first * kSpanTokens + group * kLanes;
    const float* q = tile.q + first;
    for (int64_t block = 0; block < tile.head_size; block += kSumColumns) {
      F16 s[2][M][G];  // even columns, odd ones
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain)
        for (int i = 0; i < M; ++i)
          for (int g = 0; g < G; ++g) s[chain][i][g] = zero();
      const int64_t end = block + kSumColumns < tile.head_size ? block + kSumColumns : tile.head_size;
      for (int64_t d = block; d < end; d += 4)
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step) {
          F16 k[G];
          for (int g = 0; g < G; ++g) {
            k[g] = load<Kv>(place.keys[group + g] + (d + step) * place.key_stride);
            if constexpr (kIsFetched<Kv>)
              if (step % kPerLine<Kv> == 0) fetch_values(place, group + g, d + step);
          }
#pragma GCC unroll 6
          for (int i = 0; i < M; ++i) {
            const F16 x = broadcast(q[i]);
            for (int g = 0; g < G; ++g) s[step % 2][i][g] = fma(x, k[g], s[step % 2][i][g]);
          }
          q += tile.count;
        }
      for (int i = 0; i < M; ++i)
        for (int g = 0; g < G; ++g) {
          float* sum = to + i * kSpanTokens + g * kLanes;
          store(sum, add_chains(block == 0, sum, s[0][i][g], s[1][i][g]));
        }
    }
  }

  // acc = sum over t of p[t] * v[t] over what each of M vectors sees, for N * kLanes elements from `column`.
  // Meanwhile the keys of what comes next are fetched.
  template <typename Kv, int M, int N>
  PAGECAST_INLINE void add_values(const Tile& tile, int first, int column, const int (&live)[M],
                                  const Place<Kv>& place, const Place<Kv>& next) {
    float* sums = tile.acc + int64_t{first} * tile.head_size + column;
    for (int block = 0; block < live[M - 1]; block += kSumColumns) {
      F16 acc[2][M][N];  // even tokens, odd ones
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain)
        for (int i = 0; i < M; ++i)
          for (int j = 0; j < N; ++j) acc[chain][i][j] = zero();
      for (int start = block; start < block + kSumColumns && start < live[M - 1]; start += kLanes) {
        const int group = start / kLanes;
        const float* weights = tile.weights + first * kSpanTokens + start;
        const auto add = [&](int t, F16(&to)[M][N], auto is_seen) __attribute__((always_inline)) {
          const int64_t at = int64_t{t} * tile.head_size + column;
          F16 v[N];
          for (int j = 0; j < N; ++j) {
            v[j] = load<Kv>(place.values[group] + at + j * kLanes);
            if constexpr (kIsFetched<Kv>)
              if (j % kPerLine<Kv> == 0) fetch_keys(next, group, at / kLanes + j);
          }
#pragma GCC unroll 6
          for (int i = 0; i < M; ++i)
            if (is_seen(i, start + t)) {
              const F16 p = broadcast(weights[i * kSpanTokens + t]);
              for (int j = 0; j < N; ++j) to[i][j] = fma(p, v[j], to[i][j]);
            }
        };
        // Pairs that all of them see, then what only some do: no weight of 0 may meet an infinite value.
        const auto of_all = [](int, int) __attribute__((always_inline)) { return true; };
        const auto of_some = [&](int i, int token) __attribute__((always_inline)) { return token < live[i]; };
        const int pairs = live[0] - start < kLanes ? (live[0] - start) & ~1 : kLanes;
        int t = 0;
        for (; t < pairs; t += 2) {
          add(t, acc[0], of_all);
          add(t + 1, acc[1], of_all);
        }
        for (; t < kLanes && start + t < live[M - 1]; t += 2) {
          add(t, acc[0], of_some);
          if (start + t + 1 < live[M - 1]) add(t + 1, acc[1], of_some);
        }
      }
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) {
          float* sum = sums + int64_t{i} * tile.head_size + j * kLanes;
          store(sum, add_chains(block == 0, sum, acc[0][i][j], acc[1][i][j]));
        }
    }
  }

  template <typename Kv, int M>
  PAGECAST_INLINE void add_span(const Tile& tile, int first, const int (&live)[M], int,
                                const Place<Kv>& place, const Place<Kv>& next) {
    constexpr int kBeside = beside(M, kChains);
    int column = 0;
    for (; column + kBeside * kLanes <= tile.head_size; column += kBeside * kLanes)
      add_values<Kv, M, kBeside>(tile, first, column, live, place, next);
    if constexpr (kBeside > 1)
      for (; column < tile.head_size; column += kLanes)
        add_values<Kv, M, 1>(tile, first, column, live, place, next);
  }

 private:
  // Sixteen bfloat16, zeros where they are less than counts.
  PAGECAST_INLINE F16 load_counting(const uint16_t* from) {
    F16 out;
    PAGECAST_EACH_PART {
      const auto words = (Bits)Native::load_shorts(from + part * Native::kWidth);
      out.part[part] = (Native::Vec)((words & 0x7fffu) >= 0x2780u ? words << 16 : Bits{});
    }
    return out;
  }
  // What a block makes of the sum before it.
  PAGECAST_INLINE F16 add_chains(bool is_first, const float* sum, F16 even, F16 odd) {
    return (is_first ? zero() : PAGECAST_SET::load(sum)) + (even + odd);
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
