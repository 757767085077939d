// A program of every launch over one layer's shapes, for the program tests.
#pragma once

#include <vector>

#include "../src/program.h"
#include "twins.h"

namespace program_case {

using namespace pagecast;

constexpr int kTokens = 40, kRows = 5, kVocab = 211, kHidden = 192, kInner = 320, kHeadSize = 32, kHeads = 6;
constexpr int kKvHeads = 2, kBlock = 16, kBlocks = 24, kTableWidth = 4, kQ = kHeads * kHeadSize;
constexpr int kKv = kKvHeads * kHeadSize, kQkv = kQ + 2 * kKv;
constexpr float kEps = 1e-5f;

std::vector<float> angles(uint64_t seed) { return random_floats(kBlocks * kBlock * kHeadSize / 2, seed); }

// One layer with every launch in it. Nothing is reused, so that a run leaves all results to look at.
struct Step {
  explicit Step(int num_threads, const char* set) : team(num_threads), program(team, kTokens, kRows, set) {
    for (int i = 0; i < kTokens; ++i) ids.push_back(i * 37 % kVocab);
    for (int i = 0; i < kRows * kTableWidth; ++i) table.push_back((i * 7 + 3) % kBlocks);
    build();
  }

  View next(int64_t width, Extent extent = Extent::kTokens) {
    const int64_t offset = used;
    used += (extent == Extent::kTokens ? kTokens : kRows) * round_up(width);
    return {arena.data(), kArena, offset, round_up(width), width, extent};
  }
  static View columns(View view, int64_t start, int64_t width) {
    view.offset += start;
    view.width = width;
    return view;
  }
  KvView layer(bool is_key) {
    return {reinterpret_cast<std::byte*>(pool.data()),
            static_cast<int64_t>(pool.size() * sizeof(float)),
            is_key ? 0 : 4 * kKv * kBlock,
            kBlocks,
            4 * 2 * kKv * kBlock,
            4 * kHeadSize * kBlock,
            kKvHeads,
            kHeadSize,
            kBlock};
  }
  template <typename T>
  static Array<T> flat(const std::vector<T>& values) {
    return {values.data(), {static_cast<int64_t>(values.size())}};
  }
  static Array<float> table_of(const std::vector<float>& values) {
    return {values.data(), {kBlocks * kBlock, kHeadSize / 2}};
  }

  void build() {
    const Array<float> cosines = table_of(cos), sines = table_of(sin);
    program.embedding(vocab.packed.segments(), flat(ids), x);
    program.rms_norm(x, flat(norm), kEps, normed);
    program.linear(normed, qkv_weight.packed.segments(), qkv);
    const View q = columns(qkv, 0, kQ), k = columns(qkv, kQ, kKv), v = columns(qkv, kQ + kKv, kKv);
    program.rope(q, flat(position), cosines, sines, turned_apart);
    program.store_kv(k, v, flat(slots), layer(true), layer(false));
    program.rope_store(q, k, v, flat(position), flat(slots), cosines, sines, layer(true), layer(false),
                       turned);
    program.paged_attention(turned, layer(true), layer(false), {table.data(), {kRows, kTableWidth}},
                            flat(context), flat(start), 0.2f, attended);
    program.linear(attended, out_weight.packed.segments(), projected);
    program.add(x, projected, summed_apart);
    program.add_rms_norm(x, projected, flat(norm), kEps, summed, normed_again);
    program.linear_swiglu(normed_again, gate_up.packed.segments(), inner);
    program.linear(normed_again, gate_up.packed.segments(), both);
    program.swiglu(columns(both, 0, kInner), columns(both, kInner, kInner), inner_apart);
    program.linear(inner, down.packed.segments(), last);
    program.select_rows(last, flat(wanted), chosen);
    program.linear(chosen, vocab.packed.segments(), logits);
  }

  // Rows of the lengths given, at the end of the contexts given.
  void bind(const std::vector<int>& lengths, const std::vector<int>& contexts) {
    position.assign(kTokens, 0);
    slots.assign(kTokens, 0);
    start.assign(kRows + 1, 0);
    context.assign(kRows, 0);
    wanted.assign(kRows, 0);
    live = {0, static_cast<int64_t>(lengths.size()), 0};
    for (size_t r = 0; r < lengths.size(); ++r) {
      context[r] = contexts[r];
      for (int i = 0; i < lengths[r]; ++i) {
        const int p = contexts[r] - lengths[r] + i;
        const auto token = static_cast<size_t>(live.tokens++);
        position[token] = p;
        slots[token] = table[r * kTableWidth + static_cast<size_t>(p / kBlock)] * kBlock + p % kBlock;
      }
      start[r + 1] = static_cast<int32_t>(live.tokens);
      if (lengths[r] > 0) wanted[static_cast<size_t>(live.logits++)] = start[r + 1] - 1;
    }
  }
  int64_t run() { return program.run(live); }

  // Live rows of a view, as a matrix of their own.
  Matrix read(const View& view) const {
    Matrix out(live.of(view.extent), view.width);
    for (int64_t t = 0; t < out.num_rows; ++t)
      for (int64_t k = 0; k < view.width; ++k)
        out.at(t, k) = arena[static_cast<size_t>(view.offset + t * view.row_stride + k)];
    return out;
  }

  static constexpr int64_t kArena = 40 * 12 * 1024;
  Team team;
  Program program;
  std::vector<float> arena = std::vector<float>(kArena, kNaN);
  std::vector<float> pool = std::vector<float>(static_cast<size_t>(kBlocks) * 2 * kKv * kBlock, kNaN);
  int64_t used = 0;
  Sizes live{};
  TestWeight vocab{kVocab, kHidden, 1}, qkv_weight{kQkv, kHidden, 2}, out_weight{kHidden, kQ, 3};
  TestWeight gate_up{2 * kInner, kHidden, 4}, down{kHidden, kInner, 5};
  std::vector<float> norm = random_floats(kHidden, 6), cos = angles(7), sin = angles(8);
  std::vector<int32_t> ids, table, position = std::vector<int32_t>(kTokens),
                                   context = std::vector<int32_t>(kRows);
  std::vector<int32_t> start = std::vector<int32_t>(kRows + 1), wanted = std::vector<int32_t>(kRows);
  std::vector<int64_t> slots = std::vector<int64_t>(kTokens);
  View x = next(kHidden), normed = next(kHidden), qkv = next(kQkv), turned_apart = next(kQ),
       turned = next(kQ);
  View attended = next(kQ), projected = next(kHidden), summed_apart = next(kHidden), summed = next(kHidden);
  View normed_again = next(kHidden), inner = next(kInner), both = next(2 * kInner),
       inner_apart = next(kInner);
  View last = next(kHidden), chosen = next(kHidden, Extent::kLogits), logits = next(kVocab, Extent::kLogits);
};

}  // namespace program_case
