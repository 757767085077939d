// Products in bfloat16 by float32 multiply-adds, in the order of bfloat16.h, which any set can follow.
//
// Some columns at a time, the numbers of some panels and of all rows are made as floats, and then multiplied
// tile by tile. Sums rest in memory between two blocks of columns.
#pragma once

#include "bfloat16_round.inc.h"
#include "gates.inc.h"
#include "weights.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Columns, panels and rows whose floats fit the core's own caches.
inline constexpr int kBFloatColumns = 128;
inline constexpr int kBFloatPanels = 4;
inline constexpr int kBFloatRows = 64;
inline constexpr int kBFloatTilePanels = kParts == 1 ? 2 : 1;

// Rows of a tile: two sums of each panel, a vector of each panel and one of x are in registers.
constexpr int rows_per_bfloat_tile() {
  const int left = Native::kRegisters - (kBFloatTilePanels + 1) * kParts;
  const int rows = left / (2 * kBFloatTilePanels * kParts);
  return rows > 1 ? rows : 1;
}

void round_rows(Rows x, int64_t first, int64_t last, BFloat16Rows out) {
  for (int64_t t = first; t < last; ++t) {
    const float* from = x.row(t);
    uint16_t* to = out.at(t, 0);
    for (int64_t k = 0; k < out.num_tiles() * kSumColumns; k += kSumColumns, to += out.kTileNumbers)
      for (int64_t c = k; c < k + kSumColumns; c += kLanes)
        store_bfloat_bits(to + (c - k), to_bfloat(load_n(from + c, static_cast<int>(out.num_columns - c))));
  }
}

// Columns [first, last) of a panel, kLanes floats each, and zeros up to a whole block.
PAGECAST_INLINE void unpack_bfloats(const Panels& w, int64_t panel, int64_t first, int64_t last, float* to) {
  unpack(w, panel, first, last, to);
  const int64_t count = last - first;
  for (int64_t k = 0; k < count; ++k) store(to + k * kLanes, to_bfloat(load(to + k * kLanes)));
  for (int64_t k = count; k % kSumColumns != 0; ++k) store(to + k * kLanes, zero());
}

// What a tile multiplies: floats of rows, kBFloatColumns apart, and of panels, and where their sums are.
struct BFloatTile {
  const float* x;
  const float* weights;
  int64_t num_blocks;
  float* sums;
  int64_t stride;
  bool is_first;  // sums begin here
};

template <int kRows, int kPanels>
[[gnu::noinline]] void multiply_bfloat_tile(const BFloatTile& tile) {
  constexpr int64_t kPanel = kBFloatColumns * kLanes;
  for (int64_t block = 0; block < tile.num_blocks; ++block) {
    F16 even[kRows][kPanels], odd[kRows][kPanels];
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) even[r][p] = odd[r][p] = zero();
    const float* x = tile.x + block * kSumColumns;
    const float* weights = tile.weights + block * kSumColumns * kLanes;
    for (int k = 0; k < kSumColumns; k += 2) {
      F16 weight[kPanels];
      for (int p = 0; p < kPanels; ++p) weight[p] = load(weights + p * kPanel + k * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const F16 value = broadcast(x[r * kBFloatColumns + k]);
        for (int p = 0; p < kPanels; ++p) even[r][p] = fma(value, weight[p], even[r][p]);
      }
      for (int p = 0; p < kPanels; ++p) weight[p] = load(weights + p * kPanel + (k + 1) * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const F16 value = broadcast(x[r * kBFloatColumns + k + 1]);
        for (int p = 0; p < kPanels; ++p) odd[r][p] = fma(value, weight[p], odd[r][p]);
      }
    }
    const bool starts = tile.is_first && block == 0;
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) {
        float* to = tile.sums + r * tile.stride + p * kLanes;
        store(to, (starts ? zero() : load(to)) + (even[r][p] + odd[r][p]));
      }
  }
}

// Of `num_rows` rows, kMost at most, panel by panel.
template <int kMost>
PAGECAST_INLINE void multiply_bfloat_rows(BFloatTile tile, int num_rows, int64_t num_panels) {
  if constexpr (kMost > 1)
    if (num_rows < kMost) return multiply_bfloat_rows<kMost - 1>(tile, num_rows, num_panels);
  for (; num_panels > 0; num_panels -= kBFloatTilePanels) {
    if (kBFloatTilePanels > 1 && num_panels == 1)
      multiply_bfloat_tile<kMost, 1>(tile);
    else
      multiply_bfloat_tile<kMost, kBFloatTilePanels>(tile);
    tile.weights += kBFloatTilePanels * kBFloatColumns * kLanes;
    tile.sums += kBFloatTilePanels * kLanes;
  }
}

// sums[r, lane] = products of rows first_row + r, kBFloatRows at most, with `num_panels` panels,
// kBFloatPanels at most.
[[gnu::noinline]] void multiply_bfloat_panels(const BFloat16Rows& x, int64_t first_row, int num_rows,
                                              const Panels& w, int64_t panel, int64_t num_panels, float* sums,
                                              int64_t stride) {
  constexpr int kMost = rows_per_bfloat_tile();
  alignas(64) float weights[kBFloatPanels * kBFloatColumns * kLanes];
  alignas(64) float floats[kBFloatRows * kBFloatColumns];
  for (int64_t k = 0; k < w.num_columns; k += kBFloatColumns) {
    const int64_t next_k = k + kBFloatColumns < w.num_columns ? k + kBFloatColumns : w.num_columns;
    const int64_t num_blocks = sum_blocks(next_k - k);
    for (int64_t p = 0; p < num_panels; ++p)
      unpack_bfloats(w, panel + p, k, next_k, weights + p * kBFloatColumns * kLanes);
    for (int r = 0; r < num_rows; ++r)
      for (int64_t c = 0; c < num_blocks * kSumColumns; c += kLanes)
        store(floats + r * kBFloatColumns + c, load_bfloat(x.at(first_row + r, k + c)));
    const int num_tiles = (num_rows + kMost - 1) / kMost;
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int next_row = num_rows * (tile + 1) / num_tiles;
      multiply_bfloat_rows<kMost>(
          {floats + row * kBFloatColumns, weights, num_blocks, sums + row * stride, stride, k == 0},
          next_row - row, num_panels);
      row = next_row;
    }
  }
}

struct BFloatGates {
  static constexpr int kRows = kBFloatRows;
  static constexpr int kPanels = kBFloatPanels;

  PAGECAST_MEMBER void multiply(const BFloat16Rows& x, int64_t first_row, int num_rows, const Panels& w,
                                int64_t panel, int64_t num_panels, float* sums, int64_t stride) {
    multiply_bfloat_panels(x, first_row, num_rows, w, panel, num_panels, sums, stride);
  }
};

void bfloat16_linear(BFloat16Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  for (int64_t panel = first; panel < last; panel += kBFloatPanels)
    for (int row = 0; row < num_rows; row += kBFloatRows) {
      const int rows = num_rows - row < kBFloatRows ? num_rows - row : kBFloatRows;
      const int64_t panels = last - panel < kBFloatPanels ? last - panel : kBFloatPanels;
      multiply_bfloat_panels(x, row, rows, w, panel, panels, out.row(row) + panel * kLanes, out.stride);
    }
}

void bfloat16_linear_swiglu(BFloat16Rows x, int num_rows, const Panels& w, int64_t first, int64_t last,
                            Rows out, const BFloat16Rows* rounded) {
  BFloatGates gates;
  multiply_gates(gates, x, num_rows, w, first, last, KeepRounded{out, rounded});
}

constexpr BFloat16Kernels kBFloat16 = {round_rows, bfloat16_linear, bfloat16_linear_swiglu};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
