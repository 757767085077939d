// Where the keys and values of a span are, paged and dense, and the state of the query vectors that go over
// it.
#pragma once

#include "../attention.h"
#include "../simd.h"
#include "kv.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Accumulators that fit into registers.
inline constexpr int kAccumulators = Native::kWidth == 16 ? 24 : Native::kFused ? 6 : 3;

// Query vectors that go over a span together where a sum takes so many accumulators, and how many vectors of
// lanes go with M of them.
constexpr int max_chunk(int chains) { return kAccumulators / chains > 6 ? 6 : kAccumulators / chains; }
constexpr int beside(int m, int chains) {
  const int fit = kAccumulators / chains / m;
  return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// Where the tokens of a span are, kLanes by kLanes: element d of token t of group g at keys[g] + d *
// key_stride + t and values[g] + t * head_size + d, its scales at key_scales[g] + t and value_scales[g] + t,
// null where there are none. Groups beyond the live ones name the last of these.
template <typename Kv>
struct Place {
  const typename Kv::Element* keys[kSpanGroups];
  const typename Kv::Element* values[kSpanGroups];
  const float* key_scales[kSpanGroups];
  const float* value_scales[kSpanGroups];
  int64_t key_stride;
};

// A span's keys [head_size, kSpanTokens] and values [kSpanTokens, head_size] as floats in the thread's own
// memory, rounded to what sums are made of: nothing there needs to be fetched ahead.
struct SpreadKv : Float32Kv {};

template <typename Kv>
inline constexpr bool kIsFetched = true;
template <>
inline constexpr bool kIsFetched<SpreadKv> = false;

// Types whose elements are bfloat16 once tiny ones are zeros, of which none is tiny, and that need nothing.
template <typename Kv>
inline constexpr bool kIsShort = false;
template <>
inline constexpr bool kIsShort<BFloat16Kv> = true;
template <typename Kv>
inline constexpr bool kIsHalf = false;
template <>
inline constexpr bool kIsHalf<Float16Kv> = true;
template <typename Kv>
inline constexpr bool kIsRounded = kHasScales<Kv> || !kIsFetched<Kv>;

// The query vectors of an item that share a KV head, query by query, heads of the group within, and their
// state over one span.
struct Tile {
  int count;
  int group;  // vectors of a query
  int kv_head;
  int head_size;
  float scale;
  float* q;        // [head_size, count]
  float* weights;  // [count, kSpanTokens]
  float* m;        // [count]
  float* l;        // [count]
  float* acc;      // [count, head_size]
};

// Vectors of kLanes elements of the pool that lie on one line of the cache.
template <typename Kv>
inline constexpr int kPerLine = 64 / (kLanes * static_cast<int>(sizeof(typename Kv::Element)));

// Asks for the line of a group's n-th vector of values, and of keys, n being a multiple of kPerLine: the next
// block is anywhere in the pool, so no prefetcher guesses it.
template <typename Kv>
PAGECAST_INLINE void fetch_values(const Place<Kv>& place, int group, int64_t n) {
  __builtin_prefetch(place.values[group] + n * kLanes);
}

// Where a line holds the keys of several groups, each of these asks for other ones.
template <typename Kv>
PAGECAST_INLINE void fetch_keys(const Place<Kv>& place, int group, int64_t n) {
  __builtin_prefetch(place.keys[group] + (n + group % kPerLine<Kv>)*place.key_stride);
}

// Where tokens [start, end) of a span are, by `find`(group), which gives the elements of a group's keys and
// values and their scales.
template <typename Kv, typename Find>
PAGECAST_INLINE Place<Kv> place_of(int64_t key_stride, int start, int end, Find find) {
  Place<Kv> place;
  place.key_stride = key_stride;
  const int last = (end - start - 1) / kLanes;
  for (int group = 0; group < kSpanGroups; ++group) find(place, group, group < last ? group : last);
  return place;
}

template <typename KvOf>
struct PagedSource {
  using Kv = KvOf;
  KvLayer keys;
  KvLayer values;
  const int32_t* blocks;
  int block_size;
  int head_size;

  PAGECAST_INLINE PagedSource make(const AttentionCall& call, int row) {
    return {call.keys, call.values, call.block_table + row * call.table_stride, call.shape.block_size,
            call.shape.head_size};
  }
  PAGECAST_MEMBER Place<Kv> at(int start, int end, int head) const {
    const int64_t num_elements = int64_t{block_size} * head_size;
    return place_of<Kv>(block_size, start, end, [&](Place<Kv>& place, int group, int live_group) {
      const int token = start + live_group * kLanes;
      const int64_t block = blocks[token / block_size];
      const int64_t slot = token % block_size;
      const HeadBlock<Kv> key = head_block<Kv>(keys, block, head, num_elements);
      const HeadBlock<Kv> value = head_block<Kv>(values, block, head, num_elements);
      place.keys[group] = key.elements + slot;
      place.values[group] = value.elements + slot * head_size;
      place.key_scales[group] = scale_at(key, slot);
      place.value_scales[group] = scale_at(value, slot);
    });
  }
};

struct DenseSource {
  using Kv = Float32Kv;
  KvLayer keys;
  KvLayer values;
  int head_size;

  PAGECAST_INLINE DenseSource make(const AttentionCall& call, int) {
    return {call.keys, call.values, call.shape.head_size};
  }
  PAGECAST_MEMBER Place<Kv> at(int start, int end, int head) const {
    const HeadBlock<Kv> key = head_block<Kv>(keys, 0, head, 0);
    const HeadBlock<Kv> value = head_block<Kv>(values, 0, head, 0);
    return place_of<Kv>(kLanes, start, end, [&](Place<Kv>& place, int group, int live_group) {
      const int64_t at = int64_t{start + live_group * kLanes} * head_size;
      place.keys[group] = key.elements + at;
      place.values[group] = value.elements + at;
      place.key_scales[group] = place.value_scales[group] = nullptr;
    });
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
