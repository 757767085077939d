// Attention in bfloat16 where tiles multiply: chunks of prompts, which have many query vectors to a KV head.
// Lone queries go to the set without tiles, whose bits are the same.
#pragma once

#include "attention_amx_span.inc.h"
#include "attention_totals.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Fewer don't pay for making tiles of a span.
inline constexpr int kLeastVectors = 8;

// Registers 0 to 3 hold sums, 4 rows, 5 to 7 keys or values.
template <int kNum>
struct TileSums {
  // Over blocks of kSumColumns: those of `x` are side by side, those of `w` at `w_stride` shorts, tile by
  // tile.
  PAGECAST_INLINE void add(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t w_stride,
                           int num_blocks) {
    each([](auto i) __attribute__((always_inline)) { zero_tile<i.kValue>(); });
    for (int block = 0; block < num_blocks; ++block) {
      load_tile<4>(x + block * kSumColumns, 2 * x_stride);
      each([&](auto i) __attribute__((always_inline)) {
        constexpr int kWeights = 5 + i.kValue % 3;
        load_tile<kWeights>(w + block * w_stride + i.kValue * kTileShorts, 2 * kSumColumns);
        multiply_bfloats<i.kValue, 4, kWeights>();
      });
    }
  }
  PAGECAST_INLINE void store(float* to, int64_t stride) {
    each([&](auto i)
             __attribute__((always_inline)) { store_tile<i.kValue>(to + i.kValue * kLanes, 4 * stride); });
  }

 private:
  template <int kIndex>
  struct Index {
    static constexpr int kValue = kIndex;
  };
  template <int kIndex = 0, typename Work>
  PAGECAST_INLINE void each(Work work) {
    work(Index<kIndex>{});
    if constexpr (kIndex + 1 < kNum) each<kIndex + 1>(work);
  }
};

// An item's query vectors of one KV head and their state, in scratch.
struct TiledHead {
  int count;
  SpanTiles tiles;
  uint16_t* q;    // [count up to a multiple of kTileRows, depth]
  Totals span;    // of kTileRows vectors
  Totals totals;  // of `count`
};

TiledHead lay_out_tiles(const AttentionCall& call, int count, float* scratch) {
  const int head_size = call.shape.head_size;
  const int depth = static_cast<int>(sum_blocks(head_size)) * kSumColumns;
  const auto take = [&scratch](int64_t floats) {
    float* at = scratch;
    scratch += floats;
    return at;
  };
  const auto take_shorts = [&take](int64_t shorts) { return reinterpret_cast<uint16_t*>(take(shorts / 2)); };
  const int64_t num_rows = round_up(count);
  TiledHead head;
  head.count = count;
  head.tiles.head_size = head_size;
  head.tiles.depth = depth;
  head.tiles.keys = take_shorts(int64_t{kSpanTokens} * depth);
  head.tiles.values = take_shorts(int64_t{kSpanTokens} * head_size);
  head.tiles.scores = take(kTileRows * kSpanTokens);
  head.tiles.shares = take_shorts(kTileRows * kSpanTokens);
  head.q = take_shorts(num_rows * depth);
  head.span = {take(kTileRows), take(kTileRows), take(int64_t{kTileRows} * head_size)};
  head.totals = {take(num_rows), take(num_rows), take(num_rows * head_size)};
  return head;
}

void round_queries(const AttentionCall& call, const AttentionItem& item, int kv_head, const TiledHead& to) {
  const int head_size = call.shape.head_size;
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  for (int vector = 0; vector < to.count; ++vector) {
    const float* q = call.q.data + (item.first_query + vector / group) * call.q.stride +
                     (int64_t{kv_head} * group + vector % group) * head_size;
    for (int d = 0; d < to.tiles.depth; d += kSumColumns) {
      const F16 second = d + kLanes < head_size ? load(q + d + kLanes) : zero();
      _mm512_storeu_si512(to.q + int64_t{vector} * to.tiles.depth + d, to_words(load(q + d), second));
    }
  }
}

// A span of `live` tokens for vectors [first, last) of a tile's rows, which begin at vector `row`. The item's
// first query sees `first_seen` of its tokens.
template <typename Kv>
void rows_span(const TiledHead& head, const AttentionCall& call, int row, int first, int last, int live,
               int first_seen, int group, const Place<Kv>& place, bool is_first) {
  const SpanTiles& tiles = head.tiles;
  using Four = TileSums<kSpanGroups>;
  Four::add(head.q + int64_t{row} * tiles.depth, tiles.depth, tiles.keys, kSpanGroups * kTileShorts,
            tiles.depth / kSumColumns);
  Four::store(tiles.scores, kSpanTokens);
  for (int from = (first - row) / 4 * 4; row + from < last; from += 4) {
    int seen[4];
    for (int i = 0; i < 4; ++i) seen[i] = first_seen + (row + from + i) / group;
    if (seen[0] >= kSpanTokens) {
      weigh_rows<Kv, true>(tiles, place, from, seen, call.scale, head.span.m, head.span.l);
    } else {
      weigh_rows<Kv, false>(tiles, place, from, seen, call.scale, head.span.m, head.span.l);
    }
  }
  const int num_columns = tiles.head_size / kLanes, num_blocks = static_cast<int>(sum_blocks(live));
  int column = 0;
  const auto add_values = [&](auto sums) {
    decltype(sums)::add(tiles.shares, kSpanTokens, tiles.values + column * kTileShorts,
                        num_columns * kTileShorts, num_blocks);
    decltype(sums)::store(head.span.acc + column * kLanes, tiles.head_size);
  };
  for (; column + 4 <= num_columns; column += 4) add_values(Four{});
  for (; column < num_columns; ++column) add_values(TileSums<1>{});
  const int from = first - row;
  fold({head.totals.m + first, head.totals.l + first, head.totals.acc + int64_t{first} * tiles.head_size},
       {head.span.m + from, head.span.l + from, head.span.acc + int64_t{from} * tiles.head_size},
       last - first, tiles.head_size, is_first);
}

// Whether what a query doesn't see of the item's values is finite: a weight of 0 makes nothing of it then.
template <typename Source>
bool is_unseen_finite(const Source& source, const AttentionCall& call, const AttentionItem& item, int head) {
  F16 sums = zero();
  for (int t = item.first_position + 1; t < item.first_position + item.num_queries; ++t) {
    const auto place = source.at(t / kLanes * kLanes, t + 1, head);
    const auto* values = place.values[0] + int64_t{t % kLanes} * call.shape.head_size;
    for (int d = 0; d < call.shape.head_size; d += kLanes)
      sums = fma(to_bfloat(Source::Kv::load(values + d)), zero(), sums);
  }
  return sum(sums) == 0.0f;
}

// False: nothing is done, the item is for another set.
template <typename Source>
bool attend_tiles(const AttentionCall& call, const AttentionItem& item, float* scratch) {
  const Source source = Source::make(call, item.row);
  for (int kv_head = item.first_head; kv_head < item.last_head; ++kv_head)
    if (!is_unseen_finite(source, call, item, kv_head)) return false;
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  const int seen = item.first_position + item.num_queries;
  const TiledHead head = lay_out_tiles(call, group * item.num_queries, scratch);
  shape_tiles(kTileRows, kTileRows);
  clear_padding(head.tiles);
  for (int kv_head = item.first_head; kv_head < item.last_head; ++kv_head) {
    round_queries(call, item, kv_head, head);
    const auto live_of = [seen](int start) {
      return start + kSpanTokens < seen ? kSpanTokens : seen - start;
    };
    auto place = source.at(0, live_of(0), kv_head);
    for (int span = 0; span < item.last_span; ++span) {
      const int start = span * kSpanTokens, live = live_of(start), next_start = start + kSpanTokens;
      const auto next =
          next_start < seen ? source.at(next_start, next_start + live_of(next_start), kv_head) : place;
      make_keys(head.tiles, place, (live + kLanes - 1) / kLanes);
      make_values(head.tiles, place, live, next);
      const int unseen = start - item.first_position;
      const int first = unseen > 0 ? unseen * group : 0;
      for (int row = first / kTileRows * kTileRows; row < head.count; row += kTileRows) {
        const int end = row + kTileRows < head.count ? row + kTileRows : head.count;
        rows_span(head, call, row, row > first ? row : first, end, live, item.first_position + 1 - start,
                  group, place, span == 0);
      }
      place = next;
    }
    write_out(call, item, kv_head, head.totals);
  }
  release_tiles();
  return true;
}

void attend_paged_tiles(const AttentionCall& call, const AttentionItem& item, float* scratch) {
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  bool is_done = false;
  if (item.num_queries > 1 && item.num_queries * group >= kLeastVectors)
    with_kv(call.shape.type,
            [&](auto kv) { is_done = attend_tiles<PagedSource<decltype(kv)>>(call, item, scratch); });
  if (!is_done) avx512_kernels().bfloat16_attention->paged(call, item, scratch);
}

const AttentionKernels& bfloat16_attention_kernels() {
  static const AttentionKernels table = [] {
    AttentionKernels copy = *avx512_kernels().bfloat16_attention;
    copy.paged = attend_paged_tiles;
    // Tiles of a span are made once for an item: the more queries, the better.
    copy.cut = {32, 3};
    return copy;
  }();
  return table;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
