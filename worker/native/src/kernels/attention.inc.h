// Attention, paged and dense: one loop over where keys and values are found. The order of every operation is
// told in attention.h. Several queries of a row, and the heads of a group, share one pass over the keys and
// values.
#pragma once

#include "../attention.h"
#include "../simd.h"
#include "attention_step.inc.h"
#include "attention_totals.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// m, l and acc of one span, in every head's tile, for the queries from `first_query`, the first that sees any
// of it. `room` is for a span of one head as floats.
template <typename In, typename Source>
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
  const bool is_spread = num_chunks<In>(tiles[0].group, item.num_queries - first_query) > 2;
  auto place = source.at(start, end_of(start), item.first_head);
  for (int i = 0; i < num_tiles; ++i) {
    auto next = place;
    if (i + 1 < num_tiles) {
      next = source.at(start, end_of(start), tiles[i + 1].kv_head);
    } else if (start + kSpanTokens < item_end) {
      next = source.at(start + kSpanTokens, end_of(start + kSpanTokens), item.first_head);
    }
    if (is_spread) {
      const Place<SpreadKv> floats = spread<In>(place, tiles[i].head_size, end_of(start) - start, room, next);
      tile_span<In>(tiles[i], first_query, live, floats, floats);
    } else {
      tile_span<In>(tiles[i], first_query, live, place, next);
    }
    place = next;
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

template <typename In>
void read_queries(const AttentionCall& call, const AttentionItem& item, const Tile& tile) {
  for (int query = 0; query < item.num_queries; ++query) {
    const float* q = call.q.data + (item.first_query + query) * call.q.stride +
                     int64_t{tile.kv_head} * tile.group * tile.head_size;
    for (int head = 0; head < tile.group; ++head)
      for (int d = 0; d < tile.head_size; d += kLanes) {
        float rounded[kLanes];
        store(rounded, In::round(load(q + int64_t{head} * tile.head_size + d)));
        float* to = tile.q + int64_t{d} * tile.count + query * tile.group + head;
        for (int i = 0; i < kLanes; ++i) to[i * tile.count] = rounded[i];
      }
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

template <typename In, typename Source>
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
      read_queries<In>(call, item, tiles[i]);
    }
    for (int span = item.first_span; span < item.last_span; ++span) {
      const int unseen = span * kSpanTokens - item.first_position;
      const int first_query = unseen > 0 ? unseen : 0;
      span_of<In>(source, item, tiles, first_query, span, scratch);
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

template <typename In, typename Source>
void attend_spans(const AttentionCall& call, const AttentionItem& whole, float* scratch, float* partials) {
  const int64_t padded = round_up(call.shape.num_heads / call.shape.num_kv_heads);
  const Source source = Source::make(call, whole.row);
  for_heads(whole, [&](const AttentionItem& item) {
    const int num_tiles = item.last_head - item.first_head;
    Tile tiles[kMaxHeads];
    for (int i = 0; i < num_tiles; ++i) {
      tiles[i] = lay_out(call, item, item.first_head + i, scratch).tile;
      read_queries<In>(call, item, tiles[i]);
    }
    for (int span = item.first_span; span < item.last_span; ++span) {
      for (int i = 0; i < num_tiles; ++i) {
        const int64_t place = int64_t{span} * call.shape.num_kv_heads + item.first_head + i;
        tiles[i].m = partials + place * partial_floats(call.shape);
        tiles[i].l = tiles[i].m + padded;
        tiles[i].acc = tiles[i].l + padded;
      }
      span_of<In>(source, item, tiles, 0, span, scratch);
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

template <typename In>
void attend_paged(const AttentionCall& call, const AttentionItem& item, float* scratch) {
  with_kv(call.shape.type, [&](auto kv) { attend<In, PagedSource<decltype(kv)>>(call, item, scratch); });
}

template <typename In>
void attend_paged_spans(const AttentionCall& call, const AttentionItem& item, float* scratch,
                        float* partials) {
  with_kv(call.shape.type,
          [&](auto kv) { attend_spans<In, PagedSource<decltype(kv)>>(call, item, scratch, partials); });
}

template <typename In>
constexpr AttentionKernels kAttentionIn = {attend_paged<In>, attend<In, DenseSource>, attend_paged_spans<In>,
                                           attend_spans<In, DenseSource>, merge_spans};

constexpr AttentionKernels kAttention = kAttentionIn<InFloat32>;
constexpr AttentionKernels kBFloat16Attention = kAttentionIn<InBFloat16>;

}  // namespace
}  // namespace pagecast::PAGECAST_SET
