// Ragged rows over a paged pool: what the attention tests run, and its plain twin in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../src/program.h"
#include "matrix.h"
#include "pool.h"

struct TestRow {
  int num_queries;
  int context;  // its queries included
};

// FNV-1a over the bits of floats, to compare machines.
inline uint64_t hash_bits(const std::vector<float>& values, uint64_t hash = 14695981039346656037u) {
  for (const float value : values) {
    unsigned char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  }
  return hash;
}

// Blocks are scattered over the pool; whatever no row's context covers is NaN. Each row's numbers are drawn
// from its own seed, so that a row is the same in every case.
class AttentionCase {
 public:
  AttentionCase(pagecast::KvShape shape, std::vector<TestRow> rows, std::vector<int> seeds = {})
      : shape(shape),
        rows(rows),
        width(int64_t{shape.num_heads} * shape.head_size),
        max_blocks(most_blocks(rows, shape.block_size)),
        pool(shape, static_cast<int64_t>(rows.size()) * max_blocks + 3) {
    if (seeds.empty())
      for (size_t r = 0; r < rows.size(); ++r) seeds.push_back(static_cast<int>(r));
    query_start.push_back(0);
    std::vector<int32_t> free;
    for (int32_t block = 0; block < pool.num_blocks; ++block) free.push_back(block);
    Random shuffle(99);
    for (size_t i = free.size(); i-- > 1;)
      std::swap(free[i], free[static_cast<size_t>(shuffle.below(static_cast<int64_t>(i) + 1))]);
    for (size_t r = 0; r < rows.size(); ++r) {
      for (int64_t b = 0; b < max_blocks; ++b) {
        block_table.push_back(free.back());
        free.pop_back();
      }
      context_len.push_back(rows[r].context);
      query_start.push_back(query_start.back() + rows[r].num_queries);
      Random random(static_cast<uint64_t>(seeds[r]) + 1);
      for (int t = 0; t < rows[r].context; ++t)
        for (int h = 0; h < shape.num_kv_heads; ++h) pool.draw(slot(static_cast<int64_t>(r), t), h, random);
      // The query at position p is the same whatever chunk it comes in.
      for (int p = rows[r].context - rows[r].num_queries; p < rows[r].context; ++p) {
        Random of_query(static_cast<uint64_t>(seeds[r]) * 100003 + static_cast<uint64_t>(p) + 17);
        for (int64_t i = 0; i < width; ++i) q.push_back(of_query.uniform(2));
      }
    }
  }

  int64_t num_tokens() const { return query_start.back(); }

  float key(int64_t row, int t, int h, int d) const { return pool.key(slot(row, t), h, d); }
  float value(int64_t row, int t, int h, int d) const { return pool.value(slot(row, t), h, d); }

  // Makes NaN of the keys and values of a token.
  void poison(int64_t row, int t) {
    for (int h = 0; h < shape.num_kv_heads; ++h) pool.poison(slot(row, t), h);
  }

  int64_t slot(int64_t row, int t) const {
    const int32_t block = block_table[static_cast<size_t>(row * max_blocks + t / shape.block_size)];
    return int64_t{block} * shape.block_size + t % shape.block_size;
  }

  pagecast::KvView keys() { return pool.view(true); }
  pagecast::KvView values() { return pool.view(false); }

  // Arrays that a launch reads its rows' lengths from.
  struct Lengths {
    const int32_t* context_len;
    const int32_t* query_start;
  };
  Lengths lengths() const { return {context_len.data(), query_start.data()}; }

  // Memory of a launch: the queries, then as many floats for the results, NaN.
  std::vector<float> arena() const {
    std::vector<float> out(q);
    out.resize(2 * q.size(), kNaN);
    return out;
  }

  // Adds the launch over `arena` to a program; contexts and starts of its rows are read from `lengths`.
  void add_to(pagecast::Program& program, std::vector<float>& arena, Lengths lengths) {
    const auto size = static_cast<int64_t>(arena.size());
    const auto num_rows = static_cast<int64_t>(rows.size());
    const auto extent = pagecast::Extent::kTokens;
    program.paged_attention({arena.data(), size, 0, width, width, extent}, keys(), values(),
                            {block_table.data(), {num_rows, max_blocks}}, {lengths.context_len, {num_rows}},
                            {lengths.query_start, {num_rows + 1}}, scale,
                            {arena.data(), size, size / 2, width, width, extent});
  }

  // All tokens' results by a program of `num_threads`, of its third run.
  std::vector<float> run(int num_threads, const char* set,
                         pagecast::Activations activations = pagecast::Activations::kFloat32) {
    const auto num_rows = static_cast<int64_t>(rows.size());
    const auto num_floats = static_cast<int64_t>(q.size());
    std::vector<float> arena = this->arena();
    pagecast::Team team(num_threads);
    pagecast::Program program(team, num_floats / width, num_rows, set, activations);
    add_to(program, arena, lengths());
    for (int run = 0; run < 3; ++run) {
      std::fill(arena.begin() + num_floats, arena.end(), kNaN);
      program.run({num_tokens(), num_rows, 0});
    }
    return {arena.begin() + num_floats, arena.end()};
  }

  // Result `d` of one query and head, in double.
  std::vector<double> twin(int64_t row, int query, int head) {
    const int h = head / (shape.num_heads / shape.num_kv_heads);
    const int last =
        rows[static_cast<size_t>(row)].context - rows[static_cast<size_t>(row)].num_queries + query;
    const float* from =
        q.data() + (query_start[static_cast<size_t>(row)] + query) * width + head * shape.head_size;
    std::vector<double> score;
    for (int t = 0; t <= last; ++t) {
      double s = 0;
      for (int d = 0; d < shape.head_size; ++d) s += static_cast<double>(from[d]) * key(row, t, h, d);
      score.push_back(s * scale);
    }
    const double peak = *std::max_element(score.begin(), score.end());
    std::vector<double> out(static_cast<size_t>(shape.head_size), 0.0);
    double sum = 0;
    for (int t = 0; t <= last; ++t) {
      const double p = std::exp(score[static_cast<size_t>(t)] - peak);
      sum += p;
      for (int d = 0; d < shape.head_size; ++d) out[static_cast<size_t>(d)] += p * value(row, t, h, d);
    }
    for (double& o : out) o /= sum;
    return out;
  }

  const pagecast::KvShape shape;
  const std::vector<TestRow> rows;
  const int64_t width;
  const int64_t max_blocks;
  const float scale = 0.17f;
  Pool pool;
  std::vector<float> q;
  std::vector<int32_t> block_table;
  std::vector<int32_t> context_len;
  std::vector<int32_t> query_start;

 private:
  static int64_t most_blocks(const std::vector<TestRow>& rows, int block_size) {
    int most = 1;
    for (const TestRow& row : rows) most = std::max(most, (row.context + block_size - 1) / block_size);
    return most;
  }
};
