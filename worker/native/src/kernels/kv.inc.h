// Elements of the KV pool as float lanes and back, one type of each kind. Knows neither where a token lies
// nor what is computed of it.
#pragma once

#include "../kernels.h"
#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Float32Kv {
  using Element = float;
  PAGECAST_INLINE F16 load(const float* from) { return PAGECAST_SET::load(from); }
  PAGECAST_INLINE void store(float* to, F16 value) { PAGECAST_SET::store(to, value); }
};

struct Float16Kv {
  using Element = uint16_t;
  PAGECAST_INLINE F16 load(const uint16_t* from) { return load_half(from); }
  PAGECAST_INLINE void store(uint16_t* to, F16 value) { store_half(to, value); }
};

struct BFloat16Kv {
  using Element = uint16_t;
  PAGECAST_INLINE F16 load(const uint16_t* from) { return load_bfloat(from); }
  PAGECAST_INLINE void store(uint16_t* to, F16 value) { store_bfloat(to, value); }
};

// Without their scales.
struct Int8Kv {
  using Element = int8_t;
  PAGECAST_INLINE F16 load(const int8_t* from) { return load_int8(from); }
  PAGECAST_INLINE void store(int8_t* to, F16 value) { store_int8(to, value); }
};

template <typename Kv>
inline constexpr bool kHasScales = sizeof(typename Kv::Element) == 1;

// Calls work(kv) with an empty value of the type that goes with `type`.
template <typename Work>
PAGECAST_INLINE void with_kv(KvType type, Work work) {
  switch (type) {
    case KvType::kFloat32:
      return work(Float32Kv{});
    case KvType::kFloat16:
      return work(Float16Kv{});
    case KvType::kBFloat16:
      return work(BFloat16Kv{});
    case KvType::kInt8:
      return work(Int8Kv{});
  }
}

// The part of a block that belongs to one head: elements, then scales where there are some.
template <typename Kv>
struct HeadBlock {
  typename Kv::Element* elements;
  float* scales;  // [block_size], null where there are none
};

template <typename Kv>
PAGECAST_INLINE HeadBlock<Kv> head_block(const KvLayer& layer, int64_t block, int head,
                                         int64_t num_elements) {
  std::byte* at = layer.data + block * layer.block_stride + head * layer.head_stride;
  auto* elements = reinterpret_cast<typename Kv::Element*>(at);
  if constexpr (kHasScales<Kv>) {
    return {elements, reinterpret_cast<float*>(at + num_elements)};
  } else {
    return {elements, nullptr};
  }
}

// Where a token's scale is; null where there is none.
template <typename Kv>
PAGECAST_INLINE float* scale_at(const HeadBlock<Kv>& block, int64_t token) {
  return kHasScales<Kv> ? block.scales + token : nullptr;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
