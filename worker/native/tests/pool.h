// A pool of KV blocks for tests, of every type, whose elements are made and read bit by bit: what kernels
// make of them must be the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../src/operands.h"
#include "matrix.h"

inline constexpr pagecast::KvType kKvTypes[] = {pagecast::KvType::kFloat32, pagecast::KvType::kFloat16,
                                                pagecast::KvType::kBFloat16, pagecast::KvType::kInt8};

inline const char* name_of(pagecast::KvType type) {
  const char* const names[] = {"float32", "float16", "bfloat16", "int8"};
  return names[static_cast<int>(type)];
}

// A number of 16 bits with so many of them for its mantissa and an exponent of the others but one.
inline float decode_16(uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? kNaN : sign * kInf;
  const int implied = exponent > 0 ? 1 << mantissa_bits : 0;
  const int shift = (exponent > 0 ? exponent : 1) - bias - mantissa_bits;
  return sign * std::ldexp(static_cast<float>(mantissa + implied), shift);
}

// One layer's keys and values, block by block, keys first and something else behind; all bits are set, which
// is NaN in every type. Blocks lie a little further apart than they need to.
class Pool {
 public:
  Pool(const pagecast::KvShape& shape, int64_t num_blocks)
      : shape(shape),
        num_blocks(num_blocks),
        head_stride(pagecast::head_block_bytes(shape.type, shape.block_size, shape.head_size)),
        block_stride(3 * shape.num_kv_heads * head_stride),
        data(static_cast<size_t>(num_blocks * block_stride), std::byte{0xff}) {}

  pagecast::KvView view(bool is_key) {
    return {data.data(),
            static_cast<int64_t>(data.size()),
            is_key ? 0 : shape.num_kv_heads * head_stride,
            num_blocks,
            block_stride,
            head_stride,
            shape.num_kv_heads,
            shape.head_size,
            shape.block_size,
            shape.type};
  }
  pagecast::KvLayer keys() { return view(true).layer(); }
  pagecast::KvLayer values() { return view(false).layer(); }

  // The element times its scale, in float32.
  float key(int64_t slot, int head, int d) const { return number(true, slot, head, d); }
  float value(int64_t slot, int head, int d) const { return number(false, slot, head, d); }
  // What lies in an element, without its scale.
  float element(bool is_key, int64_t slot, int head, int d) const {
    const size_t at = place(is_key, slot, head, d);
    using pagecast::KvType;
    if (shape.type == KvType::kFloat32) return read<float>(at);
    if (shape.type == KvType::kFloat16) return decode_16(read<uint16_t>(at), 10);
    if (shape.type == KvType::kBFloat16) return decode_16(read<uint16_t>(at), 7);
    return static_cast<float>(read<int8_t>(at));
  }
  float scale(bool is_key, int64_t slot, int head) const {
    return shape.type == pagecast::KvType::kInt8 ? read<float>(scale_place(is_key, slot, head)) : 1.0f;
  }

  // Numbers within (-2, 2) for a token's key and value.
  void draw(int64_t slot, int head, Random& random) {
    using pagecast::KvType;
    for (int d = 0; d < shape.head_size; ++d)
      for (const bool is_key : {true, false}) {
        const size_t at = place(is_key, slot, head, d);
        if (shape.type == KvType::kFloat32) {
          write(at, random.uniform(2));
        } else if (shape.type == KvType::kInt8) {
          write(at, static_cast<int8_t>(random.below(255) - 127));
        } else {
          const int mantissa_bits = shape.type == KvType::kFloat16 ? 10 : 7;
          const int bias = (1 << (14 - mantissa_bits)) - 1;
          const int64_t exponent = bias - random.below(6);
          write(at, static_cast<uint16_t>(random.below(2) << 15 | exponent << mantissa_bits |
                                          random.below(1 << mantissa_bits)));
        }
      }
    if (shape.type == KvType::kInt8)
      for (const bool is_key : {true, false})
        write(scale_place(is_key, slot, head), (1.5f + 0.5f * random.uniform()) / 127.0f);
  }

  // Sets an element that is no less exact than x: one of float32, or of bfloat16 that x is.
  void set(bool is_key, int64_t slot, int head, int d, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const size_t at = place(is_key, slot, head, d);
    shape.type == pagecast::KvType::kFloat32 ? write(at, x) : write(at, static_cast<uint16_t>(bits >> 16));
  }

  // Sets all bits of a token's key and value, and of their scales.
  void poison(int64_t slot, int head) {
    const auto bytes = static_cast<size_t>(pagecast::element_bytes(shape.type));
    for (const bool is_key : {true, false}) {
      for (int d = 0; d < shape.head_size; ++d) std::memset(&data[place(is_key, slot, head, d)], 0xff, bytes);
      if (shape.type == pagecast::KvType::kInt8) std::memset(&data[scale_place(is_key, slot, head)], 0xff, 4);
    }
  }

  const pagecast::KvShape shape;
  const int64_t num_blocks;
  const int64_t head_stride;
  const int64_t block_stride;
  std::vector<std::byte> data;

 private:
  float number(bool is_key, int64_t slot, int head, int d) const {
    return element(is_key, slot, head, d) * scale(is_key, slot, head);
  }
  int64_t head_place(bool is_key, int64_t slot, int head) const {
    return slot / shape.block_size * block_stride + (is_key ? 0 : shape.num_kv_heads * head_stride) +
           head * head_stride;
  }
  size_t place(bool is_key, int64_t slot, int head, int d) const {
    const int64_t token = slot % shape.block_size;
    const int64_t element = is_key ? d * shape.block_size + token : token * shape.head_size + d;
    return static_cast<size_t>(head_place(is_key, slot, head) +
                               element * pagecast::element_bytes(shape.type));
  }
  size_t scale_place(bool is_key, int64_t slot, int head) const {
    return static_cast<size_t>(head_place(is_key, slot, head) + shape.block_size * shape.head_size +
                               slot % shape.block_size * 4);
  }
  template <typename T>
  T read(size_t at) const {
    T value;
    std::memcpy(&value, &data[at], sizeof value);
    return value;
  }
  template <typename T>
  void write(size_t at, T value) {
    std::memcpy(&data[at], &value, sizeof value);
  }
};
