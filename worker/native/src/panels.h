// Weights in panels of kLanes rows, in the formats that they are kept in, and rows that were rounded to eight
// bits to be multiplied with them. Knows no kernel and no file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inline.h"

namespace pagecast {

// Lanes of a vector, rows of a weight panel, tokens of an attention step: one number, so that an order of
// additions never depends on the width of the machine's registers.
inline constexpr int kLanes = 16;

// Columns of a quantised weight that share a scale, and of a row of activations that do.
inline constexpr int kGroup = 32;

PAGECAST_MEMBER constexpr int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// How the elements of a weight are kept. A quantised format is named after the GGUF type that lies so; its
// weights are scale * (quant - offset) + min, and `min` is 0 where the format has none. Quants are unsigned.
// Q5_0 lies as Q8_0 (offset 16), Q5_1 as Q5_K.
enum class Format : int {
  kFloat32,
  kFloat16,
  kBFloat16,
  kQ4_0,  // 4-bit quants, scale float16
  kQ4_1,  // 4-bit quants, scale and min float16
  kQ4_K,  // 4-bit quants, scale and min float32
  kQ8_0,  // 8-bit quants, scale float16
  kQ5_K,  // 8-bit quants, scale and min float32
  kQ6_K,  // 8-bit quants, a float32 scale for each half of a group
};
inline constexpr int kNumFormats = 9;

PAGECAST_MEMBER constexpr bool is_quantised(Format format) { return format >= Format::kQ4_0; }

// Whether a group's scales and mins are float16; of other quantised formats they are float32.
PAGECAST_MEMBER constexpr bool has_half_scales(Format format) {
  return format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ8_0;
}

// Bytes of a group's scales and mins, which lie in front of its quants: kLanes of each, scales first (of
// Q6_K those of the first halves, then those of the second).
PAGECAST_MEMBER constexpr int64_t head_bytes(Format format) {
  switch (format) {
    case Format::kQ4_0:
    case Format::kQ8_0:
      return 2 * kLanes;
    case Format::kQ4_1:
      return 4 * kLanes;
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K:
      return 8 * kLanes;
    default:
      return 0;
  }
}

// Bytes of a panel's group: its head, then words of 32 bits, kLanes side by side, one of each row. Of 4-bit
// quants word w (of 4) holds columns 4w..4w+3 in the low nibbles of its bytes and columns 16+4w..16+4w+3 in
// the high ones; of 8-bit quants word w (of 8) holds columns 4w..4w+3. Groups follow each other.
PAGECAST_MEMBER constexpr int64_t group_bytes(Format format) {
  const bool is_nibbles = format == Format::kQ4_0 || format == Format::kQ4_1 || format == Format::kQ4_K;
  return head_bytes(format) + (is_nibbles ? kGroup / 2 : kGroup) * kLanes;
}

// Bytes of kLanes elements of a column, one of each row, of a format that is not quantised.
PAGECAST_MEMBER constexpr int64_t column_bytes(Format format) {
  return (format == Format::kFloat32 ? 4 : 2) * kLanes;
}

// A weight of `num_rows` x `num_columns`, cut into panels of kLanes rows. Not quantised: element (16p + lane,
// k) is element (p * num_columns + k) * kLanes + lane. Quantised: num_columns is a multiple of kGroup, and a
// panel is its groups. Missing rows of the last panel are zero weights.
struct Panels {
  const std::byte* data;
  Format format;
  int offset;  // of quants, 0 where there is none
  int64_t num_rows;
  int64_t num_columns;

  PAGECAST_MEMBER int64_t num_panels() const { return (num_rows + kLanes - 1) / kLanes; }
  PAGECAST_MEMBER int64_t panel_bytes() const {
    return is_quantised(format) ? num_columns / kGroup * group_bytes(format)
                                : num_columns * column_bytes(format);
  }
  PAGECAST_MEMBER const std::byte* panel(int64_t index) const { return data + index * panel_bytes(); }
  // Elements of float32 panels.
  PAGECAST_MEMBER const float* floats(int64_t index) const {
    return reinterpret_cast<const float*>(panel(index));
  }
};

}  // namespace pagecast
