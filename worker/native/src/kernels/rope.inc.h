// Rotary embedding of interleaved pairs, and the store of keys and values. Source of the rotation: Su et al.,
// "RoFormer" (2021), arXiv:2104.09864.
#pragma once

#include <cstring>

#include "../kernels.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Turns one head's pairs by a token's angles; element d goes to out[d * step].
PAGECAST_INLINE void turn(const float* x, const float* cos, const float* sin, int head_size, float* out,
                          int64_t step) {
  for (int i = 0; i < head_size / 2; ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    out[2 * i * step] = a * cos[i] - b * sin[i];
    out[(2 * i + 1) * step] = a * sin[i] + b * cos[i];
  }
}

// Where element 0 of a token's key and value is, for one head.
struct Slot {
  float* key;    // next element block_size further
  float* value;  // next element beside it
};

PAGECAST_INLINE Slot find_slot(KvLayer keys, KvLayer values, const KvShape& shape, int64_t slot, int head) {
  const int64_t block = slot / shape.block_size;
  const int64_t token = slot % shape.block_size;
  return {keys.data + block * keys.block_stride + head * keys.head_stride + token,
          values.data + block * values.block_stride + head * values.head_stride + token * shape.head_size};
}

void rope(Rows x, int num_heads, int head_size, const int32_t* position, Rope table, int64_t first,
          int64_t last, Rows out) {
  for (int64_t t = first; t < last; ++t) {
    const int64_t angle = int64_t{position[t]} * (head_size / 2);
    for (int64_t at = 0; at < int64_t{num_heads} * head_size; at += head_size)
      turn(x.row(t) + at, table.cos + angle, table.sin + angle, head_size, out.row(t) + at, 1);
  }
}

void store_kv(Rows k, Rows v, const int64_t* slot_mapping, KvLayer keys, KvLayer values, KvShape shape,
              int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t)
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const Slot slot = find_slot(keys, values, shape, slot_mapping[t], head);
      const int64_t at = int64_t{head} * shape.head_size;
      for (int64_t d = 0; d < shape.head_size; ++d) slot.key[d * shape.block_size] = k.row(t)[at + d];
      std::memcpy(slot.value, v.row(t) + at, static_cast<size_t>(shape.head_size) * sizeof(float));
    }
}

void rope_store(Rows q, Rows k, Rows v, const int32_t* position, const int64_t* slot_mapping, Rope table,
                KvLayer keys, KvLayer values, KvShape shape, int64_t first, int64_t last, Rows out) {
  rope(q, shape.num_heads, shape.head_size, position, table, first, last, out);
  for (int64_t t = first; t < last; ++t) {
    const int64_t angle = int64_t{position[t]} * (shape.head_size / 2);
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const Slot slot = find_slot(keys, values, shape, slot_mapping[t], head);
      const int64_t at = int64_t{head} * shape.head_size;
      turn(k.row(t) + at, table.cos + angle, table.sin + angle, shape.head_size, slot.key, shape.block_size);
      std::memcpy(slot.value, v.row(t) + at, static_cast<size_t>(shape.head_size) * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
