// Attention in bfloat16: the twin's bits, however rows are batched, chunked, cut and shared, by every set.
#include "attention_bfloat16_twin.h"
#include "check.h"
#include "sets.h"

namespace {

using pagecast::KvShape;
using pagecast::KvType;
constexpr auto kBFloat16 = pagecast::Activations::kBFloat16;

// block_size, head_size, num_heads, num_kv_heads
const KvShape kSizes[] = {{16, 64, 9, 3},  {32, 16, 4, 4},  {16, 80, 8, 2}, {32, 48, 9, 1},
                          {16, 128, 3, 1}, {48, 256, 2, 1}, {16, 16, 25, 1}};
const std::vector<TestRow> kRagged = {{1, 1},   {1, 15},  {0, 7},    {3, 3}, {1, 64},  {1, 65},
                                      {20, 40}, {1, 129}, {33, 100}, {0, 1}, {16, 16}, {1, 210}};

// The twin's results for all tokens.
std::vector<float> twin_of(AttentionCase& rows) {
  std::vector<float> out;
  for (size_t r = 0; r < rows.rows.size(); ++r)
    for (int query = 0; query < rows.rows[r].num_queries; ++query)
      for (int head = 0; head < rows.shape.num_heads; ++head) {
        const std::vector<float> one = bfloat16_twin(rows, static_cast<int64_t>(r), query, head);
        out.insert(out.end(), one.begin(), one.end());
      }
  return out;
}

// Every set by one thread and by four, which split rows over spans.
void check_case(AttentionCase& rows, const char* what) {
  const std::vector<float> twin = twin_of(rows);
  for (const pagecast::Kernels* set : sets_of_this_machine())
    for (const int num_threads : {1, 4}) {
      const std::vector<float> out = rows.run(num_threads, set->name, kBFloat16);
      size_t off = 0, first = out.size();
      for (size_t i = 0; i < out.size(); ++i) {
        // Without fusing e^x is another, by which a weight may be rounded to its other neighbour.
        const bool is_right = set->fused ? std::memcmp(&out[i], &twin[i], sizeof out[i]) == 0
                                         : std::fabs(out[i] - twin[i]) < 0.01f;
        if (is_right) continue;
        ++off;
        first = std::min(first, i);
      }
      CHECK(off == 0, "%s: %s, %d threads, %s, head_size %d, %d heads for %d: %zu of %zu off, from token %zu",
            what, set->name, num_threads, name_of(rows.shape.type), rows.shape.head_size,
            rows.shape.num_heads, rows.shape.num_kv_heads, off, out.size(),
            first / static_cast<size_t>(rows.width));
    }
}

void test_ragged_rows() {
  for (KvShape shape : kSizes)
    for (const KvType type : kKvTypes) {
      shape.type = type;
      AttentionCase rows(shape, kRagged);
      check_case(rows, "ragged");
    }
}

[[maybe_unused]] void test_chunks_of_any_size() {
  for (const KvType type : kKvTypes)
    for (int num_queries = 1; num_queries <= 17; ++num_queries) {
      AttentionCase rows(
          {16, 48, 4, 1, type},
          {{num_queries, num_queries}, {num_queries, num_queries + 55}, {num_queries, num_queries + 112}});
      check_case(rows, "chunks");
    }
}

[[maybe_unused]] void test_every_context() {
  for (const KvType type : kKvTypes) {
    AttentionCase chunk({16, 16, 3, 1, type}, {{210, 210}}, {5});
    check_case(chunk, "a long chunk");
    for (const pagecast::Kernels* set : sets_of_this_machine()) {
      const std::vector<float> all = chunk.run(2, set->name, kBFloat16);
      for (int context = 1; context <= 210; context += 1 + context / 66) {
        AttentionCase decode(chunk.shape, {{1, context}}, {5});
        const std::vector<float> one = decode.run(1 + context % 2, set->name, kBFloat16);
        CHECK(std::equal(one.begin(), one.end(), all.begin() + (context - 1) * chunk.width),
              "%s %s: context %d", set->name, name_of(type), context);
      }
    }
  }
}

// Scores far apart, of which many weigh less than counts, and queries, keys and values about the least that
// count.
void test_numbers_at_the_border() {
  for (KvShape shape : {kSizes[0], kSizes[2]})
    for (const KvType type : kKvTypes) {
      shape.type = type;
      AttentionCase steep(shape, {{17, 100}, {1, 90}});
      for (float& x : steep.q) x *= 20.0f;
      check_case(steep, "steep");
      AttentionCase tiny(shape, {{17, 100}, {1, 90}});
      for (size_t i = 0; i < tiny.q.size(); i += 3) tiny.q[i] *= i % 2 == 0 ? 0x1p-48f : 0x1p-47f;
      if (type == KvType::kFloat32 || type == KvType::kBFloat16)
        for (int t = 0; t < 90; t += 2)
          for (int d = t % 3; d < shape.head_size; d += 3)
            for (const bool is_key : {true, false}) {
              const int64_t slot = tiny.slot(0, t);
              tiny.pool.set(is_key, slot, 0, d, tiny.pool.element(is_key, slot, 0, d) * 0x1p-48f);
            }
      // A column of nothing else, for its result to tell which of them count: half a step below does, just.
      if (type == KvType::kFloat32 || type == KvType::kBFloat16)
        for (int t = 0; t < 100; ++t)
          tiny.pool.set(false, tiny.slot(0, t), 0, 1, 0x1p-48f * (1.0f - static_cast<float>(t % 5) / 1024));
      check_case(tiny, "tiny");
    }
}

// What a later token holds reaches the queries that see it, and no other: NaN in all, or a value that is
// infinite, or is once it is rounded.
void test_later_tokens_do_not_leak() {
  for (KvShape shape : {kSizes[0], kSizes[3]})
    for (const KvType type : kKvTypes)
      for (const float last : {kNaN, kInf, 3.4028e38f})
        for (const pagecast::Kernels* set : sets_of_this_machine()) {
          shape.type = type;
          const bool is_set = !std::isnan(last);
          const bool is_held = type == KvType::kFloat32 || (type == KvType::kBFloat16 && std::isinf(last));
          if (is_set && !is_held) continue;
          AttentionCase clean(shape, {{24, 90}}), changed(shape, {{24, 90}});
          if (is_set) {
            changed.pool.set(false, changed.slot(0, 75), 0, 5, last);
          } else {
            changed.poison(0, 75);
          }
          const std::vector<float> a = clean.run(2, set->name, kBFloat16);
          const std::vector<float> b = changed.run(2, set->name, kBFloat16);
          const auto border = (75 - 66) * clean.width;
          CHECK(std::equal(a.begin(), a.begin() + border, b.begin()), "%s %s: %g from the future", set->name,
                name_of(type), last);
          for (auto token = border; token < 24 * clean.width; token += clean.width)
            CHECK(!std::isfinite(b[static_cast<size_t>(token) + 5]), "%s %s: %g lost", set->name,
                  name_of(type), last);
        }
}

}  // namespace

int main() {
  test_ragged_rows();
#ifndef PAGECAST_EMULATED  // an emulator takes minutes for them
  test_chunks_of_any_size();
  test_every_context();
#endif
  test_numbers_at_the_border();
  test_later_tokens_do_not_leak();
  return report();
}
