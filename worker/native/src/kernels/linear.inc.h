// out = x @ w.T, a panel's 16 columns of out at a time.
#pragma once

#include "tile.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct LinearWork {
  Rows x;
  const Panels& w;
  Rows out;
  int64_t last;

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    const int64_t ahead = fetch_ahead<kPanels>(row, panel, last, w.num_columns);
    const auto sums = multiply<kRows, kPanels>(x, row, w, panel, ahead);
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) store(out.row(row + r) + (panel + p) * kLanes, sums.at[r][p]);
  }
};

void linear(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  walk_tiles(LinearWork{x, w, out, last}, num_rows, first, last);
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
