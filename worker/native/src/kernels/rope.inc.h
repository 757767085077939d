// Rotary embedding of interleaved pairs, and the store of keys and values. Source of the rotation: Su et al.,
// "RoFormer" (2021), arXiv:2104.09864.
#pragma once

#include "../attention.h"
#include "../kernels.h"
#include "kv.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Turns one head's pairs by a token's angles. `out` is other memory than x, so that the compiler may take
// many pairs at once.
PAGECAST_INLINE void turn(const float* __restrict x, const float* __restrict cos, const float* __restrict sin,
                          int head_size, float* __restrict out) {
  for (int i = 0; i < head_size / 2; ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = a * sin[i] + b * cos[i];
  }
}

// What the elements of a head are multiplied by before they are rounded to eight bits, and what they are to
// be multiplied by once they are read.
struct Rounding {
  float factor;
  float scale;
};

PAGECAST_INLINE Rounding rounding_of(const float* x, int head_size) {
  F16 peak = zero();
  F16 nothing = zero();  // 0 while all x are finite, then NaN
  for (int d = 0; d < head_size; d += kLanes) {
    const F16 part = load(x + d);
    peak = max(absolute(part), peak);
    nothing = nothing + part * zero();
  }
  const float largest = max_lane(peak);
  const float none = sum(nothing);
  const float factor = 127.0f / largest;
  if (!(none == 0.0f)) return {0.0f, __builtin_nanf("")};
  return {factor < __builtin_inff() ? factor : 0.0f, largest / 127.0f};
}

// `stored`[d] = x[d] in the pool's kind.
template <typename Kv>
PAGECAST_INLINE void round_head(const float* x, int head_size, typename Kv::Element* stored, float* scale) {
  if constexpr (kHasScales<Kv>) {
    const Rounding rounding = rounding_of(x, head_size);
    *scale = rounding.scale;
    const F16 factor = broadcast(rounding.factor);
    const M16 all = first_n(rounding.scale == rounding.scale ? kLanes : 0);
    for (int d = 0; d < head_size; d += kLanes)
      Kv::store(stored + d, select(all, round_even(load(x + d) * factor), zero()));
  } else {
    for (int d = 0; d < head_size; d += kLanes) Kv::store(stored + d, load(x + d));
  }
}

// Stores one head of a token in its slot.
template <typename Kv>
PAGECAST_INLINE void store_head(const float* k, const float* v, int64_t slot, int head, const KvLayer& keys,
                                const KvLayer& values, const KvShape& shape) {
  const int64_t block = slot / shape.block_size;
  const int64_t token = slot % shape.block_size;
  const int64_t num_elements = int64_t{shape.block_size} * shape.head_size;
  const HeadBlock<Kv> key = head_block<Kv>(keys, block, head, num_elements);
  const HeadBlock<Kv> value = head_block<Kv>(values, block, head, num_elements);
  typename Kv::Element across[kMaxHeadSize];
  round_head<Kv>(k, shape.head_size, across, scale_at(key, token));
  for (int64_t d = 0; d < shape.head_size; ++d) key.elements[d * shape.block_size + token] = across[d];
  round_head<Kv>(v, shape.head_size, value.elements + token * shape.head_size, scale_at(value, token));
}

void rope(Rows x, int num_heads, int head_size, const int32_t* position, Rope table, int64_t first,
          int64_t last, Rows out) {
  for (int64_t t = first; t < last; ++t) {
    const int64_t angle = int64_t{position[t]} * (head_size / 2);
    for (int64_t at = 0; at < int64_t{num_heads} * head_size; at += head_size)
      turn(x.row(t) + at, table.cos + angle, table.sin + angle, head_size, out.row(t) + at);
  }
}

template <typename Kv>
void store_tokens(Rows k, Rows v, const int64_t* slot_mapping, const KvLayer& keys, const KvLayer& values,
                  const KvShape& shape, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t)
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t at = int64_t{head} * shape.head_size;
      store_head<Kv>(k.row(t) + at, v.row(t) + at, slot_mapping[t], head, keys, values, shape);
    }
}

template <typename Kv>
void turn_and_store(Rows k, Rows v, const int32_t* position, const int64_t* slot_mapping, Rope table,
                    const KvLayer& keys, const KvLayer& values, const KvShape& shape, int64_t first,
                    int64_t last) {
  float turned[kMaxHeadSize];
  for (int64_t t = first; t < last; ++t) {
    const int64_t angle = int64_t{position[t]} * (shape.head_size / 2);
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t at = int64_t{head} * shape.head_size;
      turn(k.row(t) + at, table.cos + angle, table.sin + angle, shape.head_size, turned);
      store_head<Kv>(turned, v.row(t) + at, slot_mapping[t], head, keys, values, shape);
    }
  }
}

void store_kv(Rows k, Rows v, const int64_t* slot_mapping, KvLayer keys, KvLayer values, KvShape shape,
              int64_t first, int64_t last) {
  with_kv(shape.type,
          [&](auto kv) { store_tokens<decltype(kv)>(k, v, slot_mapping, keys, values, shape, first, last); });
}

void rope_store(Rows q, Rows k, Rows v, const int32_t* position, const int64_t* slot_mapping, Rope table,
                KvLayer keys, KvLayer values, KvShape shape, int64_t first, int64_t last, Rows out) {
  rope(q, shape.num_heads, shape.head_size, position, table, first, last, out);
  with_kv(shape.type, [&](auto kv) {
    turn_and_store<decltype(kv)>(k, v, position, slot_mapping, table, keys, values, shape, first, last);
  });
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
