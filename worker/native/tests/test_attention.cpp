// Attention: right against double, and the same bits however rows are batched, chunked, cut and shared.
#include <stdexcept>

#include "attention_case.h"
#include "check.h"
#include "sets.h"

namespace {

using pagecast::KvShape;
using pagecast::KvType;

// block_size, head_size, num_heads, num_kv_heads
const KvShape kSizes[] = {{16, 64, 9, 3},  {32, 16, 4, 4},   {16, 80, 8, 1}, {48, 256, 2, 1},
                          {16, 16, 25, 1}, {32, 32, 20, 10}, {64, 32, 10, 2}};

// All of these sizes in float32, the first of them and those of large groups in every type.
std::vector<KvShape> all_shapes() {
  std::vector<KvShape> shapes;
  for (const KvType type : kKvTypes)
    for (KvShape shape : kSizes) {
      const bool is_kept = shape.num_heads == 9 || shape.num_heads / shape.num_kv_heads >= 8;
      shape.type = type;
      if (is_kept || type == KvType::kFloat32) shapes.push_back(shape);
    }
  return shapes;
}

const std::vector<KvShape> kShapes = all_shapes();
const std::vector<TestRow> kRagged = {{1, 1},   {1, 15},  {0, 7},    {3, 3}, {1, 64},  {1, 65},
                                      {20, 40}, {1, 129}, {33, 100}, {0, 1}, {16, 16}, {1, 333}};

// The first size in every type, with every set.
std::vector<std::pair<KvShape, const pagecast::Kernels*>> every_kind() {
  std::vector<std::pair<KvShape, const pagecast::Kernels*>> kinds;
  for (const KvShape& shape : kShapes)
    for (const pagecast::Kernels* set : sets_of_this_machine())
      if (shape.num_heads == kSizes[0].num_heads) kinds.emplace_back(shape, set);
  return kinds;
}

void test_against_double() {
  for (const KvShape& shape : kShapes)
    for (const pagecast::Kernels* set : sets_of_this_machine()) {
      AttentionCase rows(shape, kRagged);
      const std::vector<float> out = rows.run(2, set->name);
      double worst = 0;
      for (size_t r = 0; r < kRagged.size(); ++r)
        for (int query = 0; query < kRagged[r].num_queries; ++query)
          for (int head = 0; head < shape.num_heads; ++head) {
            const std::vector<double> twin = rows.twin(static_cast<int64_t>(r), query, head);
            for (int d = 0; d < shape.head_size; ++d) {
              const auto at = static_cast<size_t>((rows.query_start[r] + query) * rows.width +
                                                  head * shape.head_size + d);
              const double error = std::fabs(out[at] - twin[static_cast<size_t>(d)]);
              worst = std::isnan(error) ? 1e9 : std::max(worst, error);
            }
          }
      // What rounding a score of head_size products moves a weight by.
      CHECK(worst < 4e-6 * std::max(1.0, shape.head_size / 64.0), "%s %s, head_size %d: off by %g", set->name,
            name_of(shape.type), shape.head_size, worst);
    }
}

// Batches of any size by 1 to 4 threads: few rows are split over spans from two threads on, many are not.
void test_threads_and_sets_agree() {
  const std::vector<std::vector<TestRow>> batches = {
      {{1, 700}}, {{1, 64}, {1, 257}}, {{5, 130}}, {{1, 300}, {40, 90}}, kRagged};
  for (const KvShape& shape : kShapes)
    for (const auto& batch : batches) {
      AttentionCase rows(shape, batch);
      std::vector<float> fused;
      for (const pagecast::Kernels* set : sets_of_this_machine()) {
        const std::vector<float> alone = rows.run(1, set->name);
        for (int num_threads = 2; num_threads <= 4; ++num_threads)
          CHECK(hash_bits(rows.run(num_threads, set->name)) == hash_bits(alone), "%s, %d threads, %zu rows",
                set->name, num_threads, batch.size());
        if (!set->fused) continue;
        if (fused.empty()) fused = alone;
        CHECK(hash_bits(fused) == hash_bits(alone), "%s gives other bits", set->name);
      }
    }
}

// A query's bits, alone as a decode row, in a chunk and in a batch.
void test_batching_and_chunking_agree() {
  for (const auto& [shape, set] : every_kind()) {
    AttentionCase chunk(shape, {{37, 150}}, {5});
    const std::vector<float> all = chunk.run(1, set->name);
    AttentionCase batch(shape, {{1, 40}, {37, 150}, {1, 9}}, {1, 5, 2});
    const std::vector<float> among = batch.run(2, set->name);
    CHECK(std::equal(all.begin(), all.end(), among.begin() + chunk.width), "%s: neighbours matter",
          set->name);
    for (int query = 0; query < 37; ++query) {
      // The pool is drawn token by token, so a shorter row holds the same tokens.
      AttentionCase decode(shape, {{1, 114 + query}}, {5});
      const std::vector<float> one = decode.run(1 + query % 2, set->name);
      CHECK(std::equal(one.begin(), one.end(), all.begin() + query * chunk.width),
            "%s: query %d depends on its chunk", set->name, query);
    }
  }
}

// Every context up to 600, as a decode row by one thread or two and as a query of one long chunk.
[[maybe_unused]] void test_every_context_agrees() {
  constexpr int kContext = 600;
  for (const KvType type : kKvTypes)
    for (const pagecast::Kernels* set : sets_of_this_machine()) {
      const KvShape shape = {16, 16, 3, 1, type};
      AttentionCase chunk(shape, {{kContext, kContext}}, {5});
      const std::vector<float> all = chunk.run(2, set->name);
      const int stride = set == sets_of_this_machine()[0] ? 1 : 13;
      for (int context = 1; context <= kContext; context += stride) {
        AttentionCase decode(shape, {{1, context}}, {5});
        const std::vector<float> one = decode.run(1 + context % 2, set->name);
        CHECK(std::equal(one.begin(), one.end(), all.begin() + (context - 1) * chunk.width),
              "%s %s: context %d", set->name, name_of(type), context);
      }
    }
}

void test_split_at_any_span_agrees() {
  for (const KvShape& shape : kShapes)
    for (const pagecast::Kernels* set : sets_of_this_machine()) {
      AttentionCase rows(shape, {{1, 450}});
      const int spans = pagecast::AttentionPlan::num_spans(450);
      const std::vector<float> whole = rows.run(1, set->name);
      std::vector<float> out(whole.size(), kNaN);
      const pagecast::AttentionCall call = {{rows.q.data(), rows.width},
                                            {out.data(), rows.width},
                                            rows.keys().layer(),
                                            rows.values().layer(),
                                            shape,
                                            rows.block_table.data(),
                                            rows.max_blocks,
                                            rows.scale};
      std::vector<float> scratch(static_cast<size_t>(pagecast::attention_scratch_floats(shape)));
      std::vector<float> partials(
          static_cast<size_t>(spans * shape.num_kv_heads * pagecast::partial_floats(shape)));
      for (int width = 1; width <= spans; ++width) {
        std::fill(out.begin(), out.end(), kNaN);
        const int heads = width % 2 == 0 ? 1 : shape.num_kv_heads;
        for (int h = 0; h < shape.num_kv_heads; h += heads) {
          // The last part first: the order of computing must not matter.
          for (int first = (spans - 1) / width * width; first >= 0; first -= width)
            set->attention->paged_spans(
                call, {0, 0, 449, 1, first, std::min(first + width, spans), h, h + heads, 0, 2, 0},
                scratch.data(), partials.data());
          set->attention->merge(call, {0, 0, 449, 1, 0, spans, h, h + heads, 0, 2, 0}, spans, scratch.data(),
                                partials.data());
        }
        CHECK(hash_bits(out) == hash_bits(whole), "%s: parts of %d spans, %d heads", set->name, width, heads);
      }
    }
}

void test_dense_is_paged() {
  for (const KvShape& shape : kSizes)
    for (const int context : {1, 16, 77, 200, 640})
      for (const pagecast::Kernels* set : sets_of_this_machine()) {
        AttentionCase rows(shape, {{1, context}});
        const std::vector<float> paged = rows.run(2, set->name);
        std::vector<float> keys, values, arena(static_cast<size_t>(2 * rows.width), kNaN);
        for (int h = 0; h < shape.num_kv_heads; ++h)
          for (int t = 0; t < context; ++t)
            for (int d = 0; d < shape.head_size; ++d) {
              keys.push_back(rows.key(0, t, h, d));
              values.push_back(rows.value(0, t, h, d));
            }
        std::copy(rows.q.begin(), rows.q.end(), arena.begin());
        pagecast::Team team(2);
        pagecast::Program program(team, 1, 1, set->name);
        const std::vector<int64_t> kv_shape = {shape.num_kv_heads, context, shape.head_size};
        const auto extent = pagecast::Extent::kTokens;
        program.dense_attention({arena.data(), 2 * rows.width, 0, rows.width, rows.width, extent},
                                {keys.data(), kv_shape}, {values.data(), kv_shape},
                                {rows.context_len.data(), {1}}, {rows.query_start.data(), {2}}, rows.scale,
                                {arena.data(), 2 * rows.width, rows.width, rows.width, rows.width, extent});
        program.run({1, 1, 0});
        CHECK(std::equal(paged.begin(), paged.end(), arena.begin() + rows.width), "%s, context %d", set->name,
              context);
      }
}

// A later token's NaN reaches the queries that see it, and no other.
void test_later_tokens_do_not_leak() {
  for (const auto& [shape, set] : every_kind()) {
    AttentionCase clean(shape, {{24, 90}});
    AttentionCase poisoned(shape, {{24, 90}});
    poisoned.poison(0, 75);
    const std::vector<float> a = clean.run(2, set->name), b = poisoned.run(2, set->name);
    const auto border = (75 - 66) * clean.width;
    CHECK(std::equal(a.begin(), a.begin() + border, b.begin()), "%s: NaN from the future", set->name);
    CHECK(std::all_of(b.begin() + border, b.end(), [](float x) { return std::isnan(x); }), "%s: NaN lost",
          set->name);
  }
}

void test_rows_that_do_not_fit_are_refused() {
  const auto refused = [](auto change, const char* field) {
    AttentionCase rows(kShapes[0], {{2, 20}, {1, 40}});
    change(rows);
    try {
      rows.run(2, nullptr);
      CHECK(false, "%s was not refused", field);
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(field) == 0, "%s", error.what());
    }
  };
  refused([](AttentionCase& rows) { rows.context_len[0] = 1; }, "context_len");
  refused([](AttentionCase& rows) { rows.context_len[1] = 49; }, "context_len");
  refused([](AttentionCase& rows) { rows.query_start[0] = 1; }, "query_start");
  refused([](AttentionCase& rows) { rows.query_start[1] = 4; }, "query_start");
}

}  // namespace

int main() {
  test_against_double();
  test_threads_and_sets_agree();
  test_batching_and_chunking_agree();
#ifndef PAGECAST_EMULATED  // an emulator takes minutes for it
  test_every_context_agrees();
#endif
  test_split_at_any_span_agrees();
  test_dense_is_paged();
  test_later_tokens_do_not_leak();
  test_rows_that_do_not_fit_are_refused();
  for (const pagecast::Kernels* set : sets_of_this_machine()) {
    uint64_t hash = 0;
    for (const KvShape& shape : kShapes) hash ^= hash_bits(AttentionCase(shape, kRagged).run(2, set->name));
    std::printf("bits %s %016llx\n", set->fused ? "fused" : "baseline",
                static_cast<unsigned long long>(hash));
  }
  return report();
}
