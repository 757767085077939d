// Attention, paged and dense: one loop over where keys and values are found. The order of every operation is
// told in attention.h. Several queries of a row, and the heads of a group, share one pass over the keys and
// values.
#pragma once

#include "../attention.h"
#include "../simd.h"
#include "attention_step.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Where tokens [start, end) of a span are, by `find`(group), which gives the elements of a group's keys and
// values and their scales.
template <typename Kv, typename Find>
PAGECAST_INLINE Place<Kv> place_of(int64_t key_stride, int start, int end, Find find) {
  Place<Kv> place;
  place.key_stride = key_stride;
  const int last = (end - start - 1) / kLanes;
  for (int group = 0; group < kSpanGroups; ++group) find(place, group, group < last ? group : last);
  return place;
}

template <typename KvOf>
struct PagedSource {
  using Kv = KvOf;
  KvLayer keys;
  KvLayer values;
  const int32_t* blocks;
  int block_size;
  int head_size;

  PAGECAST_INLINE PagedSource make(const AttentionCall& call, int row) {
    return {call.keys, call.values, call.block_table + row * call.table_stride, call.shape.block_size,
            call.shape.head_size};
  }
  PAGECAST_MEMBER Place<Kv> at(int start, int end, int head) const {
    const int64_t num_elements = int64_t{block_size} * head_size;
    return place_of<Kv>(block_size, start, end, [&](Place<Kv>& place, int group, int live_group) {
      const int token = start + live_group * kLanes;
      const int64_t block = blocks[token / block_size];
      const int64_t slot = token % block_size;
      const HeadBlock<Kv> key = head_block<Kv>(keys, block, head, num_elements);
      const HeadBlock<Kv> value = head_block<Kv>(values, block, head, num_elements);
      place.keys[group] = key.elements + slot;
      place.values[group] = value.elements + slot * head_size;
      place.key_scales[group] = scale_at(key, slot);
      place.value_scales[group] = scale_at(value, slot);
    });
  }
};

struct DenseSource {
  using Kv = Float32Kv;
  KvLayer keys;
  KvLayer values;
  int head_size;

  PAGECAST_INLINE DenseSource make(const AttentionCall& call, int) {
    return {call.keys, call.values, call.shape.head_size};
  }
  PAGECAST_MEMBER Place<Kv> at(int start, int end, int head) const {
    const HeadBlock<Kv> key = head_block<Kv>(keys, 0, head, 0);
    const HeadBlock<Kv> value = head_block<Kv>(values, 0, head, 0);
    return place_of<Kv>(kLanes, start, end, [&](Place<Kv>& place, int group, int live_group) {
      const int64_t at = int64_t{start + live_group * kLanes} * head_size;
      place.keys[group] = key.elements + at;
      place.values[group] = value.elements + at;
      place.key_scales[group] = place.value_scales[group] = nullptr;
    });
  }
};

// m, l and acc of one span, in every head's tile, for the queries from `first_query`, the first that sees any
// of it. `room` is for a span of one head as floats.
template <typename Source>
void span_of(const Source& source, const AttentionItem& item, const Tile* tiles, int first_query, int span,
             float* room) {
  const int num_tiles = item.last_head - item.first_head;
  const int seen = item.first_position + item.num_queries;
  const int item_end = item.last_span * kSpanTokens < seen ? item.last_span * kSpanTokens : seen;
  const auto end_of = [item_end](int start) {
    return start + kSpanTokens < item_end ? start + kSpanTokens : item_end;
  };
  const int start = span * kSpanTokens;
  const int live = item.first_position + first_query + 1 - start;
  // Where many vectors go along, it pays to make floats of the span once for all of them.
  const bool is_spread = num_chunks(tiles[0].group, item.num_queries - first_query) > 2;
  auto place = source.at(start, end_of(start), item.first_head);
  for (int i = 0; i < num_tiles; ++i) {
    auto next = place;
    if (i + 1 < num_tiles) {
      next = source.at(start, end_of(start), tiles[i + 1].kv_head);
    } else if (start + kSpanTokens < item_end) {
      next = source.at(start + kSpanTokens, end_of(start + kSpanTokens), item.first_head);
    }
    if (is_spread) {
      const Place<SpreadKv> floats = spread(place, tiles[i].head_size, end_of(start) - start, room, next);
      tile_span(tiles[i], first_query, live, floats, floats);
    } else {
      tile_span(tiles[i], first_query, live, place, next);
    }
    place = next;
  }
}

// Totals of some query vectors over spans.
struct Totals {
  float* m;    // [count]
  float* l;    // [count]
  float* acc;  // [count, head_size]
};

// Folds m, l and acc of `count` vectors into totals; the first span is taken as it is.
void fold(const Totals& to, const Totals& from, int count, int head_size, bool is_first) {
  for (int begin = 0; begin < count; begin += kLanes) {
    const int n = count - begin < kLanes ? count - begin : kLanes;
    const F16 m = load_n(from.m + begin, n);
    const F16 l = load_n(from.l + begin, n);
    const F16 total_m = is_first ? m : load_n(to.m + begin, n);
    const F16 peak = max(total_m, m);
    const F16 total_share = exp(total_m - peak);
    const F16 share = exp(m - peak);
    store_n(to.m + begin, peak, n);
    store_n(to.l + begin, is_first ? l : fma(l, share, load_n(to.l + begin, n) * total_share), n);
    float shares[kLanes], total_shares[kLanes];
    store(shares, share);
    store(total_shares, total_share);
    for (int i = 0; i < n; ++i) {
      float* total = to.acc + int64_t{begin + i} * head_size;
      const float* acc = from.acc + int64_t{begin + i} * head_size;
      for (int d = 0; d < head_size; d += kLanes) {
        const F16 part = load(acc + d);
        store(total + d, is_first
                             ? part
                             : fma(part, broadcast(shares[i]), load(total + d) * broadcast(total_shares[i])));
      }
    }
  }
}

void write_out(const AttentionCall& call, const AttentionItem& item, int kv_head, const Totals& totals) {
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  const int head_size = call.shape.head_size;
  for (int query = 0; query < item.num_queries; ++query) {
    float* out =
        call.out.data + (item.first_query + query) * call.out.stride + int64_t{kv_head} * group * head_size;
    for (int head = 0; head < group; ++head) {
      const int vector = query * group + head;
      const F16 l = broadcast(totals.l[vector]);
      for (int d = 0; d < head_size; d += kLanes)
        store(out + int64_t{head} * head_size + d, load(totals.acc + int64_t{vector} * head_size + d) / l);
    }
  }
}

// One head's tile and its totals, in scratch.
struct HeadState {
  Tile tile;
  Totals totals;
};

HeadState lay_out(const AttentionCall& call, const AttentionItem& item, int kv_head, float* scratch) {
  const int head_size = call.shape.head_size;
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  const int count = group * item.num_queries;
  const int64_t vectors = int64_t{count} * head_size;
  float* at = scratch + span_floats(head_size) + (kv_head - item.first_head) * tile_floats(count, head_size);
  float* weights = at + 3 * vectors;
  float* m = weights + int64_t{count} * kSpanTokens;
  const int64_t padded = round_up(count);
  return {{count, group, kv_head, head_size, call.scale, at, weights, m, m + padded, at + vectors},
          {m + 2 * padded, m + 3 * padded, at + 2 * vectors}};
}

void read_queries(const AttentionCall& call, const AttentionItem& item, const Tile& tile) {
  for (int query = 0; query < item.num_queries; ++query) {
    const float* q = call.q.data + (item.first_query + query) * call.q.stride +
                     int64_t{tile.kv_head} * tile.group * tile.head_size;
    for (int head = 0; head < tile.group; ++head)
      for (int d = 0; d < tile.head_size; ++d)
        tile.q[int64_t{d} * tile.count + query * tile.group + head] = q[int64_t{head} * tile.head_size + d];
  }
}

// Calls work(item) for a few heads of the item at a time, as many as states are kept of.
inline constexpr int kMaxHeads = 8;

template <typename Work>
PAGECAST_INLINE void for_heads(AttentionItem item, Work work) {
  const int last = item.last_head;
  for (; item.first_head < last; item.first_head += kMaxHeads) {
    item.last_head = item.first_head + kMaxHeads < last ? item.first_head + kMaxHeads : last;
    work(item);
  }
}

template <typename Source>
void attend(const AttentionCall& call, const AttentionItem& whole, float* scratch) {
  const Source source = Source::make(call, whole.row);
  for_heads(whole, [&](const AttentionItem& item) {
    const int num_tiles = item.last_head - item.first_head;
    Tile tiles[kMaxHeads];
    Totals totals[kMaxHeads];
    for (int i = 0; i < num_tiles; ++i) {
      const HeadState state = lay_out(call, item, item.first_head + i, scratch);
      tiles[i] = state.tile;
      totals[i] = state.totals;
      read_queries(call, item, tiles[i]);
    }
    for (int span = item.first_span; span < item.last_span; ++span) {
      const int unseen = span * kSpanTokens - item.first_position;
      const int first_query = unseen > 0 ? unseen : 0;
      span_of(source, item, tiles, first_query, span, scratch);
      for (int i = 0; i < num_tiles; ++i) {
        const Tile& tile = tiles[i];
        const int first = first_query * tile.group;
        const int64_t at = int64_t{first} * tile.head_size;
        fold({totals[i].m + first, totals[i].l + first, totals[i].acc + at},
             {tile.m + first, tile.l + first, tile.acc + at}, tile.count - first, tile.head_size, span == 0);
      }
    }
    for (int i = 0; i < num_tiles; ++i) write_out(call, item, item.first_head + i, totals[i]);
  });
}

template <typename Source>
void attend_spans(const AttentionCall& call, const AttentionItem& whole, float* scratch, float* partials) {
  const int64_t padded = round_up(call.shape.num_heads / call.shape.num_kv_heads);
  const Source source = Source::make(call, whole.row);
  for_heads(whole, [&](const AttentionItem& item) {
    const int num_tiles = item.last_head - item.first_head;
    Tile tiles[kMaxHeads];
    for (int i = 0; i < num_tiles; ++i) {
      tiles[i] = lay_out(call, item, item.first_head + i, scratch).tile;
      read_queries(call, item, tiles[i]);
    }
    for (int span = item.first_span; span < item.last_span; ++span) {
      for (int i = 0; i < num_tiles; ++i) {
        const int64_t place = int64_t{span} * call.shape.num_kv_heads + item.first_head + i;
        tiles[i].m = partials + place * partial_floats(call.shape);
        tiles[i].l = tiles[i].m + padded;
        tiles[i].acc = tiles[i].l + padded;
      }
      span_of(source, item, tiles, 0, span, scratch);
    }
  });
}

void merge_spans(const AttentionCall& call, const AttentionItem& item, int num_spans, float* scratch,
                 float* partials) {
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  const int64_t padded = round_up(group);
  for (int head = item.first_head; head < item.last_head; ++head) {
    const Totals totals = {scratch, scratch + padded, scratch + 2 * padded};
    for (int span = 0; span < num_spans; ++span) {
      const int64_t place = int64_t{span} * call.shape.num_kv_heads + head;
      float* m = partials + place * partial_floats(call.shape);
      fold(totals, {m, m + padded, m + 2 * padded}, group, call.shape.head_size, span == 0);
    }
    write_out(call, item, head, totals);
  }
}

void attend_paged(const AttentionCall& call, const AttentionItem& item, float* scratch) {
  with_kv(call.shape.type, [&](auto kv) { attend<PagedSource<decltype(kv)>>(call, item, scratch); });
}

void attend_paged_spans(const AttentionCall& call, const AttentionItem& item, float* scratch,
                        float* partials) {
  with_kv(call.shape.type,
          [&](auto kv) { attend_spans<PagedSource<decltype(kv)>>(call, item, scratch, partials); });
}

constexpr AttentionKernels kAttention = {attend_paged, attend<DenseSource>, attend_paged_spans,
                                         attend_spans<DenseSource>, merge_spans};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
