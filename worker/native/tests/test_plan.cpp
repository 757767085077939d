// The cut of attention: every head of every query over every span exactly once, the same whenever it is made.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../src/attention_plan.h"
#include "check.h"

namespace {

using pagecast::AttentionItem;
using pagecast::AttentionPlan;

constexpr int64_t kNoLimit = 1 << 20;

struct Rows {
  std::vector<int32_t> context_len;
  std::vector<int32_t> query_start;
  int64_t num_rows() const { return static_cast<int64_t>(context_len.size()); }
  int64_t num_tokens() const { return query_start.back(); }
};

const std::vector<Rows> kBatches = {{{700}, {0, 1}},
                                    {{64}, {0, 1}},
                                    {{65}, {0, 1}},
                                    {{300, 129}, {0, 1, 2}},
                                    {{130}, {0, 5}},
                                    {{300, 7, 90, 1}, {0, 1, 1, 41, 42}},
                                    {std::vector<int32_t>(7, 500), {0, 1, 2, 3, 4, 5, 6, 7}}};

auto fields(const AttentionItem& item) {
  return std::tuple(item.row, item.first_query, item.first_position, item.num_queries, item.first_span,
                    item.last_span, item.first_head, item.last_head, item.split, item.num_parts,
                    item.first_partial);
}

void check_cover(const AttentionPlan& plan, const Rows& rows, int num_kv_heads, int num_threads) {
  std::map<std::tuple<int32_t, int32_t, int32_t>, int> times;  // by query, head and span
  std::map<std::pair<int32_t, int32_t>, std::vector<AttentionItem>> parts;
  for (const AttentionItem& item : plan.items()) {
    const auto row = static_cast<size_t>(item.row);
    CHECK(item.first_position == rows.context_len[row] - (rows.query_start[row + 1] - item.first_query),
          "position %d", item.first_position);
    for (int32_t i = 0; i < item.num_queries; ++i) {
      const int32_t spans = AttentionPlan::num_spans(item.first_position + i + 1);
      for (int32_t head = item.first_head; head < item.last_head; ++head)
        for (int32_t span = item.first_span; span < std::min(item.last_span, spans); ++span)
          ++times[{item.first_query + i, head, span}];
    }
    CHECK(item.split >= -1 && item.split < AttentionPlan::max_splits(num_threads), "split %d of %d threads",
          item.split, num_threads);
    if (item.split >= 0) parts[{item.split, item.first_head}].push_back(item);
  }
  size_t wanted = 0;
  for (int64_t row = 0; row < rows.num_rows(); ++row) {
    const auto r = static_cast<size_t>(row);
    const int32_t end = rows.query_start[r + 1];
    for (int32_t query = rows.query_start[r]; query < end; ++query)
      wanted += static_cast<size_t>(AttentionPlan::num_spans(rows.context_len[r] - (end - query) + 1) *
                                    num_kv_heads);
  }
  CHECK(times.size() == wanted, "%zu spans of heads of queries, not %zu", times.size(), wanted);
  for (const auto& [key, count] : times) CHECK(count == 1, "%d times", count);
  for (const auto& [key, items] : parts) {
    CHECK(items.size() == static_cast<size_t>(items[0].num_parts), "%zu parts", items.size());
    for (const AttentionItem& item : items) CHECK(item.first_query == items[0].first_query, "shared split");
  }
}

void test_every_span_once() {
  for (int num_threads = 1; num_threads <= 8; ++num_threads)
    for (const int num_kv_heads : {1, 3})
      for (const Rows& rows : kBatches) {
        AttentionPlan plan(rows.context_len.data(), rows.query_start.data(), num_kv_heads, 1024, kNoLimit,
                           num_threads);
        plan.cut(rows.num_rows(), rows.num_tokens());
        const std::vector<AttentionItem> first = plan.items();
        check_cover(plan, rows, num_kv_heads, num_threads);
        for (int again = 0; again < 3; ++again) plan.cut(rows.num_rows(), rows.num_tokens());
        CHECK(std::equal(first.begin(), first.end(), plan.items().begin(), plan.items().end(),
                         [](const auto& a, const auto& b) { return fields(a) == fields(b); }),
              "another cut at the fourth time");
      }
}

// What kernels ask for is kept to, and a chunk is cut evenly where it makes as few items as they ask for.
void test_kernels_choose_the_cut() {
  const Rows rows = {{300, 2000}, {0, 1, 65}};
  for (const pagecast::TileCut cut : {pagecast::TileCut{16, 8}, pagecast::TileCut{32, 3}})
    for (int num_threads = 1; num_threads <= 8; ++num_threads) {
      AttentionPlan plan(rows.context_len.data(), rows.query_start.data(), 3, 2048, kNoLimit, num_threads,
                         cut);
      plan.cut(2, 65);
      check_cover(plan, rows, 3, num_threads);
      int32_t most = 0;
      for (const AttentionItem& item : plan.items()) most = std::max(most, item.num_queries);
      const int even = (65 * 3 - 1) / (cut.items_per_thread * num_threads) + 1;
      CHECK(most == (num_threads == 1 ? cut.max_queries : std::clamp(even, 4, cut.max_queries)),
            "%d queries, %d threads", most, num_threads);
    }
}

void test_some_rows_are_split() {
  const Rows& rows = kBatches[0];
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    AttentionPlan plan(rows.context_len.data(), rows.query_start.data(), 2, 1024, kNoLimit, num_threads);
    plan.cut(1, 1);
    CHECK((plan.items()[0].split >= 0) == (num_threads > 1), "%d threads", num_threads);
  }
}

// Partial results are kept for so many spans, one split query's behind another's; what they have no room for
// is done in one piece, heads apart.
void test_split_queries_share_the_room_for_partials() {
  const Rows rows = {{640, 640, 640}, {0, 1, 2, 3}};
  for (const int64_t room : {kNoLimit, int64_t{20}, int64_t{19}, int64_t{0}}) {
    AttentionPlan plan(rows.context_len.data(), rows.query_start.data(), 2, 1024, room, 4);
    plan.cut(3, 3);
    check_cover(plan, rows, 2, 4);
    std::map<int32_t, int32_t> partials;  // first one of each split
    for (const AttentionItem& item : plan.items())
      if (item.split >= 0) partials[item.split] = item.first_partial;
    const auto num_splits = static_cast<int64_t>(partials.size());
    CHECK(num_splits == (room == kNoLimit ? 3 : room / 10), "%d splits", static_cast<int>(num_splits));
    for (const auto& [split, first] : partials) CHECK(first == 10 * split, "split %d from %d", split, first);
  }
  const pagecast::KvShape shape = {16, 128, 32, 8};
  const int64_t bytes = 4 * shape.num_kv_heads * pagecast::partial_floats(shape);
  CHECK(AttentionPlan::max_partials(shape, 8192, 2) == 16 * 128, "8,192 tokens");
  CHECK(AttentionPlan::max_partials(shape, 1 << 20, 64) * bytes <= int64_t{64} << 20, "a million tokens");
}

void test_rows_that_do_not_fit_the_step_are_refused() {
  const Rows& rows = kBatches[5];
  AttentionPlan plan(rows.context_len.data(), rows.query_start.data(), 2, 1024, kNoLimit, 2);
  for (const int64_t num_tokens : {0, 41, 43}) {
    try {
      plan.cut(rows.num_rows(), num_tokens);
      CHECK(false, "%d tokens were not refused", static_cast<int>(num_tokens));
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find("query_start: ends at 42") == 0, "%s", error.what());
    }
  }
  plan.cut(rows.num_rows(), 42);
  plan.cut(3, 41);
}

}  // namespace

int main() {
  test_every_span_once();
  test_kernels_choose_the_cut();
  test_some_rows_are_split();
  test_split_queries_share_the_room_for_partials();
  test_rows_that_do_not_fit_the_step_are_refused();
  return report();
}
