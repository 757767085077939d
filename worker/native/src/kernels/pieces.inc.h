// Products of many rows with quantised weights: some columns of a block of panels are made floats once, then
// all rows go over these. A sum rests in memory between two pieces, which changes no bit.
#pragma once

#include "tile.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// A piece and its rows' sums fit the cores' own caches, and rows are many enough that unpacking is little.
inline constexpr int kPieceColumns = 128;
inline constexpr int kPieceRows = 64;

// Columns of x that meet a piece, kPanelsPerBlock panels of it; sums are those of its first panel on.
struct PieceWork {
  Rows x;
  const float* weights;  // [panel][column of kPieceColumns][lane]
  int64_t num_columns;
  Rows sums;
  bool is_first;  // sums begin with this piece

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    add<kRows, kPanels>(*this, row, panel);
  }

  template <int kRows, int kPanels>
  [[gnu::noinline]] static void add(const PieceWork& work, int64_t first_row, int64_t first_panel) {
    Products<kRows, kPanels> total;
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        total.at[r][p] =
            work.is_first ? zero() : load(work.sums.row(first_row + r) + (first_panel + p) * kLanes);
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = work.x.row(first_row + r);
    const float* weights = work.weights + first_panel * kPieceColumns * kLanes;
    for (int64_t k = 0; k < work.num_columns; ++k) {
      F16 weight[kPanels];
      for (int p = 0; p < kPanels; ++p) weight[p] = load(weights + (p * kPieceColumns + k) * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const F16 value = broadcast(row[r][k]);
        for (int p = 0; p < kPanels; ++p) total.at[r][p] = fma(value, weight[p], total.at[r][p]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        store(work.sums.row(first_row + r) + (first_panel + p) * kLanes, total.at[r][p]);
  }
};

// x[:num_rows] @ w.T of panels [first, first + num_panels), kPanelsPerBlock of them at most, to the columns
// of `sums` from 0 on.
[[gnu::noinline]] void multiply_pieces(Rows x, int num_rows, const Panels& w, int64_t first,
                                       int64_t num_panels, Rows sums) {
  alignas(64) float weights[kPanelsPerBlock * kPieceColumns * kLanes];
  const int num_tiles = (num_rows + rows_per_tile() - 1) / rows_per_tile();
  for (int64_t k = 0; k < w.num_columns; k += kPieceColumns) {
    const int64_t last = k + kPieceColumns < w.num_columns ? k + kPieceColumns : w.num_columns;
    for (int64_t panel = 0; panel < num_panels; ++panel)
      unpack(w, first + panel, k, last, weights + panel * kPieceColumns * kLanes);
    const PieceWork work{{x.data + k, x.stride}, weights, last - k, sums, k == 0};
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int next_row = static_cast<int>(int64_t{num_rows} * (tile + 1) / num_tiles);
      walk_rows(work, next_row - row, row, 0, num_panels);
      row = next_row;
    }
  }
}

// Calls work(row, num_rows, panel, num_panels) for blocks of all rows and of panels [first, last).
template <class Work>
PAGECAST_INLINE void walk_pieces(const Work& work, int num_rows, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; panel += kPanelsPerBlock) {
    const int64_t num_panels = panel + kPanelsPerBlock < last ? kPanelsPerBlock : last - panel;
    for (int row = 0; row < num_rows; row += kPieceRows)
      work(row, row + kPieceRows < num_rows ? kPieceRows : num_rows - row, panel, num_panels);
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
