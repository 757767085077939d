// out = x @ w.T and out = silu(x @ gate.T) * (x @ up.T) of rows in eight bits.
//
// Few rows read a panel as it is packed. More of them first have a chunk of it unpacked, into the core's own
// cache, and walk it tile by tile.
#pragma once

#include "gates.inc.h"
#include "int8_tile.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kGroupsPerChunk = 24;
inline constexpr int kFewTiles = 2;  // up to which a panel is unpacked by each of them anew

// Panels that rows walk together: two vectors at least share what is read of a row.
inline constexpr int kPanelsAtOnce = kParts > 1 ? 1 : 2;

template <Format kFormat, int kPanels>
void multiply_unpacked(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w, int64_t panel,
                       float* sums, int64_t stride) {
  using From = Packed<kFormat>;
  using To = UnpackedOf<kFormat>;
  constexpr int kMost = rows_per_int8_tile<To>();
  constexpr int64_t kChunkBytes = kGroupsPerChunk * To::kBytes;
  const int64_t num_groups = x.num_groups();
  const int num_tiles = (num_rows + kMost - 1) / kMost;
  const int64_t num_chunks = (num_groups + kGroupsPerChunk - 1) / kGroupsPerChunk;
  alignas(64) std::byte unpacked[kPanels * kChunkBytes];
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t first = num_groups * chunk / num_chunks, last = num_groups * (chunk + 1) / num_chunks;
    for (int p = 0; p < kPanels; ++p)
      unpack<kFormat>(w.panel(panel + p) + first * From::kBytes, last - first, kPanels * w.panel_bytes(),
                      unpacked + p * kChunkBytes);
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int next_row = num_rows * (tile + 1) / num_tiles;
      const Int8Tile rows = {x, first_row + row,     first,  last - first, unpacked, kChunkBytes,
                             0, sums + row * stride, stride, chunk != 0};
      // Cut as even as can be, tiles of what is more than kMost have half of that at least.
      multiply_rows<To, kPanels, (kMost + 1) / 2>(rows, next_row - row);
      row = next_row;
    }
  }
}

template <Format kFormat, int kPanels>
void multiply_packed(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w, int64_t panel,
                     float* sums, int64_t stride) {
  using Reader = Packed<kFormat>;
  constexpr int kMost = rows_per_int8_tile<Reader>();
  const int num_tiles = (num_rows + kMost - 1) / kMost;
  int row = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int next_row = num_rows * (tile + 1) / num_tiles;
    const int64_t ahead = tile == 0 ? kPanels * w.panel_bytes() : 0;
    const Int8Tile rows = {
        x,     first_row + row,     0,      x.num_groups(), w.panel(panel), w.panel_bytes(),
        ahead, sums + row * stride, stride, false};
    multiply_rows<Reader, kPanels, 1>(rows, next_row - row);
    row = next_row;
  }
}

template <Format kFormat, int kPanels>
PAGECAST_INLINE void multiply_block(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w,
                                    int64_t panel, float* sums, int64_t stride) {
  // A last panel that is alone is not worth code of its own.
  if constexpr (kPanels == kPanelsAtOnce)
    if (num_rows > kFewTiles * rows_per_int8_tile<Packed<kFormat>>())
      return multiply_unpacked<kFormat, kPanels>(x, first_row, num_rows, w, panel, sums, stride);
  multiply_packed<kFormat, kPanels>(x, first_row, num_rows, w, panel, sums, stride);
}

// sums[r, lane] = products of rows first_row + r with `num_panels` panels.
template <Format kFormat>
[[gnu::noinline]] void multiply_panels(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w,
                                       int64_t panel, int64_t num_panels, float* sums, int64_t stride) {
  int64_t p = 0;
  for (; p + kPanelsAtOnce <= num_panels; p += kPanelsAtOnce)
    multiply_block<kFormat, kPanelsAtOnce>(x, first_row, num_rows, w, panel + p, sums + p * kLanes, stride);
  if constexpr (kPanelsAtOnce > 1)
    for (; p < num_panels; ++p)
      multiply_block<kFormat, 1>(x, first_row, num_rows, w, panel + p, sums + p * kLanes, stride);
}

template <Format kFormat>
void int8_linear(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  multiply_panels<kFormat>(x, 0, num_rows, w, first, last - first, out.row(0) + first * kLanes, out.stride);
}

template <Format kFormat>
struct Int8Gates {
  static constexpr int kRows = 64;
  static constexpr int kPanels = kPanelsAtOnce;

  PAGECAST_MEMBER void multiply(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w,
                                int64_t panel, int64_t num_panels, float* sums, int64_t stride) {
    multiply_panels<kFormat>(x, first_row, num_rows, w, panel, num_panels, sums, stride);
  }
};

template <Format kFormat>
void int8_linear_swiglu(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  Int8Gates<kFormat> gates;
  multiply_gates(gates, x, num_rows, w, first, last, out);
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
