// out = x @ w.T, a panel's 16 columns of out at a time.
#pragma once

#include "pieces.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

template <class Quants>
struct LinearWork {
  Rows x;
  const Panels& w;
  Rows out;
  int64_t last;

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    const auto sums =
        multiply<Quants, kRows, kPanels>({x, row, w, panel, fetch_ahead<kPanels>(panel, last, w)});
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) store(out.row(row + r) + (panel + p) * kLanes, sums.at[r][p]);
  }
};

// As Kernels::linear, of weights that are kept so.
template <class Weights>
void linear_of(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  if constexpr (Weights::kIsQuantised)
    if (num_rows <= rows_per_tile())
      return walk_tiles<rows_per_tile()>(LinearWork<Weights>{x, w, out, last}, num_rows, first, last);
  const auto work = [&](int row, int rows, int64_t panel, int64_t next_panel) {
    multiply_pieces<Weights>({x.row(row), x.stride}, rows, w, panel, next_panel, last,
                             {out.row(row) + panel * kLanes, out.stride});
  };
  walk_blocks(work, num_rows, first, last);
}

void linear(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  with_weights(w.format,
               [&](auto weights) { linear_of<decltype(weights)>(x, num_rows, w, first, last, out); });
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
