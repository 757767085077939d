// Times decode attention through block tables against the same loop over dense keys and values:
// bench_attention [threads] [set]. 30 layers of 3 KV heads, 9 heads of 64, blocks of 16: more memory than
// caches hold.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../src/program.h"
#include "matrix.h"

namespace {

using namespace pagecast;

constexpr int kLayers = 30, kKvHeads = 3, kWidth = 9 * 64, kHeadSize = 64, kBlock = 16;

// Whether the pool and the dense values lie on huge pages.
bool huge_pages = true;

double run_us(Program& program) {
  const auto start = std::chrono::steady_clock::now();
  program.run({1, 1, 0});
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

void bench(Team& team, const char* set, int context) {
  const int64_t blocks = context / kBlock, pool_blocks = 2 * blocks, floats = kBlock * kHeadSize;
  const int64_t block_stride = int64_t{kLayers} * 2 * kKvHeads * floats;
  const Floats pool = filled(pool_blocks * block_stride);
  std::vector<int32_t> table(static_cast<size_t>(pool_blocks));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  Random random(5);
  for (size_t i = table.size(); i-- > 1;)
    std::swap(table[i], table[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
  const std::vector<int32_t> context_len = {context}, query_start = {0, 1};
  std::vector<float> arena(2 * kWidth, 0.5f);
  const View q = {arena.data(), 2 * kWidth, 0, kWidth, kWidth, Extent::kTokens};
  const View out = {arena.data(), 2 * kWidth, kWidth, kWidth, kWidth, Extent::kTokens};
  Program paged(team, 1, 1, set), dense(team, 1, 1, set);
  std::vector<Floats> values;
  const std::vector<int64_t> shape = {kKvHeads, context, kHeadSize};
  const Floats keys = filled(int64_t{kKvHeads} * context * kHeadSize);
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto kv = [&](int part) {
      return KvView{pool.get(),
                    pool_blocks * block_stride,
                    (layer * 2 + part) * kKvHeads * floats,
                    pool_blocks,
                    block_stride,
                    floats,
                    kKvHeads,
                    kHeadSize,
                    kBlock};
    };
    paged.paged_attention(q, kv(0), kv(1), {table.data(), {1, blocks}}, {context_len.data(), {1}},
                          {query_start.data(), {2}}, 0.125f, out);
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

}  // namespace

int main(int argc, char** argv) {
  Team team(argc > 1 ? std::atoi(argv[1]) : 2);
  for (const bool huge : {true, false}) {
    huge_pages = huge;
    std::printf("%s pages\n", huge ? "huge" : "small");
    for (const int context : {128, 1024, 4096}) bench(team, argc > 2 ? argv[2] : nullptr, context);
  }
}
