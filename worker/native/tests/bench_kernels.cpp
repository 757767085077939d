// Times `linear` of one set against what the machine can do: bench_kernels [set] [threads].
//
// Every thread takes a range of panels, as a launch would give it. The floor is what reading the weight takes
// at the rate at which the same threads sum it up, or the multiply-adds at the rate that a register-only loop
// reaches.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "../src/kernels.h"
#include "../src/pack.h"
#include "sets.h"

namespace {

using namespace pagecast;

// Seconds of the best of some runs; every thread starts a run at once and the slowest counts.
double best_seconds(int num_threads, const std::function<void(int)>& body) {
  double best = 1e9;
  for (int round = 0; round < 7; ++round) {
    std::vector<std::thread> threads;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; i < num_threads; ++i) threads.emplace_back(body, i);
    body(0);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  return best;
}

// Sums all of it up in eight chains of 16 lanes.
float read_all(const float* data, int64_t count) {
  float sums[8 * kLanes] = {};
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes)
    for (int lane = 0; lane < 8 * kLanes; ++lane) sums[lane] += data[i + lane];
  return *std::max_element(sums, sums + 8 * kLanes);
}

void bench(const Kernels& set, int num_threads, int64_t num_rows, int64_t num_columns) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> weight(static_cast<size_t>(num_rows * num_columns));
  for (float& value : weight) value = uniform(random);
  const Part part{weight.data(), num_rows};
  // Copies enough that a run finds none of them in a cache.
  const int64_t bytes = num_rows * num_columns * 4;
  const int copies = static_cast<int>(std::max<int64_t>(1, (int64_t{600} << 20) / bytes));
  std::vector<PackedMatrix> packed;
  for (int i = 0; i < copies; ++i) packed.emplace_back(std::span(&part, 1), num_columns);
  const int64_t panels = packed[0].panels().num_panels();
  const auto cut = [&](int i) { return panels * i / num_threads; };

  volatile float sink = 0;
  const double floor_s = best_seconds(num_threads,
                                      [&](int i) {
                                        for (const PackedMatrix& w : packed)
                                          sink = read_all(w.panels().panel(cut(i)),
                                                          (cut(i + 1) - cut(i)) * num_columns * kLanes);
                                      }) /
                         copies;
  std::printf("%6ld x %ld: reading %.3f ms, %.1f GB/s\n", num_rows, num_columns, floor_s * 1e3,
              bytes / floor_s / 1e9);
  for (const int tokens : {1, 2, 4, 6, 8, 16, 64}) {
    std::vector<float> x(static_cast<size_t>(tokens * num_columns), 0.5f);
    std::vector<float> out(static_cast<size_t>(tokens * round_up(num_rows)));
    const double s = best_seconds(num_threads,
                                  [&](int i) {
                                    for (const PackedMatrix& w : packed)
                                      set.linear({x.data(), num_columns}, tokens, w.panels(), cut(i),
                                                 cut(i + 1), {out.data(), round_up(num_rows)});
                                  }) /
                     copies;
    std::printf("  %2d rows: %8.3f ms  %5.1f GB/s  %6.1f GFLOP/s\n", tokens, s * 1e3, bytes / s / 1e9,
                2.0 * tokens * num_rows * num_columns / s / 1e9);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto sets = sets_of_this_machine();
  const Kernels* set = sets.front();
  for (const Kernels* each : sets)
    if (argc > 1 && std::string_view(each->name) == argv[1]) set = each;
  const int num_threads = argc > 2 ? std::atoi(argv[2]) : 1;
  std::printf("%s, %d threads\n", set->name, num_threads);
  for (const int64_t num_rows : {960, 1536, 3072, 49152}) bench(*set, num_threads, num_rows, 576);
  bench(*set, num_threads, 576, 1536);
}
