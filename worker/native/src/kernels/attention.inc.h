// Attention, paged and dense: one loop over where keys and values are found. The order of every operation is
// told in attention.h. Several queries of a row, and the heads of a group, share one pass over the keys and
// values.
#pragma once

#include "../attention.h"
#include "../simd.h"
#include "attention_step.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct PagedSource {
  KvLayer keys;
  KvLayer values;
  const int32_t* blocks;
  int block_size;
  int head_size;

  PAGECAST_INLINE PagedSource make(const AttentionCall& call, int row) {
    return {call.keys, call.values, call.block_table + row * call.table_stride, call.shape.block_size,
            call.shape.head_size};
  }
  PAGECAST_MEMBER int64_t key_stride() const { return block_size; }
  PAGECAST_MEMBER Step at(int token, int head) const {
    const int64_t block = blocks[token / block_size];
    const int64_t slot = token % block_size;
    return {keys.data + block * keys.block_stride + head * keys.head_stride + slot,
            values.data + block * values.block_stride + head * values.head_stride + slot * head_size};
  }
};

struct DenseSource {
  KvLayer keys;
  KvLayer values;
  int head_size;

  PAGECAST_INLINE DenseSource make(const AttentionCall& call, int) {
    return {call.keys, call.values, call.shape.head_size};
  }
  PAGECAST_MEMBER int64_t key_stride() const { return kLanes; }
  PAGECAST_MEMBER Step at(int token, int head) const {
    const int64_t at = int64_t{token} * head_size;
    return {keys.data + head * keys.head_stride + at, values.data + head * values.head_stride + at};
  }
};

void clear(const Tile& tile) {
  for (int i = 0; i < tile.count; ++i) {
    tile.m[i] = -__builtin_inff();
    tile.l[i] = 0.0f;
  }
  for (int64_t i = 0; i < int64_t{tile.count} * tile.head_size; i += kLanes) store(tile.acc + i, zero());
}

// m, l and acc of one span, in every head's tile, for every query that sees any of it.
template <typename Source>
void span_of(const Source& source, const AttentionItem& item, const Tile* tiles, int group, int span) {
  const int num_tiles = item.last_head - item.first_head;
  for (int i = 0; i < num_tiles; ++i) clear(tiles[i]);
  const int last_position = item.first_position + item.num_queries - 1;
  const int item_end =
      item.last_span * kSpanTokens <= last_position ? item.last_span * kSpanTokens : last_position + 1;
  const int end = (span + 1) * kSpanTokens < item_end ? (span + 1) * kSpanTokens : item_end;
  Step next = source.at(span * kSpanTokens, item.first_head);
  for (int token = span * kSpanTokens; token < end; token += kLanes)
    for (int i = 0; i < num_tiles; ++i) {
      const Tile& tile = tiles[i];
      const Step step = next;
      if (i + 1 < num_tiles) {
        next = source.at(token, tile.kv_head + 1);
      } else if (token + kLanes < item_end) {
        next = source.at(token + kLanes, item.first_head);
      }
      if (item.first_position - token >= kLanes - 1) {
        tile_step(tile, 0, tile.count, step, source.key_stride(), kLanes, next);
        continue;
      }
      for (int query = 0; query < item.num_queries; ++query) {
        const int seen = item.first_position + query - token + 1;
        if (seen > 0)
          tile_step(tile, query * group, group, step, source.key_stride(), seen < kLanes ? seen : kLanes,
                    next);
      }
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
  const int count = call.shape.num_heads / call.shape.num_kv_heads * item.num_queries;
  const int64_t vectors = int64_t{count} * head_size;
  float* at = scratch + (kv_head - item.first_head) * tile_floats(count, head_size);
  float* weights = at + 3 * vectors;
  float* m = weights + count * kLanes;
  const int64_t padded = round_up(count);
  return {{count, kv_head, head_size, call.scale, at, weights, m, m + padded, at + vectors},
          {m + 2 * padded, m + 3 * padded, at + 2 * vectors}};
}

void read_queries(const AttentionCall& call, const AttentionItem& item, const Tile& tile) {
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  for (int query = 0; query < item.num_queries; ++query) {
    const float* q = call.q.data + (item.first_query + query) * call.q.stride +
                     int64_t{tile.kv_head} * group * tile.head_size;
    for (int head = 0; head < group; ++head)
      for (int d = 0; d < tile.head_size; ++d)
        tile.q[int64_t{d} * tile.count + query * group + head] = q[int64_t{head} * tile.head_size + d];
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
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  const int64_t head_size = call.shape.head_size;
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
      span_of(source, item, tiles, group, span);
      for (int i = 0; i < num_tiles; ++i)
        for (int query = 0; query < item.num_queries; ++query) {
          if (item.first_position + query < span * kSpanTokens) continue;
          const int first = query * group;
          const Tile& tile = tiles[i];
          fold({totals[i].m + first, totals[i].l + first, totals[i].acc + first * head_size},
               {tile.m + first, tile.l + first, tile.acc + first * head_size}, group, tile.head_size,
               span == 0);
        }
    }
    for (int i = 0; i < num_tiles; ++i) write_out(call, item, item.first_head + i, totals[i]);
  });
}

template <typename Source>
void attend_spans(const AttentionCall& call, const AttentionItem& whole, float* scratch, float* partials) {
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
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
        tiles[i].l = tiles[i].m + round_up(group);
        tiles[i].acc = tiles[i].l + round_up(group);
      }
      span_of(source, item, tiles, group, span);
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

constexpr AttentionKernels kAttention = {attend<PagedSource>, attend<DenseSource>, attend_spans<PagedSource>,
                                         attend_spans<DenseSource>, merge_spans};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
