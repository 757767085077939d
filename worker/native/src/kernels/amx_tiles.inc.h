// Tile registers of AMX: 8 of 16 rows of 64 bytes, whose shapes a thread sets before it uses them. Registers
// are named by number. Source: Intel, "Architecture Instruction Set Extensions Programming Reference",
// 319433, chapter 3.
//
// The compiler's own intrinsics are not used: GCC 12's tell it of 8 bytes of a configuration, and it leaves
// out the stores of the others.
#pragma once

#include <cstdint>

#include "../inline.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kTileRows = 16;

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums of `num_rows` rows of x with kLanes rows of weights, over 4 * num_words columns. Zeroes all registers.
// 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
PAGECAST_INLINE void shape_tiles(int num_rows, int num_words) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = static_cast<uint16_t>(tile / 2 == 2 ? 4 * num_words : 64);
    shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? num_rows : num_words);
  }
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// Lets the system forget them: until then it saves them with the thread.
PAGECAST_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
PAGECAST_INLINE void load_tile(const void* from, int64_t row_stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(row_stride) : "memory");
}
template <int kTile>
PAGECAST_INLINE void store_tile(void* to, int64_t row_stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(row_stride) : "memory");
}
template <int kTile>
PAGECAST_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// sums[r][n] += x[r][4w + i] * weights[w][4n + i], bytes of x having a sign and weights none.
template <int kSums, int kX, int kWeights>
PAGECAST_INLINE void multiply_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
}

// sums[r][n] += sum over w of x[r][2w] * weights[w][2n], and of x[r][2w + 1] * weights[w][2n + 1], in
// bfloat16: see bfloat16.h.
template <int kSums, int kX, int kWeights>
PAGECAST_INLINE void multiply_bfloats() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
