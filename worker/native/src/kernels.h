// What a kernel is given and the table of them. One table per instruction set; launches pick none themselves.
#pragma once

#include <cstdint>

#include "inline.h"

namespace pagecast {

// Lanes of a vector, rows of a weight panel, tokens of an attention step: one number, so that an order of
// additions never depends on the width of the machine's registers.
inline constexpr int kLanes = 16;

PAGECAST_MEMBER constexpr int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Rows of floats. `stride` is a multiple of kLanes wherever a kernel writes: it may fill a row up to a
// multiple of kLanes, and what it reads from there must not reach a result.
struct Rows {
  float* data;
  int64_t stride;
  PAGECAST_MEMBER float* row(int64_t index) const { return data + index * stride; }
};

// An element of a packed weight.
using Weight = float;

// A weight of `num_rows` x `num_columns`, cut into panels of kLanes rows: panel p holds element (16p + lane,
// k) at (p * num_columns + k) * kLanes + lane. Missing rows of the last panel are zero.
struct Panels {
  const Weight* data;
  int64_t num_rows;
  int64_t num_columns;
  PAGECAST_MEMBER int64_t num_panels() const { return (num_rows + kLanes - 1) / kLanes; }
  PAGECAST_MEMBER const Weight* panel(int64_t index) const { return data + index * num_columns * kLanes; }
};

// One layer's keys or values. Block b of head h starts at data + b * block_stride + h * head_stride. There a
// key block holds element d of token t at d * block_size + t, a value block at t * head_size + d.
struct KvLayer {
  float* data;
  int64_t block_stride;
  int64_t head_stride;
};

struct KvShape {
  int block_size;  // a multiple of kLanes
  int head_size;   // a multiple of kLanes
  int num_heads;
  int num_kv_heads;
};

struct Rope {
  const float* cos;  // [positions, head_size / 2]
  const float* sin;
};

// Every kernel takes a half-open range [first, last) of what it is cut by, so that threads can share a
// launch.
struct Kernels {
  const char* name;  // "avx512", "avx2", "neon", "baseline"
  bool fused;        // products and sums are rounded once (FMA): all such sets give the same bits

  // By panels: out[t, n] = sum over k, ascending, of x[t, k] * w[n, k], from 0, one multiply-add a step.
  void (*linear)(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out);
  // By panels of half of w (its first half gates, num_rows / 2 is a multiple of kLanes):
  // out = silu(x @ gate.T) * (x @ up.T).
  void (*linear_swiglu)(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out);

  // By rows. Squares are summed in kLanes partial sums over k ascending, then pairwise: 16, 8, 4, 2, 1.
  void (*rms_norm)(Rows x, const float* weight, int width, float eps, int64_t first, int64_t last, Rows out);
  // sum = x + y; out = rms_norm(sum).
  void (*add_rms_norm)(Rows x, Rows y, const float* weight, int width, float eps, int64_t first, int64_t last,
                       Rows sum, Rows out);

  // By rows, elementwise.
  void (*add)(Rows x, Rows y, int width, int64_t first, int64_t last, Rows out);
  void (*swiglu)(Rows gate, Rows up, int width, int64_t first, int64_t last, Rows out);
  void (*embedding)(const Panels& w, const int32_t* token_ids, int64_t first, int64_t last, Rows out);
  void (*select_rows)(Rows x, const int32_t* index, int width, int64_t first, int64_t last, Rows out);

  // By tokens. Pairs (2i, 2i + 1) are turned: a cos - b sin, a sin + b cos, each product and sum rounded.
  void (*rope)(Rows x, int num_heads, int head_size, const int32_t* position, Rope table, int64_t first,
               int64_t last, Rows out);
  void (*store_kv)(Rows k, Rows v, const int64_t* slot_mapping, KvLayer keys, KvLayer values, KvShape shape,
                   int64_t first, int64_t last);
  void (*rope_store)(Rows q, Rows k, Rows v, const int32_t* position, const int64_t* slot_mapping, Rope table,
                     KvLayer keys, KvLayer values, KvShape shape, int64_t first, int64_t last, Rows out);

  // See attention.h for how a launch is cut into spans and merged.
  const struct AttentionKernels* attention;
};

// The sets, each linked where its instructions exist (x86: avx512, avx2; AArch64: neon; everywhere:
// baseline). Calling one's kernels is up to whoever asked the machine first.
const Kernels& avx512_kernels();
const Kernels& avx2_kernels();
const Kernels& neon_kernels();
const Kernels& baseline_kernels();

// The best set that this machine runs, or the one of that name.
// Throws std::invalid_argument for a name that is unknown or that this machine can't run.
const Kernels& kernels_for(const char* name = nullptr);

}  // namespace pagecast
