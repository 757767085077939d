// What a kernel is given and the table of them. One table per instruction set; launches pick none themselves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "panels.h"

namespace pagecast {

// Rows of floats. `stride` is a multiple of kLanes wherever a kernel writes: it may fill a row up to a
// multiple of kLanes, and what it reads from there must not reach a result.
struct Rows {
  float* data;
  int64_t stride;
  PAGECAST_MEMBER float* row(int64_t index) const { return data + index * stride; }
};

// How the elements of keys and values are kept in the pool.
enum class KvType : int {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,  // with a float32 scale for each token and head
};

PAGECAST_MEMBER constexpr int64_t element_bytes(KvType type) {
  return type == KvType::kFloat32 ? 4 : type == KvType::kInt8 ? 1 : 2;
}

// Bytes of one head's part of a block.
PAGECAST_MEMBER constexpr int64_t head_block_bytes(KvType type, int64_t block_size, int64_t head_size) {
  const int64_t scales = type == KvType::kInt8 ? block_size * 4 : 0;
  return block_size * head_size * element_bytes(type) + scales;
}

// One layer's keys or values. Block b of head h starts at byte data + b * block_stride + h * head_stride.
// There a key block holds element d of token t at d * block_size + t, a value block at t * head_size + d.
// Behind those of kInt8 lie the scales, [block_size] float32: an element times its token's scale is the
// number.
struct KvLayer {
  std::byte* data;
  int64_t block_stride;  // bytes, as is head_stride
  int64_t head_stride;
};

struct KvShape {
  int block_size;  // a multiple of kLanes
  int head_size;   // a multiple of kLanes
  int num_heads;
  int num_kv_heads;
  KvType type = KvType::kFloat32;
};

struct Rope {
  const float* cos;  // [positions, head_size / 2]
  const float* sin;
};

// Every kernel takes a half-open range [first, last) of what it is cut by, so that threads can share a
// launch.
struct Kernels {
  const char* name;  // "avx512amx", "avx512vnni", "avx512", "avx2vnni", "avx2", "neon", "baseline"
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
  // What is stored is rounded to nearest, halves to even. Of KvType::kInt8, a being the largest |x| of a
  // head: the scale is a / 127, elements are x * (127 / a), or 0 where 127 / a is not finite. Where an x is
  // not finite the scale is NaN and elements are 0.
  void (*rope)(Rows x, int num_heads, int head_size, const int32_t* position, Rope table, int64_t first,
               int64_t last, Rows out);
  void (*store_kv)(Rows k, Rows v, const int64_t* slot_mapping, KvLayer keys, KvLayer values, KvShape shape,
                   int64_t first, int64_t last);
  void (*rope_store)(Rows q, Rows k, Rows v, const int32_t* position, const int64_t* slot_mapping, Rope table,
                     KvLayer keys, KvLayer values, KvShape shape, int64_t first, int64_t last, Rows out);

  // See int8.h.
  const struct Int8Kernels* int8;

  // See bfloat16.h.
  const struct BFloat16Kernels* bfloat16;

  // See draw_kernels.h.
  const struct DrawKernels* draw;

  // See attention.h for how a launch is cut into spans and merged.
  const struct AttentionKernels* attention;
  // The same in bfloat16.
  const struct AttentionKernels* bfloat16_attention;
};

// The sets, each linked where its instructions exist (x86: those of AVX-512 and AVX2; AArch64: neon;
// everywhere: baseline). Calling one's kernels is up to whoever asked the machine first.
const Kernels& avx512amx_kernels();
const Kernels& avx512vnni_kernels();
const Kernels& avx512_kernels();
const Kernels& avx2vnni_kernels();
const Kernels& avx2_kernels();
const Kernels& neon_kernels();
const Kernels& baseline_kernels();

// The best set that this machine runs, or the one of that name.
// Throws std::invalid_argument for a name that is unknown or that this machine can't run.
const Kernels& kernels_for(const char* name = nullptr);

}  // namespace pagecast
