// Products of some rows in eight bits with a panel or two, all their sums in registers at once. However they
// are cut into tiles and chunks of groups, a sum is the one chain that int8.h tells.
#pragma once

#include "../int8.h"
#include "int8_group.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Groups of a panel, some of its chain, and where its sums go on.
struct Int8Tile {
  Int8Rows x;
  int64_t row;
  int64_t first_group;
  int64_t num_groups;
  const std::byte* groups;
  int64_t panel_step;  // bytes from a panel's groups to the next one's
  int64_t ahead;       // bytes further on that are asked for meanwhile; 0: none
  float* sums;         // of `row`; other rows' follow in steps of `stride`
  int64_t stride;
  bool goes_on;  // from what `sums` holds; else from 0
};

// Registers of some rows' and vectors' sums, beside two weights and one of x.
template <class Reader>
constexpr bool fits(int num_rows, int num_vectors) {
  return num_rows * num_vectors * (Native::kRegistersOfDots * Reader::kPlanes + 1) + 3 <= Native::kRegisters;
}

// Of the vectors from `first` on, a panel's being followed by the next one's.
template <class Reader, int kRows, int kVectors>
PAGECAST_INLINE void multiply_vectors(const Int8Tile& tile, int first) {
  const int64_t stride = tile.x.num_columns, num_groups = tile.x.num_groups();
  const int64_t at = tile.row * num_groups + tile.first_group;
  const int8_t* x8 = tile.x.quants + at * kGroup;
  const float *scales = tile.x.scales + at, *scaled_sums = tile.x.scaled_sums + at;
  const int32_t* biases = tile.x.biases + 2 * at;
  const std::byte* group[kVectors];
  int part[kVectors];
  for (int p = 0; p < kVectors; ++p) {
    group[p] = tile.groups + (first + p) / kParts * tile.panel_step;
    part[p] = (first + p) % kParts;
  }
  float* sums = tile.sums + first * Native::kWidth;
  Native::Vec y[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kVectors; ++p)
      y[r][p] =
          tile.goes_on ? Native::load(sums + r * tile.stride + p * Native::kWidth) : Native::broadcast(0);
  for (int64_t g = 0; g < tile.num_groups; ++g, x8 += kGroup) {
    const int64_t at_group = g * Reader::kBytes;
    if (tile.ahead != 0)
      for (int p = 0; p < kVectors; p += kParts)
        for (int64_t line = 0; line < Reader::kBytes; line += 64)
          __builtin_prefetch(group[p] + at_group + tile.ahead + line, 0, 2);
#pragma GCC unroll 2
    for (int half = 0; half < Reader::kNumHalves; ++half) {
      constexpr int kHalfWords = kWords / Reader::kNumHalves;
      Native::Dots dots[kRows][kVectors][Reader::kPlanes];
      int32_t bias[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int32_t* both = biases + 2 * (r * num_groups + g);
        bias[r] = Reader::kNumHalves == 1 ? both[0] : half == 1 ? both[1] : both[0] - both[1];
        for (int p = 0; p < kVectors; ++p)
          for (int plane = 0; plane < Reader::kPlanes; ++plane)
            dots[r][p][plane] = Native::start_dots(plane == 0 ? bias[r] : 0);
      }
#pragma GCC unroll 8
      for (int w = half * kHalfWords; w < (half + 1) * kHalfWords; ++w)
        for (int p = 0; p < kVectors; ++p)
          for (int plane = 0; plane < Reader::kPlanes; ++plane) {
            const Native::Ints word = Reader::word(group[p] + at_group, part[p], w, plane);
            for (int r = 0; r < kRows; ++r) {
              int32_t four;
              __builtin_memcpy(&four, x8 + r * stride + 4 * w, sizeof four);
              dots[r][p][plane] = Native::dot(dots[r][p][plane], word, four);
            }
          }
      for (int p = 0; p < kVectors; ++p) {
        const Native::Vec scale = Reader::scale(group[p] + at_group, part[p], half);
        for (int r = 0; r < kRows; ++r) {
          Native::Ints sum = Native::finish_dots(dots[r][p][0], bias[r]);
          if constexpr (Reader::kPlanes == 2) sum += Native::finish_dots(dots[r][p][1], 0) << 4;
          const Native::Vec scaled = Native::mul(scale, Native::broadcast(scales[r * num_groups + g]));
          y[r][p] = Native::fma(scaled, (Native::Vec) __builtin_convertvector(sum, Native::Floats), y[r][p]);
        }
      }
    }
    if constexpr (Reader::kHasMin)
      for (int p = 0; p < kVectors; ++p) {
        const Native::Vec min = Reader::min(group[p] + at_group, part[p]);
        for (int r = 0; r < kRows; ++r)
          y[r][p] = Native::fma(min, Native::broadcast(scaled_sums[r * num_groups + g]), y[r][p]);
      }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kVectors; ++p) Native::store(sums + r * tile.stride + p * Native::kWidth, y[r][p]);
}

template <class Reader, int kRows, int kPanels>
[[gnu::noinline]] void multiply_tile(const Int8Tile& tile) {
  constexpr int kAll = kPanels * kParts, kVectors = kAll > 1 && fits<Reader>(kRows, 2) ? 2 : 1;
  for (int first = 0; first < kAll; first += kVectors) multiply_vectors<Reader, kRows, kVectors>(tile, first);
}

// The most rows of a tile, 8 being enough to reuse a panel well.
template <class Reader>
constexpr int rows_per_int8_tile() {
  int rows = 8;
  while (rows > 1 && !fits<Reader>(rows, 2)) --rows;
  return rows;
}

// multiply_tile of `num_rows`, kLeast to kMost.
template <class Reader, int kPanels, int kLeast, int kMost = rows_per_int8_tile<Reader>()>
PAGECAST_INLINE void multiply_rows(const Int8Tile& tile, int num_rows) {
  if constexpr (kMost > kLeast)
    if (num_rows < kMost) return multiply_rows<Reader, kPanels, kLeast, kMost - 1>(tile, num_rows);
  multiply_tile<Reader, kMost, kPanels>(tile);
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
