// Groups of a quantised panel as vectors of `Native`: as they are packed, and unpacked once for many rows.
//
// A reader of groups has
//   kBytes     of a group
//   kHasMin    whether there are mins
//   kNumHalves how many scales a group has, 2 where each half has its own
//   kPlanes    how many terms a quant is a sum of: itself, or its low nibble and 16 times its high one
//   scale(group, part, half), min(group, part)
//   word(group, part, w, plane)    columns 4w..4w+3
// `part` counts a panel's vectors.
#pragma once

#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kWords = kGroup / 4;
inline constexpr int kVectorBytes = 4 * Native::kWidth;

constexpr bool has_nibbles(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ4_K;
}

PAGECAST_INLINE Native::Ints load_ints(const std::byte* from) {
  Native::Ints out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}

PAGECAST_INLINE Native::Vec load_floats(const std::byte* from) {
  return Native::load(reinterpret_cast<const float*>(from));
}

PAGECAST_INLINE Native::Ints nibble(Native::Ints bytes, int plane) {
  return (plane == 0 ? bytes : (Native::Ints)((Bits)bytes >> 4)) & 0x0f0f0f0f;
}

template <Format kFormat>
struct Packed {
  static constexpr int64_t kBytes = group_bytes(kFormat);
  static constexpr bool kHasMin =
      kFormat == Format::kQ4_1 || kFormat == Format::kQ4_K || kFormat == Format::kQ5_K;
  static constexpr int kNumHalves = kFormat == Format::kQ6_K ? 2 : 1;
  static constexpr int kPlanes = Native::kNibblesOnly && !has_nibbles(kFormat) ? 2 : 1;

  PAGECAST_INLINE Native::Vec scale(const std::byte* group, int part, int half) {
    if constexpr (has_half_scales(kFormat))
      return Native::load_half(reinterpret_cast<const uint16_t*>(group) + part * Native::kWidth);
    else
      return load_floats(group + half * 4 * kLanes + part * kVectorBytes);
  }
  PAGECAST_INLINE Native::Vec min(const std::byte* group, int part) {
    if constexpr (has_half_scales(kFormat))
      return Native::load_half(reinterpret_cast<const uint16_t*>(group) + kLanes + part * Native::kWidth);
    else
      return load_floats(group + 4 * kLanes + part * kVectorBytes);
  }
  PAGECAST_INLINE Native::Ints word(const std::byte* group, int part, int w, int plane) {
    const std::byte* quants = group + head_bytes(kFormat) + part * kVectorBytes;
    if constexpr (has_nibbles(kFormat)) return nibble(load_ints(quants + w % 4 * 4 * kLanes), w / 4);
    const Native::Ints bytes = load_ints(quants + w * 4 * kLanes);
    return kPlanes == 1 ? bytes : nibble(bytes, plane);
  }
};

// Of every format whose groups look alike: each plane's words, then the scales and the mins as float32.
template <bool kWithMin, int kHalves, int kNumPlanes>
struct Unpacked {
  static constexpr int64_t kQuantBytes = kNumPlanes * kWords * 4 * kLanes;
  static constexpr int64_t kBytes = kQuantBytes + (kHalves + kWithMin) * 4 * kLanes;
  static constexpr bool kHasMin = kWithMin;
  static constexpr int kNumHalves = kHalves;
  static constexpr int kPlanes = kNumPlanes;

  PAGECAST_INLINE Native::Vec scale(const std::byte* group, int part, int half) {
    return load_floats(group + kQuantBytes + half * 4 * kLanes + part * kVectorBytes);
  }
  PAGECAST_INLINE Native::Vec min(const std::byte* group, int part) {
    return load_floats(group + kQuantBytes + kHalves * 4 * kLanes + part * kVectorBytes);
  }
  PAGECAST_INLINE Native::Ints word(const std::byte* group, int part, int w, int plane) {
    return load_ints(group + (plane * kWords + w) * 4 * kLanes + part * kVectorBytes);
  }
};

template <Format kFormat>
using UnpackedOf = Unpacked<Packed<kFormat>::kHasMin, Packed<kFormat>::kNumHalves, Packed<kFormat>::kPlanes>;

// Asks for the groups that lie `ahead` bytes further on, meanwhile; 0: for none.
template <Format kFormat>
void unpack(const std::byte* group, int64_t num_groups, int64_t ahead, std::byte* out) {
  using From = Packed<kFormat>;
  using To = UnpackedOf<kFormat>;
  for (int64_t g = 0; g < num_groups; ++g, group += From::kBytes, out += To::kBytes) {
    if (ahead != 0)
      for (int64_t line = 0; line < From::kBytes; line += 64) __builtin_prefetch(group + ahead + line, 0, 2);
    for (int part = 0; part < kParts; ++part) {
      std::byte* to = out + part * kVectorBytes;
      for (int plane = 0; plane < To::kPlanes; ++plane)
        for (int w = 0; w < kWords; ++w, to += 4 * kLanes) {
          const Native::Ints word = From::word(group, part, w, plane);
          __builtin_memcpy(to, &word, sizeof word);
        }
      for (int half = 0; half < To::kNumHalves; ++half, to += 4 * kLanes)
        Native::store(reinterpret_cast<float*>(to), From::scale(group, part, half));
      if (To::kHasMin) Native::store(reinterpret_cast<float*>(to), From::min(group, part));
    }
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
