#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pagecast {
namespace {

// What an item takes, in heads times queries times spans; a lone query pays for reading the keys and values.
int64_t cost_of(const AttentionItem& item) {
  return int64_t{item.last_span - item.first_span} * (item.last_head - item.first_head) *
         (item.num_queries + 1);
}

}  // namespace

AttentionPlan::AttentionPlan(const int32_t* context_len, const int32_t* query_start, int num_kv_heads,
                             int64_t max_context, int64_t max_partials, int num_threads, TileCut cut)
    : context_len_(context_len),
      query_start_(query_start),
      num_kv_heads_(num_kv_heads),
      max_context_(max_context),
      max_partials_(max_partials),
      num_threads_(num_threads),
      cut_(cut) {}

bool AttentionPlan::is_for(const int32_t* context_len, const int32_t* query_start, int num_kv_heads,
                           int64_t max_context, int64_t max_partials) const {
  return context_len == context_len_ && query_start == query_start_ && num_kv_heads == num_kv_heads_ &&
         max_context == max_context_ && max_partials == max_partials_;
}

void AttentionPlan::check(int64_t num_rows, int64_t num_tokens) const {
  const auto fail = [](const std::string& what) { throw std::invalid_argument(what); };
  if (query_start_[0] != 0) fail("query_start: starts at " + std::to_string(query_start_[0]) + ", must be 0");
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t num_queries = int64_t{query_start_[row + 1]} - query_start_[row];
    if (num_queries < 0) fail("query_start: falls after row " + std::to_string(row));
    if (num_queries > 0 && (context_len_[row] < num_queries || context_len_[row] > max_context_)) {
      fail("context_len: " + std::to_string(context_len_[row]) + " in row " + std::to_string(row) +
           ", which has " + std::to_string(num_queries) + " tokens; its blocks hold " +
           std::to_string(max_context_));
    }
  }
  if (query_start_[num_rows] != num_tokens) {
    fail("query_start: ends at " + std::to_string(query_start_[num_rows]) + ", the step has " +
         std::to_string(num_tokens) + " tokens");
  }
}

void AttentionPlan::add_tiles(int32_t row, int tile_queries) {
  const int32_t start = query_start_[row];
  const int32_t end = query_start_[row + 1];
  for (int32_t first = start; first < end; first += tile_queries) {
    const int32_t count = std::min(tile_queries, end - first);
    const int32_t position = context_len_[row] - (end - first);
    // A lone query waits for memory, so its heads go along it together; a tile computes, and has enough to
    // do.
    const int32_t heads = count == 1 ? num_kv_heads_ : 1;
    for (int32_t head = 0; head < num_kv_heads_; head += heads)
      items_.push_back(
          {row, first, position, count, 0, num_spans(position + count), head, head + heads, -1, 1, 0});
  }
}

void AttentionPlan::add_split(int32_t row, int64_t wanted_parts) {
  const int32_t position = context_len_[row] - 1;
  const int32_t spans = num_spans(context_len_[row]);
  const bool is_kept = num_partials_ + spans <= max_partials_;
  const auto parts = static_cast<int32_t>(std::clamp<int64_t>(wanted_parts, 1, is_kept ? spans : 1));
  // Too few spans to go round: heads apart too.
  const int32_t heads = wanted_parts > parts ? 1 : num_kv_heads_;
  const int32_t split = parts > 1 ? num_splits_++ : -1;
  for (int32_t part = 0; part < parts; ++part)
    for (int32_t head = 0; head < num_kv_heads_; head += heads)
      items_.push_back({row, query_start_[row], position, 1, spans * part / parts, spans * (part + 1) / parts,
                        head, head + heads, split, parts, num_partials_});
  if (split >= 0) num_partials_ += spans;
}

void AttentionPlan::cut(int64_t num_rows, int64_t num_tokens) {
  items_.clear();
  num_splits_ = 0;
  num_partials_ = 0;
  check(num_rows, num_tokens);
  int64_t num_tiles = 0;
  cost_ = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t num_queries = query_start_[row + 1] - query_start_[row];
    if (num_queries == 0) continue;
    num_tiles += (num_queries + cut_.max_queries - 1) / cut_.max_queries;
    cost_ += num_queries * num_spans(context_len_[row]);
  }
  const int64_t wanted = int64_t{kItemsPerThread} * num_threads_;
  const bool is_few = num_threads_ > 1 && num_tiles < wanted;
  int tile_queries = cut_.max_queries;
  if (is_few) {
    const int64_t tiles = int64_t{cut_.items_per_thread} * num_threads_;
    const int64_t even = (num_tokens * num_kv_heads_ + tiles - 1) / tiles;
    tile_queries = static_cast<int>(std::clamp<int64_t>(even, kMinTileQueries, cut_.max_queries));
  }
  for (int32_t row = 0; row < num_rows; ++row) {
    if (is_few && query_start_[row + 1] - query_start_[row] == 1) {
      // Twice as many parts as are wanted: the last one to end keeps the others waiting half as long.
      add_split(row, (2 * wanted * num_spans(context_len_[row]) + cost_ - 1) / cost_);
    } else {
      add_tiles(row, tile_queries);
    }
  }
  std::stable_sort(items_.begin(), items_.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return cost_of(a) > cost_of(b); });
}

}  // namespace pagecast
