// Products of some rows with some panels, all their sums in registers at once. However a matrix is cut into
// tiles, a sum is one chain of multiply-adds over k ascending: no bit depends on the cut.
#pragma once

#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

template <int kRows, int kPanels>
struct Products {
  F16 at[kRows][kPanels];
};

// Panels that a tile of so many rows can hold beside a vector of each panel and one of x.
constexpr int panels_per_tile(int num_rows) {
  for (int panels = 4; panels > 1; panels /= 2)
    if ((num_rows + (num_rows > 1)) * panels * kParts < Native::kRegisters) return panels;
  return 1;
}

// The most rows that a tile has: as many as registers hold of one panel, 8 being enough to reuse a panel
// well.
constexpr int rows_per_tile() {
  int rows = 8;
  while (rows > 1 && (rows + 1) * kParts >= Native::kRegisters) --rows;
  return rows;
}

// Panels walked by all rows before the next ones are: they stay in the core's own cache meanwhile.
inline constexpr int kPanelsPerBlock = 4;

// How many floats further a tile asks for its panels' data while it multiplies. The first rows to meet a
// block read it from memory: a few lines ahead, where the panels are too few streams for the machine's own
// prefetch to keep memory busy. Later rows have it in cache and fetch the next block meanwhile, if one comes
// before `last`.
template <int kPanels>
PAGECAST_INLINE int64_t fetch_ahead(int64_t first_row, int64_t panel, int64_t last, int64_t num_columns) {
  if (first_row == 0) return kPanels < kPanelsPerBlock ? 64 * kLanes : 0;
  return panel + kPanelsPerBlock + kPanels <= last ? kPanelsPerBlock * num_columns * kLanes : 0;
}

template <int kRows, int kPanels>
PAGECAST_INLINE Products<kRows, kPanels> multiply(Rows x, int64_t first_row, const Panels& w,
                                                  int64_t first_panel, int64_t ahead) {
  Products<kRows, kPanels> sums;
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) sums.at[r][p] = zero();
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = x.row(first_row + r);
  const Weight* panel[kPanels];
  for (int p = 0; p < kPanels; ++p) panel[p] = w.panel(first_panel + p);
  for (int64_t k = 0; k < w.num_columns; ++k) {
    F16 weight[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      weight[p] = load(panel[p] + k * kLanes);
      __builtin_prefetch(panel[p] + ahead + k * kLanes, 0, 2);
    }
    for (int r = 0; r < kRows; ++r) {
      const F16 value = broadcast(row[r][k]);
      for (int p = 0; p < kPanels; ++p) sums.at[r][p] = fma(value, weight[p], sums.at[r][p]);
    }
  }
  return sums;
}

// A tile's work, by its number of rows: Work::run<kRows, kPanels>(work, first_row, panel).
template <int kRows, class Work>
PAGECAST_INLINE void walk_panels(const Work& work, int64_t first_row, int64_t first, int64_t last) {
  constexpr int kPanels = panels_per_tile(kRows);
  int64_t panel = first;
  for (; panel + kPanels <= last; panel += kPanels) work.template run<kRows, kPanels>(first_row, panel);
  if constexpr (kPanels > 1)
    for (; panel < last; ++panel) work.template run<kRows, 1>(first_row, panel);
}

template <class Work, int kRows = rows_per_tile()>
PAGECAST_INLINE void walk_rows(const Work& work, int num_rows, int64_t first_row, int64_t first,
                               int64_t last) {
  if (num_rows == kRows)
    walk_panels<kRows>(work, first_row, first, last);
  else if constexpr (kRows > 1)
    walk_rows<Work, kRows - 1>(work, num_rows, first_row, first, last);
}

// Runs `work` over rows 0..num_rows and panels [first, last), rows cut into tiles as even as can be.
template <class Work>
PAGECAST_INLINE void walk_tiles(const Work& work, int num_rows, int64_t first, int64_t last) {
  const int num_tiles = (num_rows + rows_per_tile() - 1) / rows_per_tile();
  for (int64_t block = first; block < last; block += kPanelsPerBlock) {
    const int64_t block_end = block + kPanelsPerBlock < last ? block + kPanelsPerBlock : last;
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int next_row = static_cast<int>(int64_t{num_rows} * (tile + 1) / num_tiles);
      walk_rows(work, next_row - row, row, block, block_end);
      row = next_row;
    }
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
