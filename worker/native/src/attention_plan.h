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
  // `context_len` [max_rows] and `query_start` [max_rows + 1] are read at every run.
  AttentionPlan(const int32_t* context_len, const int32_t* query_start, int num_kv_heads, int64_t max_context,
                int num_threads);

  bool is_for(const int32_t* context_len, const int32_t* query_start, int num_kv_heads,
              int64_t max_context) const;

  // Cuts the live rows. Throws std::invalid_argument where query_start does not rise from 0 to num_tokens or
  // a row with tokens has a context_len below their number or above max_context.
  void cut(int64_t num_rows, int64_t num_tokens);

  // The long ones first.
  const std::vector<AttentionItem>& items() const { return items_; }
  // Spans times queries of all rows.
  int64_t cost() const { return cost_; }

  // Queries that are split over spans are fewer than this.
  static int64_t max_splits(int num_threads) { return int64_t{kItemsPerThread} * num_threads; }

  static int num_spans(int64_t context) {
    return static_cast<int>((context + kSpanTokens - 1) / kSpanTokens);
  }

 private:
  // With fewer items than this for each thread, threads would wait for the one with the last long item.
  static constexpr int kItemsPerThread = 8;
  static constexpr int kMinTileQueries = 4;

  void check(int64_t num_rows, int64_t num_tokens) const;
  void add_tiles(int32_t row, int tile_queries);
  void add_split(int32_t row, int64_t num_parts);

  const int32_t* context_len_;
  const int32_t* query_start_;
  int num_kv_heads_;
  int64_t max_context_;
  int num_threads_;
  std::vector<AttentionItem> items_;
  int32_t num_splits_ = 0;
  int64_t cost_ = 0;
};

}  // namespace pagecast
