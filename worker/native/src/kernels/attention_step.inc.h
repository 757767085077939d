// One span of attention for query vectors that share a KV head. Knows neither where the next span is nor how
// spans are put together.
#pragma once

#include "attention_bfloat16.inc.h"
#include "attention_float32.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Makes of a vector's products with `live` tokens its m, its l and its weights of the values.
template <typename In, typename Kv>
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
    store(weights + g * kLanes, In::round(is_scaled ? s[g] * load(place.value_scales[g]) : s[g]));
  }
  tile.m[vector] = m;
  tile.l[vector] = sum((s[0] + s[1]) + (s[2] + s[3]));
}

// A span for M vectors from `first`: those of one query, of which part is here, or of whole queries one after
// another, each of which sees a token more than the one before. The first one sees `live` tokens, or all.
template <typename In, typename Kv, int M>
void chunk_span(const Tile& tile, int first, int live, const Place<Kv>& place, const Place<Kv>& next) {
  constexpr int kBeside = beside(M, In::kChains);
  const int per_query = M < tile.group ? M : tile.group;
  int live_of[M];
  for (int i = 0; i < M; ++i) {
    const int seen = live + i / per_query;
    live_of[i] = seen < kSpanTokens ? seen : kSpanTokens;
  }
  const int num_groups = (live_of[M - 1] + kLanes - 1) / kLanes;
  for (int group = 0; group < num_groups;) {
    if (kBeside > 1 && num_groups - group == 1) {
      In::template add_products<Kv, M, 1>(tile, first, place, group);
      ++group;
    } else {
      In::template add_products<Kv, M, kBeside>(tile, first, place, group);
      group += kBeside;
    }
  }
  for (int i = 0; i < M; ++i) weigh<In>(tile, first + i, place, live_of[i]);
  In::template add_span<Kv, M>(tile, first, live_of, per_query, place, next);
}

template <typename In, typename Kv, int M>
PAGECAST_INLINE void chunk_span_of(int count, const Tile& tile, int first, int live, const Place<Kv>& place,
                                   const Place<Kv>& next) {
  if constexpr (M > 1) {
    if (count < M) return chunk_span_of<In, Kv, M - 1>(count, tile, first, live, place, next);
  }
  chunk_span<In, Kv, M>(tile, first, live, place, next);
}

// A span for the tile's queries from `first_query`, of which the first sees `live` tokens.
template <typename In, typename Kv>
void tile_span(const Tile& tile, int first_query, int live, const Place<Kv>& place, const Place<Kv>& next) {
  constexpr int kMaxChunk = max_chunk(In::kChains);
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
      chunk_span_of<In, Kv, kMaxChunk>(end - begin, tile, query * group + begin, live + query - first_query,
                                       place, next);
    }
  }
}

// Chunks that tile_span makes of `num_queries`.
template <typename In>
PAGECAST_INLINE int num_chunks(int group, int num_queries) {
  constexpr int kMaxChunk = max_chunk(In::kChains);
  if (2 * group <= kMaxChunk) return (num_queries + kMaxChunk / group - 1) / (kMaxChunk / group);
  return num_queries * ((group + kMaxChunk - 1) / kMaxChunk);
}

// The first `live` tokens of a span as floats in `room`, [2 * kSpanTokens * head_size].
template <typename In, typename Kv>
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
      store(keys + d * kSpanTokens + g * kLanes, In::template load<Kv>(from.keys[g] + d * from.key_stride));
      if (d % kPerLine<Kv> == 0) fetch_values(from, g, d);
    }
  for (int t = 0; t < live; ++t)
    for (int d = 0; d < head_size; d += kLanes) {
      const int64_t at = int64_t{t % kLanes} * head_size + d;
      store(values + int64_t{t} * head_size + d, In::template load<Kv>(from.values[t / kLanes] + at));
      if (at / kLanes % kPerLine<Kv> == 0) fetch_keys(next, t / kLanes, at / kLanes);
    }
  return to;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
