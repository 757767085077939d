// out = silu(x @ gate.T) * (x @ up.T), whoever multiplies.
#pragma once

#include "../kernels.h"
#include "silu.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Gates [first, last), `Multiplier::kPanels` of them at a time, whose sums of `Multiplier::kRows` rows are
// kept while those of the ups are made. multiply(x, first_row, num_rows, w, panel, num_panels, sums, stride)
// gives sums[r, lane] of rows first_row + r and `num_panels` panels. keep(row, column, results) stores kLanes
// of out.
template <class Multiplier, class X, class Keep>
void multiply_gates(Multiplier& multiplier, const X& x, int num_rows, const Panels& w, int64_t first,
                    int64_t last, Keep keep) {
  constexpr int64_t kWidth = Multiplier::kPanels * kLanes;
  alignas(64) float gate[Multiplier::kRows * kWidth], up[Multiplier::kRows * kWidth];
  const int64_t half = w.num_panels() / 2;
  for (int64_t panel = first; panel < last; panel += Multiplier::kPanels)
    for (int row = 0; row < num_rows; row += Multiplier::kRows) {
      const int rows = num_rows - row < Multiplier::kRows ? num_rows - row : Multiplier::kRows;
      const int64_t panels = last - panel < Multiplier::kPanels ? last - panel : Multiplier::kPanels;
      multiplier.multiply(x, row, rows, w, panel, panels, gate, kWidth);
      multiplier.multiply(x, row, rows, w, panel + half, panels, up, kWidth);
      for (int r = 0; r < rows; ++r)
        for (int64_t lane = 0; lane < panels * kLanes; lane += kLanes)
          keep(row + r, panel * kLanes + lane,
               silu(load(gate + r * kWidth + lane)) * load(up + r * kWidth + lane));
    }
}

template <class Multiplier, class X>
void multiply_gates(Multiplier& multiplier, const X& x, int num_rows, const Panels& w, int64_t first,
                    int64_t last, Rows out) {
  multiply_gates(multiplier, x, num_rows, w, first, last,
                 [out](int64_t row, int64_t column, F16 results) { store(out.row(row) + column, results); });
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
