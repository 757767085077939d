// out = silu(x @ gate.T) * (x @ up.T), gate and up stacked in one weight.
#pragma once

#include "silu.inc.h"
#include "tile.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct LinearSwigluWork {
  Rows x;
  const Panels& w;
  Rows out;
  int64_t last;

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    const int64_t ahead = fetch_ahead<kPanels>(row, panel, last, w.num_columns);
    const auto gate = multiply<kRows, kPanels>(x, row, w, panel, ahead);
    const auto up = multiply<kRows, kPanels>(x, row, w, panel + w.num_panels() / 2, ahead);
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        store(out.row(row + r) + (panel + p) * kLanes, silu(gate.at[r][p]) * up.at[r][p]);
  }
};

void linear_swiglu(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  walk_tiles(LinearSwigluWork{x, w, out, last}, num_rows, first, last);
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
