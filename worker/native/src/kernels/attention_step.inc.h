// One step of attention: kLanes tokens, for query vectors that share a KV head. Knows neither where the next
// tokens are nor how spans are put together.
#pragma once

#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Accumulators that fit into registers, and query vectors that share a loaded key.
inline constexpr int kAccumulators = Native::kWidth == 16 ? 24 : Native::kFused ? 6 : 3;
inline constexpr int kMaxChunk = kAccumulators > 12 ? 12 : kAccumulators;

// Where the kLanes tokens of a step are: element d of token t at keys + d * key_stride + t and
// values + t * head_size + d.
struct Step {
  const float* keys;
  const float* values;
};

// The query vectors of an item that share a KV head, query by query, heads of the group within, and their
// state.
struct Tile {
  int count;
  int kv_head;
  int head_size;
  float scale;
  float* q;        // [head_size, count]
  float* weights;  // [count, kLanes], a step's
  float* m;        // [count]
  float* l;        // [count]
  float* acc;      // [count, head_size]
};

// acc = acc * c, then += p[t] * v[t], for M vectors from `first` and N * kLanes elements from `column`.
template <int M, int N>
PAGECAST_INLINE void add_values(const Tile& tile, int first, int column, const float* values, int live,
                                const float* decay, const float* ahead) {
  F16 acc[M][N];
  float* to = tile.acc + int64_t{first} * tile.head_size + column;
  const float* weights = tile.weights + first * kLanes;
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j)
      acc[i][j] = load(to + int64_t{i} * tile.head_size + j * kLanes) * broadcast(decay[i]);
  for (int t = 0; t < live; ++t) {
    const int64_t at = int64_t{t} * tile.head_size + column;
    F16 v[N];
    for (int j = 0; j < N; ++j) {
      v[j] = load(values + at + j * kLanes);
      __builtin_prefetch(ahead + at + j * kLanes);
    }
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) {
      const F16 p = broadcast(weights[i * kLanes + t]);
      for (int j = 0; j < N; ++j) acc[i][j] = fma(p, v[j], acc[i][j]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store(to + int64_t{i} * tile.head_size + j * kLanes, acc[i][j]);
}

// One step of M vectors from `first`, of which the step's first `live` tokens are seen. What comes next,
// `ahead`, is fetched while this is worked on: the next block is anywhere in the pool, so no prefetcher
// guesses it.
template <int M>
void chunk_step(const Tile& tile, int first, Step step, int64_t key_stride, int live, Step ahead) {
  constexpr int kFit = kAccumulators / M;
  constexpr int N = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  F16 s[M];
  for (int i = 0; i < M; ++i) s[i] = zero();
  const float* q = tile.q + first;
#pragma GCC unroll 4
  for (int d = 0; d < tile.head_size; ++d) {
    const F16 k = load(step.keys + d * key_stride);
    __builtin_prefetch(ahead.keys + d * key_stride);
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) s[i] = fma(broadcast(q[i]), k, s[i]);
    q += tile.count;
  }

  const F16 scale = broadcast(tile.scale);
  const F16 none = broadcast(-__builtin_inff());
  const M16 seen = first_n(live);
  float* m = tile.m + first;
  float* l = tile.l + first;
  float peak[kLanes] = {};
  float decay[kLanes];
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i) {
    s[i] = select(seen, s[i] * scale, none);
    const float top = max_lane(s[i]);
    peak[i] = top > m[i] ? top : m[i];
  }
  store_n(decay, exp(load_n(m, M) - load_n(peak, M)), M);
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i) {
    const F16 p = exp(s[i] - broadcast(peak[i]));
    store(tile.weights + (first + i) * kLanes, p);
    m[i] = peak[i];
    l[i] = l[i] * decay[i] + sum(p);
  }

  int column = 0;
  for (; column + N * kLanes <= tile.head_size; column += N * kLanes)
    add_values<M, N>(tile, first, column, step.values, live, decay, ahead.values);
  if constexpr (N > 1)
    for (; column < tile.head_size; column += kLanes)
      add_values<M, 1>(tile, first, column, step.values, live, decay, ahead.values);
}

template <int M>
PAGECAST_INLINE void chunk_step_of(int count, const Tile& tile, int first, Step step, int64_t key_stride,
                                   int live, Step ahead) {
  if constexpr (M > 1) {
    if (count < M) return chunk_step_of<M - 1>(count, tile, first, step, key_stride, live, ahead);
  }
  chunk_step<M>(tile, first, step, key_stride, live, ahead);
}

// One step of `count` vectors from `first`, cut into even chunks.
void tile_step(const Tile& tile, int first, int count, Step step, int64_t key_stride, int live, Step ahead) {
  const int num_chunks = (count + kMaxChunk - 1) / kMaxChunk;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int begin = count * chunk / num_chunks;
    const int end = count * (chunk + 1) / num_chunks;
    chunk_step_of<kMaxChunk>(end - begin, tile, first + begin, step, key_stride, live, ahead);
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
