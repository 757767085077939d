// The sums of a span in float32.
#pragma once

#include "attention_place.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// What attention.h's order is made of in float32.
struct InFloat32 {
  static constexpr int kChains = 1;
  PAGECAST_INLINE F16 round(F16 x) { return x; }
  template <typename Kv>
  PAGECAST_INLINE F16 load(const typename Kv::Element* from) {
    return Kv::load(from);
  }

  // weights[i][t] = sum over d, ascending, of q[i][d] * k[t][d], for M vectors from `first` and G groups of
  // tokens. Meanwhile the values are fetched.
  template <typename Kv, int M, int G>
  PAGECAST_INLINE void add_products(const Tile& tile, int first, const Place<Kv>& place, int group) {
    F16 s[M][G];
    for (int i = 0; i < M; ++i)
      for (int g = 0; g < G; ++g) s[i][g] = zero();
    const float* q = tile.q + first;
    for (int64_t d = 0; d < tile.head_size; d += 4)
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) {
        F16 k[G];
        for (int g = 0; g < G; ++g) {
          k[g] = Kv::load(place.keys[group + g] + (d + step) * place.key_stride);
          if constexpr (kIsFetched<Kv>)
            if (step % kPerLine<Kv> == 0) fetch_values(place, group + g, d + step);
        }
#pragma GCC unroll 6
        for (int i = 0; i < M; ++i) {
          const F16 x = broadcast(q[i]);
          for (int g = 0; g < G; ++g) s[i][g] = fma(x, k[g], s[i][g]);
        }
        q += tile.count;
      }
    float* to = tile.weights + first * kSpanTokens + group * kLanes;
    for (int i = 0; i < M; ++i)
      for (int g = 0; g < G; ++g) store(to + i * kSpanTokens + g * kLanes, s[i][g]);
  }

  // acc += p[t] * v[t] for tokens from <= t < to, from 0 where `from` is, for M vectors from `first` and N *
  // kLanes elements from `column`. Meanwhile the keys of what comes next are fetched.
  template <typename Kv, int M, int N>
  PAGECAST_INLINE void add_values(const Tile& tile, int first, int column, const Place<Kv>& place, int from,
                                  int to, const Place<Kv>& next) {
    F16 acc[M][N];
    float* sums = tile.acc + int64_t{first} * tile.head_size + column;
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j)
        acc[i][j] = from == 0 ? zero() : PAGECAST_SET::load(sums + int64_t{i} * tile.head_size + j * kLanes);
    for (int group = from / kLanes; group * kLanes < to; ++group) {
      const int begin = from > group * kLanes ? from % kLanes : 0;
      const int end = to - group * kLanes < kLanes ? to - group * kLanes : kLanes;
      const float* weights = tile.weights + first * kSpanTokens + group * kLanes;
      for (int t = begin; t < end; ++t) {
        const int64_t at = int64_t{t} * tile.head_size + column;
        F16 v[N];
        for (int j = 0; j < N; ++j) {
          v[j] = Kv::load(place.values[group] + at + j * kLanes);
          if constexpr (kIsFetched<Kv>)
            if (j % kPerLine<Kv> == 0) fetch_keys(next, group, at / kLanes + j);
        }
#pragma GCC unroll 6
        for (int i = 0; i < M; ++i) {
          const F16 p = broadcast(weights[i * kSpanTokens + t]);
          for (int j = 0; j < N; ++j) acc[i][j] = fma(p, v[j], acc[i][j]);
        }
      }
    }
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) store(sums + int64_t{i} * tile.head_size + j * kLanes, acc[i][j]);
  }

  // The same over what each of M vectors sees of a span, live[0] tokens or more: per_query of them see the
  // same, the next ones a token more.
  template <typename Kv, int M>
  PAGECAST_INLINE void add_span(const Tile& tile, int first, const int (&live)[M], int per_query,
                                const Place<Kv>& place, const Place<Kv>& next) {
    // What all of them see, then what only the later ones do.
    constexpr int kBeside = beside(M, kChains);
    const int shared = live[0];
    int column = 0;
    for (; column + kBeside * kLanes <= tile.head_size; column += kBeside * kLanes)
      add_values<Kv, M, kBeside>(tile, first, column, place, 0, shared, next);
    if constexpr (kBeside > 1)
      for (; column < tile.head_size; column += kLanes)
        add_values<Kv, M, 1>(tile, first, column, place, 0, shared, next);
    for (int i = per_query; i < M && live[i] > shared; ++i)
      for (int rest = 0; rest < tile.head_size; rest += kLanes)
        add_values<Kv, 1, 1>(tile, first + i, rest, place, shared, live[i], next);
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
