// A step of many short launches, as a small model's decode is, beside one straight read of the same weights:
// what hand-over, meetings and uneven ends cost. `bench_meetings [threads]`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "../src/program.h"

namespace {

using namespace pagecast;

constexpr int kLayers = 30, kRuns = 60;
// Rows as SmolLM2-135M has them, and so few columns that float32 has the bytes of 5 bits a weight.
constexpr int64_t kHidden = 576, kQkv = 960, kUp = 3072, kVocab = 49152, kColumns = 96, kInner = 256;

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void linear(Program& program, const View& x, const Panels& weight, const View& out) {
  program.linear(x, std::span(&weight, 1), out);
}

struct Step {
  explicit Step(int num_threads)
      : team(num_threads),
        program(team, 1, 1, nullptr),
        arena(make_floats(kArena)),
        weights(make_floats(kWeights)) {
    std::fill_n(arena.get(), kArena, 0.5f);
    std::fill_n(weights.get(), kWeights, 0.01f);
    const View x = next(kHidden), narrow = part(x, kColumns), qkv = next(kQkv), y = next(kHidden),
               sum = next(kHidden), normed = next(kHidden), inner = next(kUp / 2), logits = next(kVocab);
    const Array<float> scale{norm.data(), {kHidden}};
    for (int layer = 0; layer < kLayers; ++layer) {
      const Panels up = weight(kUp, kColumns);
      linear(program, narrow, weight(kQkv, kColumns), qkv);
      linear(program, part(qkv, kColumns), weight(kHidden, kColumns), y);
      program.add_rms_norm(x, y, scale, 1e-5f, sum, normed);
      program.linear_swiglu(part(normed, kColumns), std::span(&up, 1), inner);
      linear(program, part(inner, kInner), weight(kHidden, kInner), y);
      program.add_rms_norm(sum, y, scale, 1e-5f, x, normed);
    }
    linear(program, part(normed, kColumns), weight(kVocab, kColumns), logits);
  }

  View next(int64_t width) {
    const View view{arena.get(), kArena, used_floats, round_up(width), width, Extent::kTokens};
    used_floats += round_up(width);
    return view;
  }
  static View part(View view, int64_t width) {
    view.width = width;
    return view;
  }
  Panels weight(int64_t rows, int64_t columns) {
    const Panels panels{reinterpret_cast<const std::byte*>(weights.get() + used_weights), Format::kFloat32, 0,
                        rows, columns};
    used_weights += rows * columns;
    return panels;
  }

  static constexpr int64_t kArena = 1 << 17;
  static constexpr int64_t kWeights =
      kLayers * ((kQkv + kHidden + kUp) * kColumns + kHidden * kInner) + kVocab * kColumns;
  Team team;
  Program program;
  Floats arena, weights;
  std::vector<float> norm = std::vector<float>(static_cast<size_t>(kHidden), 1.0f);
  int64_t used_floats = 0, used_weights = 0;
};

// One product that reads all of the weights.
struct Read {
  explicit Read(Step& step) : program(step.team, 1, 1, nullptr), out(make_floats(kRows)) {
    const Panels all{reinterpret_cast<const std::byte*>(step.weights.get()), Format::kFloat32, 0, kRows,
                     kColumns};
    linear(program, Step::part(step.next(kHidden), kColumns), all,
           {out.get(), kRows, 0, kRows, kRows, Extent::kTokens});
  }

  static constexpr int64_t kRows = Step::kWeights / kColumns / kLanes * kLanes;
  Program program;
  Floats out;
};

}  // namespace

int main(int count, char** arguments) {
  Step step(count > 1 ? std::atoi(arguments[1]) : 2);
  Read read(step);
  std::vector<double> steps, reads, outside;
  for (int run = 0; run < kRuns; ++run) {
    Clock::time_point start = Clock::now();
    const int64_t kernel_ns = step.program.run({1, 1, 1});
    steps.push_back(ms_since(start));
    outside.push_back(steps.back() - static_cast<double>(kernel_ns) / 1e6);
    start = Clock::now();
    read.program.run({1, 1, 1});
    reads.push_back(ms_since(start));
  }
  const double mb = static_cast<double>(Step::kWeights) * 4 / 1e6;
  std::printf(
      "%.1f MB: step %.3f ms, one read %.3f ms (%.1f GB/s), best %.3f and %.3f; outside launches %.3f ms of "
      "%zu\n",
      mb, median(steps), median(reads), mb / median(reads), *std::min_element(steps.begin(), steps.end()),
      *std::min_element(reads.begin(), reads.end()), median(outside), step.program.num_launches());
}
