// How the attention of one step is cut into items. Knows rows and contexts; neither memory nor arithmetic,
// which give the same bits for every cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace pagecast {

// Made anew for every run, once for all layers that read the same rows.
class AttentionPlan {
 public:
  // `context_len` [max_rows] and `query_start` [max_rows + 1] are read at every run. All split queries of a
  // run have at most `max_partials` spans.
  AttentionPlan(const int32_t* context_len, const int32_t* query_start, int num_kv_heads, int64_t max_context,
                int64_t max_partials, int num_threads, TileCut cut = {});

  bool is_for(const int32_t* context_len, const int32_t* query_start, int num_kv_heads, int64_t max_context,
              int64_t max_partials) const;

  // Cuts the live rows. Throws std::invalid_argument where query_start does not rise from 0 to num_tokens or
  // a row with tokens has a context_len below their number or above max_context.
  void cut(int64_t num_rows, int64_t num_tokens);

  // The long ones first.
  const std::vector<AttentionItem>& items() const { return items_; }
  // Spans times queries of all rows.
  int64_t cost() const { return cost_; }

  // Spans that split queries of a run have at most, all together, where a row has up to `max_context` tokens:
  // their partial results are kept until all of a query's are there. Longer ones are not split.
  static int64_t max_partials(const KvShape& shape, int64_t max_context, int num_threads) {
    const int64_t fit = kMaxPartialBytes / 4 / (shape.num_kv_heads * partial_floats(shape));
    const int64_t needed = max_splits(num_threads) * num_spans(max_context);
    return fit < needed ? fit : needed;
  }

  // Queries that are split over spans are fewer than this.
  static int64_t max_splits(int num_threads) { return int64_t{kItemsPerThread} * num_threads; }

  static int num_spans(int64_t context) {
    return static_cast<int>((context + kSpanTokens - 1) / kSpanTokens);
  }

 private:
  // As TileCut's, of rows of one query.
  static constexpr int kItemsPerThread = 8;
  static constexpr int kMinTileQueries = 4;
  // Sixteen rows of 8,192 tokens of a model with 8 KV heads of 128 have some 35 MB.
  static constexpr int64_t kMaxPartialBytes = int64_t{64} << 20;

  void check(int64_t num_rows, int64_t num_tokens) const;
  void add_tiles(int32_t row, int tile_queries);
  void add_split(int32_t row, int64_t num_parts);

  const int32_t* context_len_;
  const int32_t* query_start_;
  int num_kv_heads_;
  int64_t max_context_;
  int64_t max_partials_;
  int num_threads_;
  TileCut cut_;
  std::vector<AttentionItem> items_;
  int32_t num_splits_ = 0;
  int32_t num_partials_ = 0;
  int64_t cost_ = 0;
};

}  // namespace pagecast
