// Arithmetic in bfloat16: both sides of a product are rounded to eight significant bits, and sums are
// float32.
//
// A number becomes bf(x): to nearest, halves to even, then +0 where that is less than kLeastBFloat. A sum of
// products over k is made in blocks of kSumColumns columns, ascending, from 0:
//   even = fma(x[0], w[0], +0), fma(x[2], w[2], even), ..;  odd = fma(x[1], w[1], +0), fma(x[3], w[3], odd),
//   .. y = y + (even + odd)
// where columns beyond the last one are zeros. That is what AMX's tdpbf16ps does with tiles of 32 columns,
// and any set that fuses can do it: so no bit depends on the machine. AMX takes numbers below 2^-126 for
// zeros; with the least one above there are none: products are multiples of 2^-110, and so is every sum.
// Source of the order: Intel, "Architecture Instruction Set Extensions Programming Reference", 319433,
// TDPBF16PS.
#pragma once

#include "kernels.h"

namespace pagecast {

// Columns that are summed on their own: those of a tile.
inline constexpr int kSumColumns = 32;
inline constexpr float kLeastBFloat = 0x1p-48f;

// Blocks of kSumColumns that hold n columns, the last one maybe not full.
PAGECAST_MEMBER constexpr int64_t sum_blocks(int64_t n) { return (n + kSumColumns - 1) / kSumColumns; }

// Rows in bfloat16, as tiles take them: kSumColumns columns of kLanes rows lie together, row by row, then
// those of the next columns. Columns beyond the last one, up to a whole tile, are zeros.
struct BFloat16Rows {
  uint16_t* data;  // 64-byte aligned
  int64_t num_columns;

  PAGECAST_MEMBER int64_t num_tiles() const { return sum_blocks(num_columns); }
  PAGECAST_MEMBER uint16_t* tile(int64_t row, int64_t index) const {
    return data + (row / kLanes * num_tiles() + index) * kTileNumbers;
  }
  // Column k of a row, and what follows in its tile.
  PAGECAST_MEMBER uint16_t* at(int64_t row, int64_t k) const {
    return tile(row, k / kSumColumns) + row % kLanes * kSumColumns + k % kSumColumns;
  }

  static constexpr int64_t kTileNumbers = kLanes * kSumColumns;
};

struct BFloat16Kernels {
  // By rows.
  void (*round)(Rows x, int64_t first, int64_t last, BFloat16Rows out);
  // As Kernels' linear and linear_swiglu, of weights of any format: bf(w), w being the number that float32
  // products multiply with. Rows of x up to a multiple of kLanes are there, and what they hold is nobody's.
  void (*linear)(BFloat16Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out);
  // What is written of `out` goes to `rounded` as bf(out) too, where that isn't null.
  void (*linear_swiglu)(BFloat16Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out,
                        const BFloat16Rows* rounded);
};

}  // namespace pagecast
