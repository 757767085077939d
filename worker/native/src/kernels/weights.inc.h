// Weights of every format as float32, sixteen rows of a column at a time. A quantised weight is
// fma(scale, quant, min), with min = -offset * scale where the format has none: of finite scales the product
// is exact, so a weight is rounded once, where there is a min, on every set. A weight of zero is +0.
#pragma once

#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Columns that are read with one scale and min: half a group.
inline constexpr int kHalfGroup = kGroup / 2;

// Of half a group. A column's quants stay where they lie in their words, times 2^(8J) for byte J, and the
// scale makes up for it.
struct Head {
  F16 scale[4];  // by byte of a word
  F16 min;
};

PAGECAST_INLINE F16 halves_at(const std::byte* from) {
  return load_half(reinterpret_cast<const uint16_t*>(from));
}
PAGECAST_INLINE F16 floats_at(const std::byte* from) { return load(reinterpret_cast<const float*>(from)); }

PAGECAST_INLINE Head make_head(F16 scale, F16 min, bool shifts_last) {
  return {{scale, scale * broadcast(0x1p-8f), scale * broadcast(0x1p-16f),
           shifts_last ? scale : scale * broadcast(0x1p-24f)},
          min};
}

// 4-bit quants: the low nibbles of a group's words hold its first half, the high ones its second.
struct Nibbles {
  static constexpr bool kIsQuantised = true;
  static constexpr bool kOneHead = true;  // for both halves

  PAGECAST_INLINE Head head(const std::byte* group, const Panels& w, int) {
    if (w.format == Format::kQ4_K) return make_head(floats_at(group), floats_at(group + 4 * kLanes), false);
    const F16 scale = halves_at(group);
    if (w.format == Format::kQ4_1) return make_head(scale, halves_at(group + 2 * kLanes), false);
    return make_head(scale, scale * broadcast(static_cast<float>(-w.offset)), false);
  }

  // Word `index` (of 4) of half `half`.
  PAGECAST_INLINE const std::byte* word(const std::byte* quants, int, int index) {
    return quants + index * 4 * kLanes;
  }
  PAGECAST_INLINE I16 load(const std::byte* from, int half) {
    I16 words = load_words(from);
    PAGECAST_EACH_PART words.part[part] = (Native::Ints)((Bits)words.part[part] >> (4 * half));
    return words;
  }

  template <int J>
  PAGECAST_INLINE F16 quant(I16 words) {
    PAGECAST_EACH_PART words.part[part] = words.part[part] & (0xf << (8 * J));
    return to_float(words);
  }
};

// 8-bit quants: a group's words follow its columns.
struct Bytes {
  static constexpr bool kIsQuantised = true;
  static constexpr bool kOneHead = false;

  PAGECAST_INLINE Head head(const std::byte* group, const Panels& w, int half) {
    if (w.format == Format::kQ5_K) return make_head(floats_at(group), floats_at(group + 4 * kLanes), true);
    const F16 scale = w.format == Format::kQ6_K ? floats_at(group + half * 4 * kLanes) : halves_at(group);
    return make_head(scale, scale * broadcast(static_cast<float>(-w.offset)), true);
  }

  PAGECAST_INLINE const std::byte* word(const std::byte* quants, int half, int index) {
    return quants + (4 * half + index) * 4 * kLanes;
  }
  PAGECAST_INLINE I16 load(const std::byte* from, int) { return load_words(from); }

  // The last byte would be a sign where it lies.
  template <int J>
  PAGECAST_INLINE F16 quant(I16 words) {
    if constexpr (J == 3) return to_float(byte_at<3>(words));
    PAGECAST_EACH_PART words.part[part] = words.part[part] & (0xff << (8 * J));
    return to_float(words);
  }
};

template <class Quants, int J>
PAGECAST_INLINE F16 weight_of(const Head& head, I16 words) {
  return fma(head.scale[J], Quants::template quant<J>(words), head.min);
}

// Weights that are numbers by themselves.
struct Float32 {
  static constexpr bool kIsQuantised = false;
  static constexpr int64_t kColumnBytes = column_bytes(Format::kFloat32);
  PAGECAST_INLINE F16 load(const std::byte* from) { return floats_at(from); }
};
struct Float16 {
  static constexpr bool kIsQuantised = false;
  static constexpr int64_t kColumnBytes = column_bytes(Format::kFloat16);
  PAGECAST_INLINE F16 load(const std::byte* from) { return halves_at(from); }
};
struct BFloat16 {
  static constexpr bool kIsQuantised = false;
  static constexpr int64_t kColumnBytes = column_bytes(Format::kBFloat16);
  PAGECAST_INLINE F16 load(const std::byte* from) {
    return load_bfloat(reinterpret_cast<const uint16_t*>(from));
  }
};

template <class Plain>
PAGECAST_INLINE void unpack_plain(const std::byte* panel, int64_t first, int64_t last, float* to) {
  for (int64_t k = first; k < last; ++k)
    store(to + (k - first) * kLanes, Plain::load(panel + k * Plain::kColumnBytes));
}

template <class Quants>
PAGECAST_INLINE void unpack_quants(const Panels& w, int64_t panel, int64_t first, int64_t last, float* to) {
  const int64_t bytes = group_bytes(w.format), head_size = head_bytes(w.format);
  for (int64_t k = first; k < last; k += kGroup) {
    const std::byte* group = w.panel(panel) + k / kGroup * bytes;
    for (int half = 0; half < 2; ++half) {
      const Head head = Quants::head(group, w, half);
      for (int index = 0; index < 4; ++index, to += 4 * kLanes) {
        const I16 words = Quants::load(Quants::word(group + head_size, half, index), half);
        store(to, weight_of<Quants, 0>(head, words));
        store(to + kLanes, weight_of<Quants, 1>(head, words));
        store(to + 2 * kLanes, weight_of<Quants, 2>(head, words));
        store(to + 3 * kLanes, weight_of<Quants, 3>(head, words));
      }
    }
  }
}

// Calls work(how), where `how` is what reads weights of that format: Float32, Float16, BFloat16, Nibbles or
// Bytes.
template <class Work>
PAGECAST_INLINE void with_weights(Format format, const Work& work) {
  switch (format) {
    case Format::kFloat32:
      return work(Float32{});
    case Format::kFloat16:
      return work(Float16{});
    case Format::kBFloat16:
      return work(BFloat16{});
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ4_K:
      return work(Nibbles{});
    case Format::kQ8_0:
    case Format::kQ5_K:
    case Format::kQ6_K:
      return work(Bytes{});
  }
}

// Columns [first, last) of a panel, kLanes floats each. Of a quantised weight both are multiples of kGroup.
[[gnu::noinline, maybe_unused]] void unpack(const Panels& w, int64_t panel, int64_t first, int64_t last,
                                            float* to) {
  with_weights(w.format, [&](auto weights) {
    using Weights = decltype(weights);
    if constexpr (Weights::kIsQuantised)
      unpack_quants<Weights>(w, panel, first, last, to);
    else
      unpack_plain<Weights>(w.panel(panel), first, last, to);
  });
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
