// One span of attention for query vectors that share a KV head. Knows neither where the next span is nor how
// spans are put together.
#pragma once

#include "../attention.h"
#include "../simd.h"
#include "kv.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Accumulators that fit into registers, and query vectors that go over a span together.
inline constexpr int kAccumulators = Native::kWidth == 16 ? 24 : Native::kFused ? 6 : 3;
inline constexpr int kMaxChunk = kAccumulators > 6 ? 6 : kAccumulators;

// How many vectors of lanes go with M query vectors.
constexpr int beside(int m) { return kAccumulators / m >= 4 ? 4 : kAccumulators / m >= 2 ? 2 : 1; }

// Where the tokens of a span are, kLanes by kLanes: element d of token t of group g at keys[g] + d *
// key_stride + t and values[g] + t * head_size + d, its scales at key_scales[g] + t and value_scales[g] + t,
// null where there are none. Groups beyond the live ones name the last of these.
template <typename Kv>
struct Place {
  const typename Kv::Element* keys[kSpanGroups];
  const typename Kv::Element* values[kSpanGroups];
  const float* key_scales[kSpanGroups];
  const float* value_scales[kSpanGroups];
  int64_t key_stride;
};

// A span's keys [head_size, kSpanTokens] and values [kSpanTokens, head_size] as floats in the thread's own
// memory: nothing there needs to be fetched ahead.
struct SpreadKv : Float32Kv {};

template <typename Kv>
inline constexpr bool kIsFetched = true;
template <>
inline constexpr bool kIsFetched<SpreadKv> = false;

// The query vectors of an item that share a KV head, query by query, heads of the group within, and their
// state over one span.
struct Tile {
  int count;
  int group;  // vectors of a query
  int kv_head;
  int head_size;
  float scale;
  float* q;        // [head_size, count]
  float* weights;  // [count, kSpanTokens]
  float* m;        // [count]
  float* l;        // [count]
  float* acc;      // [count, head_size]
};

// Vectors of kLanes elements of the pool that lie on one line of the cache.
template <typename Kv>
inline constexpr int kPerLine = 64 / (kLanes * static_cast<int>(sizeof(typename Kv::Element)));

// Asks for the line of a group's n-th vector of values, and of keys, n being a multiple of kPerLine: the next
// block is anywhere in the pool, so no prefetcher guesses it.
template <typename Kv>
PAGECAST_INLINE void fetch_values(const Place<Kv>& place, int group, int64_t n) {
  __builtin_prefetch(place.values[group] + n * kLanes);
}

// Where a line holds the keys of several groups, each of these asks for other ones.
template <typename Kv>
PAGECAST_INLINE void fetch_keys(const Place<Kv>& place, int group, int64_t n) {
  __builtin_prefetch(place.keys[group] + (n + group % kPerLine<Kv>)*place.key_stride);
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

// Makes of a vector's products with `live` tokens its m, its l and its weights of the values.
template <typename Kv>
PAGECAST_INLINE void weigh(const Tile& tile, int vector, const Place<Kv>& place, int live) {
  float* weights = tile.weights + vector * kSpanTokens;
  const F16 scale = broadcast(tile.scale);
  const F16 none = broadcast(-__builtin_inff());
  F16 s[kSpanGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kSpanGroups; ++g) {
    s[g] = load(weights + g * kLanes);
    if (place.key_scales[g] != nullptr) s[g] = s[g] * load(place.key_scales[g]);
    s[g] = select(first_n(live - g * kLanes), s[g] * scale, none);
  }
  const float top = max_lane(max(max(s[0], s[1]), max(s[2], s[3])));
  const float m = top > -__builtin_inff() ? top : -__builtin_inff();
  const F16 peak = broadcast(m);
#pragma GCC unroll 4
  for (int g = 0; g < kSpanGroups; ++g) {
    s[g] = exp(s[g] - peak);
    const bool is_scaled = place.value_scales[g] != nullptr;
    store(weights + g * kLanes, is_scaled ? s[g] * load(place.value_scales[g]) : s[g]);
  }
  tile.m[vector] = m;
  tile.l[vector] = sum((s[0] + s[1]) + (s[2] + s[3]));
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
      acc[i][j] = from == 0 ? zero() : load(sums + int64_t{i} * tile.head_size + j * kLanes);
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

// A span for M vectors from `first`: those of one query, of which part is here, or of whole queries one after
// another, each of which sees a token more than the one before. The first one sees `live` tokens, or all.
template <typename Kv, int M>
void chunk_span(const Tile& tile, int first, int live, const Place<Kv>& place, const Place<Kv>& next) {
  constexpr int kBeside = beside(M);
  const int per_query = M < tile.group ? M : tile.group;
  const auto live_of = [&](int i) {
    const int seen = live + i / per_query;
    return seen < kSpanTokens ? seen : kSpanTokens;
  };
  const int num_groups = (live_of(M - 1) + kLanes - 1) / kLanes;
  for (int group = 0; group < num_groups;) {
    if (kBeside > 1 && num_groups - group == 1) {
      add_products<Kv, M, 1>(tile, first, place, group);
      ++group;
    } else {
      add_products<Kv, M, kBeside>(tile, first, place, group);
      group += kBeside;
    }
  }
  for (int i = 0; i < M; ++i) weigh(tile, first + i, place, live_of(i));

  // What all of them see, then what only the later ones do.
  const int shared = live_of(0);
  int column = 0;
  for (; column + kBeside * kLanes <= tile.head_size; column += kBeside * kLanes)
    add_values<Kv, M, kBeside>(tile, first, column, place, 0, shared, next);
  if constexpr (kBeside > 1)
    for (; column < tile.head_size; column += kLanes)
      add_values<Kv, M, 1>(tile, first, column, place, 0, shared, next);
  for (int i = per_query; i < M && live_of(i) > shared; ++i)
    for (int rest = 0; rest < tile.head_size; rest += kLanes)
      add_values<Kv, 1, 1>(tile, first + i, rest, place, shared, live_of(i), next);
}

template <typename Kv, int M>
PAGECAST_INLINE void chunk_span_of(int count, const Tile& tile, int first, int live, const Place<Kv>& place,
                                   const Place<Kv>& next) {
  if constexpr (M > 1) {
    if (count < M) return chunk_span_of<Kv, M - 1>(count, tile, first, live, place, next);
  }
  chunk_span<Kv, M>(tile, first, live, place, next);
}

// A span for the tile's queries from `first_query`, of which the first sees `live` tokens.
template <typename Kv>
void tile_span(const Tile& tile, int first_query, int live, const Place<Kv>& place, const Place<Kv>& next) {
  const int group = tile.group;
  const int num_queries = tile.count / group;
  // Whole queries where two or more fit, else a query's heads in even parts.
  const int at_once = 2 * group <= kMaxChunk ? kMaxChunk / group : 1;
  const int parts = (group + kMaxChunk - 1) / kMaxChunk;
  for (int query = first_query; query < num_queries; query += at_once) {
    const int count = group * (num_queries - query < at_once ? num_queries - query : at_once);
    for (int part = 0; part < parts; ++part) {
      const int begin = count * part / parts;
      const int end = count * (part + 1) / parts;
      chunk_span_of<Kv, kMaxChunk>(end - begin, tile, query * group + begin, live + query - first_query,
                                   place, next);
    }
  }
}

// Chunks that tile_span makes of `num_queries`.
PAGECAST_INLINE int num_chunks(int group, int num_queries) {
  if (2 * group <= kMaxChunk) return (num_queries + kMaxChunk / group - 1) / (kMaxChunk / group);
  return num_queries * ((group + kMaxChunk - 1) / kMaxChunk);
}

// The first `live` tokens of a span as floats in `room`, [2 * kSpanTokens * head_size].
template <typename Kv>
Place<SpreadKv> spread(const Place<Kv>& from, int head_size, int live, float* room, const Place<Kv>& next) {
  float* keys = room;
  float* values = room + int64_t{kSpanTokens} * head_size;
  const int num_groups = (live + kLanes - 1) / kLanes;
  Place<SpreadKv> to;
  to.key_stride = kSpanTokens;
  for (int g = 0; g < kSpanGroups; ++g) {
    const int group = g < num_groups ? g : num_groups - 1;
    to.keys[g] = keys + group * kLanes;
    to.values[g] = values + int64_t{group} * kLanes * head_size;
    to.key_scales[g] = from.key_scales[g];
    to.value_scales[g] = from.value_scales[g];
  }
  for (int64_t d = 0; d < head_size; ++d)
    for (int g = 0; g < num_groups; ++g) {
      store(keys + d * kSpanTokens + g * kLanes, Kv::load(from.keys[g] + d * from.key_stride));
      if (d % kPerLine<Kv> == 0) fetch_values(from, g, d);
    }
  for (int t = 0; t < live; ++t)
    for (int d = 0; d < head_size; d += kLanes) {
      const int64_t at = int64_t{t % kLanes} * head_size + d;
      store(values + int64_t{t} * head_size + d, Kv::load(from.values[t / kLanes] + at));
      if (at / kLanes % kPerLine<Kv> == 0) fetch_keys(next, t / kLanes, at / kLanes);
    }
  return to;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
