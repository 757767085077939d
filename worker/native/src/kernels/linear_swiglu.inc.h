// out = silu(x @ gate.T) * (x @ up.T), gate and up stacked in one weight.
#pragma once

#include "pieces.inc.h"
#include "silu.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

template <class Quants>
struct LinearSwigluWork {
  Rows x;
  const Panels& w;
  Rows out;
  int64_t last;

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    const int64_t ahead = fetch_ahead<kPanels>(panel, last, w);
    const auto gate = multiply<Quants, kRows, kPanels>({x, row, w, panel, ahead});
    const auto up = multiply<Quants, kRows, kPanels>({x, row, w, panel + w.num_panels() / 2, ahead});
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        store(out.row(row + r) + (panel + p) * kLanes, silu(gate.at[r][p]) * up.at[r][p]);
  }
};

// As Kernels::linear_swiglu, of weights that are kept so.
template <class Weights>
void linear_swiglu_of(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  if constexpr (Weights::kIsQuantised)
    if (num_rows <= rows_per_tile())
      return walk_tiles<rows_per_tile()>(LinearSwigluWork<Weights>{x, w, out, last}, num_rows, first, last);
  const int64_t half = w.num_panels() / 2;
  const auto work = [&](int row, int rows, int64_t panel, int64_t next_panel) {
    alignas(64) float up_floats[kBlockRows * kPanelsPerBlock * kLanes];
    const Rows from{x.row(row), x.stride}, up{up_floats, kPanelsPerBlock * kLanes};
    const Rows gate{out.row(row) + panel * kLanes, out.stride};
    multiply_pieces<Weights>(from, rows, w, panel, next_panel, last, gate);
    multiply_pieces<Weights>(from, rows, w, panel + half, next_panel + half, last + half, up);
    for (int r = 0; r < rows; ++r)
      for (int64_t n = 0; n < (next_panel - panel) * kLanes; n += kLanes)
        store(gate.row(r) + n, silu(load(gate.row(r) + n)) * load(up.row(r) + n));
  };
  walk_blocks(work, num_rows, first, last);
}

void linear_swiglu(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  with_weights(w.format,
               [&](auto weights) { linear_swiglu_of<decltype(weights)>(x, num_rows, w, first, last, out); });
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
