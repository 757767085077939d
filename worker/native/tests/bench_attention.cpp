// Times attention: bench_attention [threads] [set]. Decode through block tables against the same loop over
// dense keys and values, then decode and a chunk of a prompt over pools of every type. 30 layers of 3 KV
// heads, 9 heads of 64, blocks of 16: more memory than caches hold.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../src/program.h"
#include "matrix.h"
#include "pool.h"

namespace {

using namespace pagecast;

constexpr int kLayers = 30, kKvHeads = 3, kWidth = 9 * 64, kHeadSize = 64, kBlock = 16;

// Whether the pool and the dense values lie on huge pages.
bool huge_pages = true;

double run_us(Program& program, int num_tokens = 1) {
  const auto start = std::chrono::steady_clock::now();
  program.run({num_tokens, 1, 0});
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

Floats filled(int64_t count) {
  constexpr size_t kHugePage = 2 << 20;
  const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
  Floats floats(static_cast<float*>(std::aligned_alloc(kHugePage, bytes)));
  if (huge_pages) madvise(floats.get(), bytes, MADV_HUGEPAGE);
  Random random(3);
  for (int64_t i = 0; i < count; ++i) floats[static_cast<size_t>(i)] = random.uniform();
  return floats;
}

// Blocks in any order, twice as many as are read.
std::vector<int32_t> shuffled(int64_t count) {
  std::vector<int32_t> table(static_cast<size_t>(count));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  Random random(5);
  for (size_t i = table.size(); i-- > 1;)
    std::swap(table[i], table[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
  return table;
}

// A pool of any type. Its elements are small halves in both 16-bit types, and those of eight bits any.
struct BlockPool {
  BlockPool(KvType type, int64_t num_blocks)
      : type(type),
        num_blocks(num_blocks),
        head_stride(head_block_bytes(type, kBlock, kHeadSize)),
        block_stride(int64_t{kLayers} * 2 * kKvHeads * head_stride),
        data(filled(num_blocks * block_stride / 4)) {
    auto* halves = reinterpret_cast<uint16_t*>(data.get());
    if (element_bytes(type) == 2)
      for (int64_t i = 0; i < num_blocks * block_stride / 2; ++i)
        halves[i] = static_cast<uint16_t>(0x3000 + i % 997);
  }
  KvView view(int layer, int part) const {
    return {reinterpret_cast<std::byte*>(data.get()),
            num_blocks * block_stride,
            (layer * 2 + part) * kKvHeads * head_stride,
            num_blocks,
            block_stride,
            head_stride,
            kKvHeads,
            kHeadSize,
            kBlock,
            type};
  }
  KvType type;
  int64_t num_blocks, head_stride, block_stride;
  Floats data;
};

void bench(Team& team, const char* set, int context) {
  const int64_t blocks = context / kBlock;
  const BlockPool pool(KvType::kFloat32, 2 * blocks);
  const std::vector<int32_t> table = shuffled(2 * blocks);
  const std::vector<int32_t> context_len = {context}, query_start = {0, 1};
  std::vector<float> arena(2 * kWidth, 0.5f);
  const View q = {arena.data(), 2 * kWidth, 0, kWidth, kWidth, Extent::kTokens};
  const View out = {arena.data(), 2 * kWidth, kWidth, kWidth, kWidth, Extent::kTokens};
  Program paged(team, 1, 1, set), dense(team, 1, 1, set);
  std::vector<Floats> values;
  const std::vector<int64_t> shape = {kKvHeads, context, kHeadSize};
  const Floats keys = filled(int64_t{kKvHeads} * context * kHeadSize);
  for (int layer = 0; layer < kLayers; ++layer) {
    paged.paged_attention(q, pool.view(layer, 0), pool.view(layer, 1), {table.data(), {1, blocks}},
                          {context_len.data(), {1}}, {query_start.data(), {2}}, 0.125f, out);
    values.push_back(filled(int64_t{kKvHeads} * context * kHeadSize));
    dense.dense_attention(q, {keys.get(), shape}, {values.back().get(), shape}, {context_len.data(), {1}},
                          {query_start.data(), {2}}, 0.125f, out);
  }
  std::vector<double> paged_us, dense_us, ratio;
  for (int i = 0; i < 60; ++i) {
    paged_us.push_back(run_us(paged));
    dense_us.push_back(run_us(dense));
    ratio.push_back(paged_us.back() / dense_us.back());
  }
  const double bytes = 2.0 * kLayers * kKvHeads * context * kHeadSize * sizeof(float);
  std::printf(
      "context %d: paged %.1f us a layer (%.1f GB/s), dense %.1f us (%.1f GB/s), ratio %.3f of medians, %.3f "
      "of "
      "minima\n",
      context, median(paged_us) / kLayers, bytes / median(paged_us) / 1e3, median(dense_us) / kLayers,
      bytes / median(dense_us) / 1e3, median(ratio),
      *std::min_element(paged_us.begin(), paged_us.end()) /
          *std::min_element(dense_us.begin(), dense_us.end()));
}

// `num_tokens` at the end of a context, over a pool of one type: in float32 and in bfloat16, in turn.
void bench_type(Team& team, const char* set, KvType type, int context, int num_tokens) {
  const int64_t blocks = context / kBlock;
  const BlockPool pool(type, 2 * blocks);
  const std::vector<int32_t> table = shuffled(2 * blocks);
  const std::vector<int32_t> context_len = {context}, query_start = {0, num_tokens};
  const int64_t floats = int64_t{num_tokens} * kWidth;
  std::vector<float> arena(static_cast<size_t>(2 * floats), 0.01f);
  const View q = {arena.data(), 2 * floats, 0, kWidth, kWidth, Extent::kTokens};
  const View out = {arena.data(), 2 * floats, floats, kWidth, kWidth, Extent::kTokens};
  Program float32(team, num_tokens, 1, set), bfloat16(team, num_tokens, 1, set, Activations::kBFloat16);
  for (int layer = 0; layer < kLayers; ++layer)
    for (Program* program : {&float32, &bfloat16})
      program->paged_attention(q, pool.view(layer, 0), pool.view(layer, 1), {table.data(), {1, blocks}},
                               {context_len.data(), {1}}, {query_start.data(), {2}}, 0.125f, out);
  std::vector<double> us, bfloat16_us;
  for (int i = 0; i < 15; ++i) {
    us.push_back(run_us(float32, num_tokens));
    bfloat16_us.push_back(run_us(bfloat16, num_tokens));
  }
  const double bytes = 2.0 * kLayers * kKvHeads * blocks * static_cast<double>(pool.head_stride);
  const double macs = 2.0 * kLayers * kWidth * num_tokens * (context - 0.5 * (num_tokens - 1));
  const double best = *std::min_element(us.begin(), us.end());
  const double best_bfloat16 = *std::min_element(bfloat16_us.begin(), bfloat16_us.end());
  std::printf(
      "%-8s context %d, %d tokens: %.2f ms, best %.2f: %.1f GB/s, %.1f GMAC/s; in bfloat16 %.2f ms, "
      "best %.2f: %.1f GMAC/s, %.2f times as fast\n",
      name_of(type), context, num_tokens, median(us) / 1e3, best / 1e3, bytes / best / 1e3, macs / best / 1e3,
      median(bfloat16_us) / 1e3, best_bfloat16 / 1e3, macs / best_bfloat16 / 1e3, best / best_bfloat16);
}

}  // namespace

int main(int argc, char** argv) {
  Team team(argc > 1 ? std::atoi(argv[1]) : 2);
  const char* set = argc > 2 ? argv[2] : nullptr;
  for (const bool huge : {false, true}) {
    huge_pages = huge;
    std::printf("%s pages\n", huge ? "huge" : "small");
    for (const int context : {128, 1024, 4096}) bench(team, set, context);
  }
  for (const int num_tokens : {1, 64})
    for (const int context : {128, 2048, 8192})
      for (const KvType type : kKvTypes) bench_type(team, set, type, context, num_tokens);
}
