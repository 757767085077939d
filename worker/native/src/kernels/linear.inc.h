// out = x @ w.T, a panel's 16 columns of out at a time.
#pragma once

#include "pieces.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

template <class Weights>
struct LinearWork {
  Rows x;
  const Panels& w;
  Rows out;
  int64_t last;

  template <int kRows, int kPanels>
  PAGECAST_MEMBER void run(int64_t row, int64_t panel) const {
    const int64_t ahead = fetch_ahead<kPanels>(row, panel, last, w);
    const auto sums = multiply<Weights, kRows, kPanels>({x, row, w, panel, ahead});
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) store(out.row(row + r) + (panel + p) * kLanes, sums.at[r][p]);
  }
};

// As Kernels::linear, of weights that are kept so.
template <class Weights>
void linear_of(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  if (!Weights::kIsQuantised || num_rows <= rows_per_tile())
    return walk_tiles(LinearWork<Weights>{x, w, out, last}, num_rows, first, last);
  const auto work = [&](int row, int rows, int64_t panel, int64_t num_panels) {
    multiply_pieces({x.row(row), x.stride}, rows, w, panel, num_panels,
                    {out.row(row) + panel * kLanes, out.stride});
  };
  walk_pieces(work, num_rows, first, last);
}

void linear(Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  switch (w.format) {
    case Format::kFloat32:
      return linear_of<Float32>(x, num_rows, w, first, last, out);
    case Format::kFloat16:
      return linear_of<Float16>(x, num_rows, w, first, last, out);
    case Format::kBFloat16:
      return linear_of<BFloat16>(x, num_rows, w, first, last, out);
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ4_K:
      return linear_of<Nibbles>(x, num_rows, w, first, last, out);
    default:
      return linear_of<Bytes>(x, num_rows, w, first, last, out);
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
