// Tiles: some rows times some panels, all their sums in registers at once. However a matrix is cut into
// tiles, a sum is one chain of multiply-adds over k ascending: no bit depends on the cut. Here is how rows
// and panels are cut, and the tiles of quantised weights that are read as they are packed.
#pragma once

#include "weights.inc.h"

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

// The most rows, one at least, that a tile can hold of so many panels.
constexpr int most_rows(int num_panels) {
  const int rows = (Native::kRegisters - 1) / (num_panels * kParts) - 1;
  return rows > 1 ? rows : 1;
}

// The most rows of a tile of quantised weights: as many as registers hold of one panel, 8 being enough to
// reuse a panel well.
constexpr int rows_per_tile() { return most_rows(1) < 8 ? most_rows(1) : 8; }

// Panels of which a tile takes one, two or all.
inline constexpr int kPanelsPerBlock = 4;

// How many bytes further a tile asks for its panels' data while it multiplies: the next panels', or where
// there are none 4 KiB ahead, if the panels are too few streams for the machine's own prefetch to keep memory
// busy.
template <int kPanels>
PAGECAST_INLINE int64_t fetch_ahead(int64_t panel, int64_t last, const Panels& w) {
  if (panel + 2 * kPanels <= last) return kPanels * w.panel_bytes();
  return kPanels < kPanelsPerBlock ? 64 * kLanes * 4 : 0;
}

// What a tile multiplies: some rows of x, some panels of w. What lies `ahead` bytes further on is asked for
// meanwhile.
struct TileCall {
  Rows x;
  int64_t first_row;
  const Panels& w;
  int64_t first_panel;
  int64_t ahead;
};

// Column J of four that lie in `words`, for all rows: k is its number.
template <class Quants, int J, int kRows, int kPanels>
PAGECAST_INLINE void add_column(Products<kRows, kPanels>& sums, const float* const (&row)[kRows], int64_t k,
                                const Head (&head)[kPanels], const I16 (&words)[kPanels]) {
  F16 weight[kPanels];
  for (int p = 0; p < kPanels; ++p) weight[p] = weight_of<Quants, J>(head[p], words[p]);
  for (int r = 0; r < kRows; ++r) {
    const F16 value = broadcast(row[r][k + J]);
    for (int p = 0; p < kPanels; ++p) sums.at[r][p] = fma(value, weight[p], sums.at[r][p]);
  }
}

template <class Quants, int kRows, int kPanels>
[[gnu::noinline]] void multiply_quants(const TileCall& call, Products<kRows, kPanels>& to) {
  Products<kRows, kPanels> sums;
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) sums.at[r][p] = zero();
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = call.x.row(call.first_row + r);
  const int64_t bytes = group_bytes(call.w.format), head_size = head_bytes(call.w.format);
  const std::byte* group[kPanels];
  for (int p = 0; p < kPanels; ++p) group[p] = call.w.panel(call.first_panel + p);
  for (int64_t first = 0; first < call.w.num_columns; first += kGroup) {
    Head head[kPanels];
    for (int half = 0; half < 2; ++half) {
      if (!Quants::kOneHead || half == 0)
        for (int p = 0; p < kPanels; ++p) {
          head[p] = Quants::head(group[p], call.w, half);
          __builtin_prefetch(group[p] + call.ahead, 0, 2);
        }
      for (int index = 0; index < 4; ++index) {
        I16 words[kPanels];
        for (int p = 0; p < kPanels; ++p) {
          const std::byte* from = Quants::word(group[p] + head_size, half, index);
          words[p] = Quants::load(from, half);
          __builtin_prefetch(from + call.ahead, 0, 2);
        }
        const int64_t k = first + half * kHalfGroup + index * 4;
        add_column<Quants, 0>(sums, row, k, head, words);
        add_column<Quants, 1>(sums, row, k, head, words);
        add_column<Quants, 2>(sums, row, k, head, words);
        add_column<Quants, 3>(sums, row, k, head, words);
      }
    }
    for (int p = 0; p < kPanels; ++p) group[p] += bytes;
  }
  to = sums;
}

// One copy of a tile's code serves all products.
template <class Quants, int kRows, int kPanels>
PAGECAST_INLINE Products<kRows, kPanels> multiply(const TileCall& call) {
  Products<kRows, kPanels> sums;
  multiply_quants<Quants, kRows, kPanels>(call, sums);
  return sums;
}

// A tile's work, by its number of rows: work.run<kRows, kPanels>(first_row, panel).
template <int kRows, class Work>
PAGECAST_INLINE void walk_panels(const Work& work, int64_t first_row, int64_t first, int64_t last) {
  constexpr int kPanels = panels_per_tile(kRows);
  int64_t panel = first;
  for (; panel + kPanels <= last; panel += kPanels) work.template run<kRows, kPanels>(first_row, panel);
  if constexpr (kPanels > 1)
    for (; panel < last; ++panel) work.template run<kRows, 1>(first_row, panel);
}

// Of one tile, of kRows rows at most.
template <int kRows, class Work>
PAGECAST_INLINE void walk_rows(const Work& work, int num_rows, int64_t first_row, int64_t first,
                               int64_t last) {
  if (num_rows == kRows)
    walk_panels<kRows>(work, first_row, first, last);
  else if constexpr (kRows > 1)
    walk_rows<kRows - 1>(work, num_rows, first_row, first, last);
}

// Runs `work` over rows 0..num_rows and panels [first, last), rows cut into tiles of kRows at most, as even
// as can be.
template <int kRows, class Work>
PAGECAST_INLINE void walk_tiles(const Work& work, int num_rows, int64_t first, int64_t last) {
  const int num_tiles = (num_rows + kRows - 1) / kRows;
  int row = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int next_row = static_cast<int>(int64_t{num_rows} * (tile + 1) / num_tiles);
    walk_rows<kRows>(work, next_row - row, row, first, last);
    row = next_row;
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
