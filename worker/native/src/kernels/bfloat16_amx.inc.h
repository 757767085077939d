// Products in bfloat16 by tiles, whose sums stay in their registers over all columns.
#pragma once

#include "amx_tiles.inc.h"
#include "bfloat16_tiles.inc.h"
#include "gates.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kBFloatPanels = 2;  // that go together
inline constexpr int64_t kBlocksPerChunk =
    9;  // whose tiles of two panels leave room in the core's first cache

// Sums of some rows, up to two registers of them, with one panel or two.
struct BFloatPass {
  const uint16_t* x;  // tiles of the first rows; those of the next ones lie `row_numbers` on
  int64_t row_numbers;
  const uint32_t* weights;
  int64_t panel_words;  // from a panel's tiles to the next one's
  int64_t num_blocks;
  float* sums;
  int64_t stride;
  bool is_first;  // sums begin here
};

template <int kRowTiles, int kPanels>
[[gnu::noinline]] void multiply_bfloat_tiles(const BFloatPass& pass) {
  const int64_t sums_bytes = 4 * pass.stride;
  const uint16_t* x = pass.x;
  float* const second = pass.sums + kTileRows * pass.stride;
  if (pass.is_first) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  } else {
    load_tile<0>(pass.sums, sums_bytes);
    if constexpr (kPanels > 1) load_tile<1>(pass.sums + kLanes, sums_bytes);
    if constexpr (kRowTiles > 1) load_tile<2>(second, sums_bytes);
    if constexpr (kRowTiles > 1 && kPanels > 1) load_tile<3>(second + kLanes, sums_bytes);
  }
  const uint32_t* weights = pass.weights;
  for (int64_t block = 0; block < pass.num_blocks;
       ++block, x += BFloat16Rows::kTileNumbers, weights += kTileWords) {
    load_tile<4>(x, 2 * kSumColumns);
    load_tile<6>(weights, 4 * kLanes);
    multiply_bfloats<0, 4, 6>();
    if constexpr (kPanels > 1) {
      load_tile<7>(weights + pass.panel_words, 4 * kLanes);
      multiply_bfloats<1, 4, 7>();
    }
    if constexpr (kRowTiles > 1) {
      load_tile<5>(x + pass.row_numbers, 2 * kSumColumns);
      multiply_bfloats<2, 5, 6>();
      if constexpr (kPanels > 1) multiply_bfloats<3, 5, 7>();
    }
  }
  store_tile<0>(pass.sums, sums_bytes);
  if constexpr (kPanels > 1) store_tile<1>(pass.sums + kLanes, sums_bytes);
  if constexpr (kRowTiles > 1) store_tile<2>(second, sums_bytes);
  if constexpr (kRowTiles > 1 && kPanels > 1) store_tile<3>(second + kLanes, sums_bytes);
}

// Tiles of one call. Registers have as many rows as there are, kTileRows at most; of more rows, the last ones
// that fill none are summed beside `sums`, which have no room for a whole one.
struct BFloatTiles {
  static constexpr int kRows = 128;
  static constexpr int kPanels = kBFloatPanels;

  explicit BFloatTiles(int num_rows) {
    shape_tiles(num_rows < kTileRows ? num_rows : kTileRows, kSumColumns / 2);
  }

  template <int kPanelsNow>
  PAGECAST_INLINE void multiply_rows(BFloatPass pass, int num_rows, float* rest) {
    if (num_rows < kTileRows) return multiply_bfloat_tiles<1, kPanelsNow>(pass);
    int row = 0;
    for (; row + 2 * kTileRows <= num_rows; row += 2 * kTileRows) {
      multiply_bfloat_tiles<2, kPanelsNow>(pass);
      pass.x += 2 * pass.row_numbers;
      pass.sums += 2 * kTileRows * pass.stride;
    }
    if (row + kTileRows <= num_rows) {
      multiply_bfloat_tiles<1, kPanelsNow>(pass);
      pass.x += pass.row_numbers;
      row += kTileRows;
    }
    if (row == num_rows) return;
    pass.sums = rest;
    pass.stride = kPanels * kLanes;
    multiply_bfloat_tiles<1, kPanelsNow>(pass);
  }

  PAGECAST_MEMBER void multiply(const BFloat16Rows& x, int64_t first_row, int num_rows, const Panels& w,
                                int64_t panel, int64_t num_panels, float* sums, int64_t stride) {
    alignas(64) uint32_t tiles[kPanels * kBlocksPerChunk * kTileWords];
    alignas(64) float rest[kTileRows * kPanels * kLanes];
    const int64_t num_blocks = x.num_tiles();
    const int64_t num_chunks = (num_blocks + kBlocksPerChunk - 1) / kBlocksPerChunk;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const int64_t first = num_blocks * chunk / num_chunks, last = num_blocks * (chunk + 1) / num_chunks;
      for (int64_t p = 0; p < num_panels; ++p)
        make_tiles(w, panel + p, first, last, kPanels * w.panel_bytes(),
                   tiles + p * kBlocksPerChunk * kTileWords);
      const BFloatPass pass = {x.tile(first_row, first),
                               num_blocks * BFloat16Rows::kTileNumbers,
                               tiles,
                               kBlocksPerChunk * kTileWords,
                               last - first,
                               sums,
                               stride,
                               chunk == 0};
      if (num_panels > 1)
        multiply_rows<2>(pass, num_rows, rest);
      else
        multiply_rows<1>(pass, num_rows, rest);
    }
    const int left_over = num_rows < kTileRows ? 0 : num_rows % kTileRows;
    for (int r = 0; r < left_over; ++r)
      for (int64_t p = 0; p < num_panels; ++p)
        store(sums + (num_rows - left_over + r) * stride + p * kLanes,
              load(rest + (r * kPanels + p) * kLanes));
  }
};

void bfloat16_linear(BFloat16Rows x, int num_rows, const Panels& w, int64_t first, int64_t last, Rows out) {
  BFloatTiles tiles(num_rows);
  for (int64_t panel = first; panel < last; panel += kBFloatPanels) {
    const int64_t panels = last - panel < kBFloatPanels ? last - panel : kBFloatPanels;
    tiles.multiply(x, 0, num_rows, w, panel, panels, out.row(0) + panel * kLanes, out.stride);
  }
  release_tiles();
}

void bfloat16_linear_swiglu(BFloat16Rows x, int num_rows, const Panels& w, int64_t first, int64_t last,
                            Rows out, const BFloat16Rows* rounded) {
  BFloatTiles tiles(num_rows);
  multiply_gates(tiles, x, num_rows, w, first, last, KeepRounded{out, rounded});
  release_tiles();
}

const BFloat16Kernels& bfloat16_kernels() {
  static const BFloat16Kernels table = {avx512_kernels().bfloat16->round, bfloat16_linear,
                                        bfloat16_linear_swiglu};
  return table;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
