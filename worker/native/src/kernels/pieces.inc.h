// Products piece by piece: some columns of some panels meet all rows, tile by tile, and then the next ones
// do. A sum rests in memory between two pieces, which changes no bit.
//
// Weights that are numbers by themselves are always multiplied so. Rows that fit one tile take all columns as
// one piece and read a panel once, as a stream; more of them find a piece in the core's first cache from the
// second tile on. Quantised weights are multiplied so with many rows, which share floats that are made once.
#pragma once

#include "tile.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// The most rows of a tile of weights in place: many of two panels, where there are registers for it, so that
// as many rows as can be share one pass over memory.
constexpr int rows_per_piece_tile() {
  return most_rows(2) > rows_per_tile() ? most_rows(2) : rows_per_tile();
}

// Where rows are many tiles, a piece, the next one that is fetched meanwhile and the rows' columns fit the
// first cache.
inline constexpr int kPanelsPerPiece = panels_per_tile(rows_per_piece_tile());
inline constexpr int64_t kColumnsPerPiece = 96;

// Floats made of a block's quants, and their rows' sums, fit the core's own caches; rows are many enough that
// making them is little.
inline constexpr int kFloatColumns = 128;
inline constexpr int kBlockRows = 64;

// How many bytes further a tile asks for its panels' columns where no piece is to be fetched, so that memory
// never waits for a tile: into the first cache, or of one panel alone, which is too few streams for it, into
// the second.
constexpr int64_t stream_ahead(int num_panels) { return num_panels > 1 ? 2048 : 4096; }
constexpr int cache_hint(int num_panels) { return num_panels > 1 ? 3 : 2; }

// Columns of x that meet a piece; weights, panels' numbers and sums are those of its first panel on.
// kFetches: asks for what is multiplied next.
template <class Plain, bool kFetches>
struct Piece {
  Rows x;
  int num_rows;
  const std::byte* weights;
  int64_t panel_bytes;  // from a panel's columns to the next one's
  int64_t num_columns;
  // From weights to the piece that is fetched meanwhile, in bytes, each tile its share; 0: there is
  // none, and what follows in each panel is fetched (stream_ahead).
  int64_t ahead;
  Rows sums;
  bool is_first;  // sums begin with this piece

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    add<kRows, kPanels>(*this, row, panel);
  }

  template <int kRows, int kPanels>
  [[gnu::noinline]] static void add(const Piece& piece, int64_t first_row, int64_t first_panel) {
    Products<kRows, kPanels> total;
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        total.at[r][p] =
            piece.is_first ? zero() : load(piece.sums.row(first_row + r) + (first_panel + p) * kLanes);
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = piece.x.row(first_row + r);
    const int64_t num_columns = piece.num_columns;
    const int64_t fetch_step = (kRows * Plain::kColumnBytes + piece.num_rows - 1) / piece.num_rows;
    const int64_t fetch_first = first_row * Plain::kColumnBytes * num_columns / piece.num_rows;
    const int64_t ahead = piece.ahead != 0 ? piece.ahead + fetch_first : stream_ahead(kPanels);
    const std::byte *panel[kPanels], *fetched[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      panel[p] = piece.weights + (first_panel + p) * piece.panel_bytes;
      fetched[p] = panel[p] + ahead;
    }
    for (int64_t k = 0; k < num_columns; ++k) {
      F16 weight[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        weight[p] = Plain::load(panel[p] + k * Plain::kColumnBytes);
        if constexpr (kFetches) __builtin_prefetch(fetched[p] + k * fetch_step, 0, cache_hint(kPanels));
      }
      for (int r = 0; r < kRows; ++r) {
        const F16 value = broadcast(row[r][k]);
        for (int p = 0; p < kPanels; ++p) total.at[r][p] = fma(value, weight[p], total.at[r][p]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        store(piece.sums.row(first_row + r) + (first_panel + p) * kLanes, total.at[r][p]);
  }
};

// x[:num_rows] @ w.T of panels [first, last), kPanelsPerBlock of them at most, to the columns of `sums` from
// 0 on. Panels up to `end` may be fetched ahead.
template <class Plain>
void multiply_in_place(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, int64_t end,
                       Rows sums) {
  constexpr int kRows = rows_per_piece_tile();
  const int64_t panel_bytes = w.panel_bytes(), num_columns = w.num_columns;
  if (num_rows <= kRows) {
    const Piece<Plain, true> all{x, num_rows, w.panel(first), panel_bytes, num_columns, 0, sums, true};
    return walk_tiles<kRows>(all, num_rows, 0, last - first);
  }
  const int64_t num_pieces = (num_columns + kColumnsPerPiece - 1) / kColumnsPerPiece;
  for (int64_t panel = first; panel < last; panel += kPanelsPerPiece) {
    const int64_t next_panel = panel + kPanelsPerPiece < last ? panel + kPanelsPerPiece : last;
    int64_t k = 0;
    for (int64_t index = 0; index < num_pieces; ++index) {
      const int64_t next_k = num_columns * (index + 1) / num_pieces;
      int64_t ahead = 0;
      if (index + 1 < num_pieces)
        ahead = (next_k - k) * Plain::kColumnBytes;
      else if (next_panel < end)
        ahead = (next_panel - panel) * panel_bytes - k * Plain::kColumnBytes;
      const Piece<Plain, true> piece{{x.data + k, x.stride},
                                     num_rows,
                                     w.panel(panel) + k * Plain::kColumnBytes,
                                     panel_bytes,
                                     next_k - k,
                                     ahead,
                                     {sums.data + (panel - first) * kLanes, sums.stride},
                                     index == 0};
      walk_tiles<kRows>(piece, num_rows, 0, next_panel - panel);
      k = next_k;
    }
  }
}

// As multiply_in_place, of quantised weights.
[[gnu::noinline]] void multiply_as_floats(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last,
                                          Rows sums) {
  constexpr int64_t kPanelFloats = kFloatColumns * kLanes;
  alignas(64) float weights[kPanelsPerBlock * kPanelFloats];
  for (int64_t k = 0; k < w.num_columns; k += kFloatColumns) {
    const int64_t next_k = k + kFloatColumns < w.num_columns ? k + kFloatColumns : w.num_columns;
    for (int64_t panel = first; panel < last; ++panel)
      unpack(w, panel, k, next_k, weights + (panel - first) * kPanelFloats);
    const Piece<Float32, false> piece{{x.data + k, x.stride},
                                      num_rows,
                                      reinterpret_cast<const std::byte*>(weights),
                                      kPanelFloats * int64_t{sizeof(float)},
                                      next_k - k,
                                      0,
                                      sums,
                                      k == 0};
    walk_tiles<rows_per_tile()>(piece, num_rows, 0, last - first);
  }
}

template <class Weights>
PAGECAST_INLINE void multiply_pieces(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last,
                                     int64_t end, Rows sums) {
  if constexpr (Weights::kIsQuantised)
    multiply_as_floats(x, num_rows, w, first, last, sums);
  else
    multiply_in_place<Weights>(x, num_rows, w, first, last, end, sums);
}

// Calls work(row, num_rows, panel, next_panel) for blocks of rows, as even as can be, and of panels [first,
// last).
template <class Work>
PAGECAST_INLINE void walk_blocks(const Work& work, int num_rows, int64_t first, int64_t last) {
  const int num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  for (int64_t panel = first; panel < last; panel += kPanelsPerBlock) {
    const int64_t next_panel = panel + kPanelsPerBlock < last ? panel + kPanelsPerBlock : last;
    int row = 0;
    for (int block = 0; block < num_blocks; ++block) {
      const int next_row = static_cast<int>(int64_t{num_rows} * (block + 1) / num_blocks);
      work(row, next_row - row, panel, next_panel);
      row = next_row;
    }
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
