// Attention as the kernels see it: spans, items and partial results. Which items a launch has is decided in
// attention_plan.cpp; no result depends on that choice.
//
// Order of every query, whatever else is computed with it. Its tokens 0..position are cut into spans of
// kSpanTokens, and those into groups of kLanes. Over the tokens t of a span
//   s[t] = (sum over d, ascending, from 0, of q[d] * k[t][d]) * scale         past the position: -inf
//   m = max(s);  p = exp(s - m)
//   l = sum((p of group 0 + p of group 1) + (p of group 2 + p of group 3))    sum: 16, 8, 4, 2, 1 lanes
//   acc = sum over t, ascending, from 0, of p[t] * v[t]                       live tokens only
// k and v are what is stored, exactly. Of KvType::kInt8 they are the integers: the sum over d is multiplied
// by the key's scale, then by `scale`, and p[t] by the value's scale before it goes into acc, not into l.
// Spans are folded into the first one in ascending order:
//   M' = max(M, m);  C = exp(M - M');  c = exp(m - M');  L = L * C + l * c;  A = A * C + acc * c
// and out = A / L.
//
// In bfloat16 two sums differ, with bf() and their order as in bfloat16.h and what is stored rounded too:
//   s[t] = (sum over d of bf(q[d]) * bf(k[t][d])) * scale
//   acc = sum over the span's t of bf(p[t]) * bf(v[t])      what is no live token counts as zeros, p and v
// Of KvType::kInt8 the value's scale goes into bf(p[t] * scale). All else is float32, and l sums p unrounded.
//
// Source: online softmax, Milakov and Gimelshein (2018), arXiv:1805.02867, over blocks as in
// Kwon et al., "PagedAttention" (2023), arXiv:2309.06180.
#pragma once

#include "bfloat16.h"
#include "inline.h"
#include "kernels.h"

namespace pagecast {

inline constexpr int kSpanTokens = 64;
inline constexpr int kSpanGroups = kSpanTokens / kLanes;
inline constexpr int kMaxHeadSize = 256;
inline constexpr int kMaxTileQueries = 32;

// What all items of a launch share. Rows of the paged variant find their blocks in `block_table`; the dense
// one has none: its keys are panels of kLanes tokens in order, its values [context, head_size], one "block" a
// head.
struct AttentionCall {
  Rows q;    // [tokens, num_heads * head_size]
  Rows out;  // the same
  KvLayer keys;
  KvLayer values;
  KvShape shape;
  const int32_t* block_table;  // [rows, table_stride], logical to physical block
  int64_t table_stride;
  float scale;
};

// Queries `first_query`.. of one row, at positions `first_position`.., over spans [first_span, last_span) and
// KV heads [first_head, last_head). Several heads step together: a block's heads lie side by side in memory.
struct AttentionItem {
  int32_t row;
  int32_t first_query;
  int32_t first_position;
  int32_t num_queries;  // 1..kMaxTileQueries
  int32_t first_span;
  int32_t last_span;
  int32_t first_head;
  int32_t last_head;
  int32_t split;          // which split query this is a part of, or -1: all spans are here
  int32_t num_parts;      // items that the heads of a split query's item are cut into over spans
  int32_t first_partial;  // spans of other split queries whose partial results lie before this one's
};

// Floats of a span's partial result for the heads of one group: their m, their l, then their acc.
PAGECAST_INLINE int64_t partial_floats(const KvShape& shape) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  return 2 * round_up(group) + group * shape.head_size;
}

// Floats of scratch for `count` query vectors of a KV head: q, acc, A and a span's weights, then m, l, M and
// L.
PAGECAST_INLINE int64_t tile_floats(int64_t count, int64_t head_size) {
  return count * (3 * head_size + kSpanTokens) + 4 * round_up(count);
}

// Floats of a span's keys and values of one head.
PAGECAST_INLINE int64_t span_floats(int64_t head_size) { return 2 * kSpanTokens * head_size; }

// The same for a KV head whose products are made by tiles of AMX: what a span is in bfloat16, as many
// queries, then m, l and acc of one tile's rows and of all.
PAGECAST_INLINE int64_t amx_floats(int64_t count, int64_t head_size) {
  const int64_t depth = sum_blocks(head_size) * kSumColumns, rows = round_up(count);
  return kSpanTokens * (depth + head_size) / 2 + kLanes * (kSpanTokens + kSpanTokens / 2) + rows * depth / 2 +
         (kLanes + rows) * (2 + head_size);
}

// Floats of scratch that a thread needs: items have one query and any heads, or several queries and one head.
PAGECAST_INLINE int64_t attention_scratch_floats(const KvShape& shape) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t one_query = shape.num_kv_heads * tile_floats(group, shape.head_size);
  const int64_t one_head = tile_floats(kMaxTileQueries * group, shape.head_size);
  const int64_t floats = span_floats(shape.head_size) + (one_query > one_head ? one_query : one_head);
  const int64_t of_amx = amx_floats(kMaxTileQueries * group, shape.head_size);
  return floats > of_amx ? floats : of_amx;
}

// How kernels like rows of several queries to be cut: queries of an item at most, and items for each thread,
// with fewer of which threads would wait for the one with the last long item.
struct TileCut {
  int max_queries = 16;  // up to kMaxTileQueries
  int items_per_thread = 8;
};

struct AttentionKernels {
  // All spans of an item: writes its part of `out`.
  void (*paged)(const AttentionCall& call, const AttentionItem& item, float* scratch);
  void (*dense)(const AttentionCall& call, const AttentionItem& item, float* scratch);
  // Some spans of a single query: span s of head h goes to partials + (s * num_kv_heads + h) *
  // partial_floats(shape).
  void (*paged_spans)(const AttentionCall& call, const AttentionItem& item, float* scratch, float* partials);
  void (*dense_spans)(const AttentionCall& call, const AttentionItem& item, float* scratch, float* partials);
  // Folds partials of spans [0, num_spans) of the heads of a single query into `out`.
  void (*merge)(const AttentionCall& call, const AttentionItem& item, int num_spans, float* scratch,
                float* partials);
  TileCut cut = {};
};

}  // namespace pagecast
