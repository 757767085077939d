// Products in eight bits of many rows, whose sums of whole numbers are made by AMX. The order of additions is
// that of int8.h; so are the bits.
//
// Tiles and vectors take turns: while a core has tile instructions under way it runs one vector operation of
// 64 bytes a cycle in place of two (as measured on Sapphire Rapids). So a pass first makes all sums of some
// groups, as many as stay in the core's nearest cache, and then scales and adds them.
#pragma once

#include "../int8.h"
#include "amx_tiles.inc.h"
#include "int8_group.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

inline constexpr int kPassPanels = 2;  // that go together: two registers of weights
inline constexpr int kPassSteps = 8;   // at most: groups, or halves of groups that have scales of their own
inline constexpr int kRowsAtOnce = 8;  // that are scaled and added together, with two panels
inline constexpr int64_t kSumsBytes = int64_t{4} * kTileRows * kLanes;

// Some groups of two panels, unpacked, for up to kTileRows rows.
struct Pass {
  Int8Rows x;
  int64_t row;
  int num_rows;
  int64_t first_group;
  int num_groups;
  const std::byte* groups[kPassPanels];
  float* sums;  // of `row`; the panels' side by side, other rows' in steps of `stride`
  int64_t stride;
  const std::byte* next[kPassPanels];  // what is fetched meanwhile
  int64_t num_next;                    // lines of each
};

// A group, or half of one, whose columns have one scale.
template <class Groups>
struct PassStep {
  static constexpr int kNumWords = kWords / Groups::kNumHalves;

  // Into registers kSums and kSums + 1, while those of the step before go to `before`, if there was one.
  template <int kSums, bool kIsFirst>
  PAGECAST_INLINE void run(const Pass& pass, int step, std::byte* before) {
    const int64_t group = step / Groups::kNumHalves, half = step % Groups::kNumHalves;
    const int64_t quants = group * Groups::kBytes + half * kNumWords * 4 * kLanes;
    const int8_t* x = pass.x.quants + pass.row * pass.x.num_columns + (pass.first_group + group) * kGroup;
    load_tile<4>(x + half * 4 * kNumWords, pass.x.num_columns);
    load_tile<6>(pass.groups[0] + quants, 4 * kLanes);
    load_tile<7>(pass.groups[1] + quants, 4 * kLanes);
    zero_tile<kSums>();
    zero_tile<kSums + 1>();
    multiply_tiles<kSums, 4, 6>();
    if constexpr (!kIsFirst) store_tile<2 - kSums>(before, 4 * kLanes);
    multiply_tiles<kSums + 1, 4, 7>();
    if constexpr (!kIsFirst) store_tile<3 - kSums>(before + kSumsBytes, 4 * kLanes);
  }
};

// sums[step][panel][row][lane], whole numbers.
template <class Groups>
PAGECAST_INLINE void multiply_pass(const Pass& pass, std::byte* sums) {
  constexpr int64_t kStep = kPassPanels * kSumsBytes;
  const int num_steps = pass.num_groups * Groups::kNumHalves;
  const auto fetch = [&](int step) {
    const int64_t first = pass.num_next * step / num_steps, last = pass.num_next * (step + 1) / num_steps;
    for (int p = 0; p < kPassPanels; ++p)
      for (int64_t line = first; line < last; ++line) __builtin_prefetch(pass.next[p] + 64 * line, 0, 2);
  };
  fetch(0);
  PassStep<Groups>::template run<0, true>(pass, 0, nullptr);
  int step = 1;
  for (; step + 1 < num_steps; step += 2, sums += 2 * kStep) {
    fetch(step);
    PassStep<Groups>::template run<2, false>(pass, step, sums);
    fetch(step + 1);
    PassStep<Groups>::template run<0, false>(pass, step + 1, sums + kStep);
  }
  if (step < num_steps) {
    fetch(step);
    PassStep<Groups>::template run<2, false>(pass, step, sums);
    store_tile<2>(sums + kStep, 4 * kLanes);
    store_tile<3>(sums + kStep + kSumsBytes, 4 * kLanes);
  } else {
    store_tile<0>(sums, 4 * kLanes);
    store_tile<1>(sums + kSumsBytes, 4 * kLanes);
  }
}

// Scales the sums of kRows rows from `first` of the pass, and adds them.
template <class Groups, bool kHasOffset, int kRows>
[[gnu::noinline]] void add_sums(const Pass& pass, int first, const std::byte* sums) {
  const int64_t num_groups = pass.x.num_groups();
  const int64_t at = (pass.row + first) * num_groups + pass.first_group;
  const float *scales = pass.x.scales + at, *scaled_sums = pass.x.scaled_sums + at;
  const int32_t* biases = pass.x.biases + 2 * at;
  float* to = pass.sums + first * pass.stride;
  sums += first * 4 * kLanes;
  const int goes_on = pass.first_group == 0 ? 0 : kLanes;
  Native::Vec y[kRows][kPassPanels];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < kPassPanels; ++p)
      y[r][p] = Native::load_n(to + r * pass.stride + p * kLanes, goes_on);
  for (int g = 0; g < pass.num_groups; ++g) {
    const int64_t group = g * Groups::kBytes;
#pragma GCC unroll 2
    for (int half = 0; half < Groups::kNumHalves; ++half, sums += kPassPanels * kSumsBytes) {
      Native::Vec scale[kPassPanels];
      for (int p = 0; p < kPassPanels; ++p) scale[p] = Groups::scale(pass.groups[p] + group, 0, half);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Native::Vec x_scale = Native::broadcast(scales[r * num_groups + g]);
#pragma GCC unroll 2
        for (int p = 0; p < kPassPanels; ++p) {
          Native::Ints sum = load_ints(sums + p * kSumsBytes + r * 4 * kLanes);
          if constexpr (kHasOffset) {
            const int32_t* both = biases + 2 * (r * num_groups + g);
            sum += Groups::kNumHalves == 1 ? both[0] : half == 1 ? both[1] : both[0] - both[1];
          }
          y[r][p] = Native::fma(Native::mul(scale[p], x_scale),
                                (Native::Vec) __builtin_convertvector(sum, Native::Floats), y[r][p]);
        }
      }
    }
    if constexpr (Groups::kHasMin) {
      Native::Vec min[kPassPanels];
      for (int p = 0; p < kPassPanels; ++p) min[p] = Groups::min(pass.groups[p] + group, 0);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Native::Vec x_sum = Native::broadcast(scaled_sums[r * num_groups + g]);
#pragma GCC unroll 2
        for (int p = 0; p < kPassPanels; ++p) y[r][p] = Native::fma(min[p], x_sum, y[r][p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < kPassPanels; ++p) Native::store(to + r * pass.stride + p * kLanes, y[r][p]);
}

// add_sums of `num_rows`, 1 to kMost.
template <class Groups, bool kHasOffset, int kMost = kRowsAtOnce>
PAGECAST_INLINE void add_rows(const Pass& pass, int first, int num_rows, const std::byte* sums) {
  if constexpr (kMost > 1)
    if (num_rows < kMost) return add_rows<Groups, kHasOffset, kMost - 1>(pass, first, num_rows, sums);
  add_sums<Groups, kHasOffset, kMost>(pass, first, sums);
}

template <class Groups, bool kHasOffset>
void run_pass(const Pass& pass) {
  alignas(64) std::byte sums[kPassSteps * kPassPanels * kSumsBytes];
  multiply_pass<Groups>(pass, sums);
  const int num_pieces = (pass.num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  int row = 0;
  for (int piece = 0; piece < num_pieces; ++piece) {
    const int next_row = pass.num_rows * (piece + 1) / num_pieces;
    add_rows<Groups, kHasOffset>(pass, row, next_row - row, sums);
    row = next_row;
  }
}

// Two panels by rows first_row.. of x: unpacked once, group by group, for all rows. `shaped` is the number of
// rows that tiles have been shaped for.
template <Format kFormat, bool kHasOffset>
void multiply_two_panels(const Int8Rows& x, int64_t first_row, int num_rows, const Panels& w, int64_t panel,
                         float* sums, int64_t stride, int& shaped) {
  using From = Packed<kFormat>;
  using To = UnpackedOf<kFormat>;
  constexpr int kGroups = kPassSteps / To::kNumHalves;
  const int64_t num_groups = x.num_groups();
  const int64_t num_chunks = (num_groups + kGroups - 1) / kGroups;
  const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  alignas(64) std::byte unpacked[kPassPanels][kGroups * To::kBytes];
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t first = num_groups * chunk / num_chunks, last = num_groups * (chunk + 1) / num_chunks;
    const std::byte* next[kPassPanels];
    for (int p = 0; p < kPassPanels; ++p) {
      const std::byte* groups = w.panel(panel + p) + first * From::kBytes;
      unpack<kFormat>(groups, last - first, 0, unpacked[p]);
      next[p] = groups + kPassPanels * w.panel_bytes();
    }
    const int64_t num_lines = ((last - first) * From::kBytes + 63) / 64;
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      // As even as can be, the larger ones first: tiles are shaped anew twice at most in a chunk.
      const int rows = (num_rows - row + num_tiles - tile - 1) / (num_tiles - tile);
      if (rows != shaped) shape_tiles(shaped = rows, kWords / To::kNumHalves);
      run_pass<To, kHasOffset>(
          {x,
           first_row + row,
           rows,
           first,
           static_cast<int>(last - first),
           {unpacked[0], unpacked[1]},
           sums + row * stride,
           stride,
           {next[0] + num_lines * tile / num_tiles * 64, next[1] + num_lines * tile / num_tiles * 64},
           num_lines * (tile + 1) / num_tiles - num_lines * tile / num_tiles});
      row += rows;
    }
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
