// The table of products in eight bits where tiles multiply. Few rows, and a panel that is left over, go to
// the set without tiles, whose bits are the same.
#pragma once

#include "../kernels.h"
#include "amx_pass.inc.h"
#include "gates.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Fewer rows don't pay for unpacking a panel; nor do so few that are left over pay for a tile.
inline constexpr int kLeastRows = 12;
inline constexpr int kMostLeftOver = 7;

// Rows that tiles take, the first ones.
PAGECAST_INLINE int rows_of_tiles(int num_rows) {
  if (num_rows < kLeastRows) return 0;
  const int left_over = num_rows % kTileRows;
  return left_over > kMostLeftOver ? num_rows : num_rows - left_over;
}

PAGECAST_INLINE Int8Rows rows_from(const Int8Rows& x, int64_t first) {
  const int64_t groups = first * x.num_groups();
  return {x.quants + first * x.num_columns, x.scales + groups, x.scaled_sums + groups, x.biases + 2 * groups,
          x.num_columns};
}

// Tiles of one call, shaped for the rows that come.
template <Format kFormat>
struct Tiles {
  static constexpr int kRows = 128;
  static constexpr int kPanels = kPassPanels;
  int shaped = 0;

  PAGECAST_MEMBER void multiply(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w,
                                int64_t panel, int64_t /* num_panels: kPanels */, float* sums,
                                int64_t stride) {
    if (w.offset == 0)
      multiply_two_panels<kFormat, false>(x, first_row, num_rows, w, panel, sums, stride, shaped);
    else
      multiply_two_panels<kFormat, true>(x, first_row, num_rows, w, panel, sums, stride, shaped);
  }
};

using Multiply = void (*)(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out);

// Calls with_tiles(num_rows, last) for the rows and whole pairs of panels that are theirs, and `without` for
// what is left over.
template <typename WithTiles>
PAGECAST_INLINE void split_left_over(const Int8Rows& x, int num_rows, const Panels& w, int64_t first,
                                     int64_t last, const Rows& out, Multiply without, WithTiles with_tiles) {
  const int64_t last_pair = last - (last - first) % kPassPanels;
  const int tiled = last_pair == first ? 0 : rows_of_tiles(num_rows);
  if (tiled == 0) return without(x, num_rows, w, first, last, out);
  with_tiles(tiled, last_pair);
  release_tiles();
  if (last_pair < last) without(x, tiled, w, last_pair, last, out);
  if (tiled < num_rows)
    without(rows_from(x, tiled), num_rows - tiled, w, first, last, {out.row(tiled), out.stride});
}

template <Format kFormat>
void amx_linear(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  const Multiply without = avx512vnni_kernels().int8->linear[static_cast<int>(kFormat)];
  split_left_over(x, num_rows, w, first, last, out, without, [&](int tiled, int64_t last_pair) {
    Tiles<kFormat> tiles;
    for (int64_t panel = first; panel < last_pair; panel += kPassPanels)
      tiles.multiply(x, 0, tiled, w, panel, kPassPanels, out.row(0) + panel * kLanes, out.stride);
  });
}

template <Format kFormat>
void amx_linear_swiglu(Int8Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  const Multiply without = avx512vnni_kernels().int8->linear_swiglu[static_cast<int>(kFormat)];
  split_left_over(x, num_rows, w, first, last, out, without, [&](int tiled, int64_t last_pair) {
    Tiles<kFormat> tiles;
    multiply_gates(tiles, x, tiled, w, first, last_pair, out);
  });
}

template <Format kFormat>
void use_tiles(Int8Kernels& table) {
  table.linear[static_cast<int>(kFormat)] = amx_linear<kFormat>;
  table.linear_swiglu[static_cast<int>(kFormat)] = amx_linear_swiglu<kFormat>;
}

const Int8Kernels& int8_kernels() {
  static const Int8Kernels table = [] {
    Int8Kernels copy = *avx512vnni_kernels().int8;
    use_tiles<Format::kQ4_0>(copy);
    use_tiles<Format::kQ4_1>(copy);
    use_tiles<Format::kQ4_K>(copy);
    use_tiles<Format::kQ8_0>(copy);
    use_tiles<Format::kQ5_K>(copy);
    use_tiles<Format::kQ6_K>(copy);
    return copy;
  }();
  return table;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
