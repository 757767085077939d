// Times `linear` and `linear_swiglu` of one set against what the machine can do: bench_kernels [set]
// [threads] [format]. Formats are those of panels.h: f32, f16, bf16, q4_0, q4_1, q4_k, q8_0, q5_k, q6_k.
//
// Float32 weights and those of the format (q4_1) take turns, the latter with rows in eight bits where they
// are quantised. Every thread takes a range of panels, as a launch would give it. Beside them stands what
// reading the float32 weight takes the same threads when they only sum it up.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "../src/int8.h"
#include "../src/kernels.h"
#include "sets.h"

namespace {

using namespace pagecast;

constexpr const char* kFormats[kNumFormats] = {"f32",  "f16",  "bf16", "q4_0", "q4_1",
                                               "q4_k", "q8_0", "q5_k", "q6_k"};
constexpr int kRounds = 7;
constexpr size_t kHugePage = size_t{2} << 20;

struct Shape {
  int64_t num_rows;
  int64_t num_columns;
  bool is_swiglu;
};

// Seconds of a run; every thread starts at once and the slowest counts.
double seconds(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(body, i);
  body(0);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Sums all of it up in eight chains of 16 lanes.
float read_all(const std::byte* data, int64_t num_bytes) {
  const auto* floats = reinterpret_cast<const float*>(data);
  float sums[8 * kLanes] = {};
  for (int64_t i = 0; i + 8 * kLanes <= num_bytes / 4; i += 8 * kLanes)
    for (int lane = 0; lane < 8 * kLanes; ++lane) sums[lane] += floats[i + lane];
  return *std::max_element(sums, sums + 8 * kLanes);
}

// Copies of a weight, so many that a run finds none of them in a cache. What a weight is worth costs no time.
class Copies {
 public:
  Copies(const Shape& shape, Format format) : panels_{nullptr, format, 0, shape.num_rows, shape.num_columns} {
    const size_t size = static_cast<size_t>(bytes() * count()),
                 padded = (size + kHugePage - 1) / kHugePage * kHugePage;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePage, padded)));
#ifdef __linux__
    madvise(data_.get(), padded, MADV_HUGEPAGE);
#endif
    std::memset(data_.get(), 0x2b, padded);
  }

  int64_t bytes() const { return panels_.num_panels() * panels_.panel_bytes(); }
  int64_t count() const { return std::max<int64_t>(1, (int64_t{600} << 20) / bytes()); }
  Panels at(int64_t i) const {
    Panels out = panels_;
    out.data = data_.get() + i * bytes();
    return out;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  Panels panels_;
  std::unique_ptr<std::byte, Free> data_;
};

// A weight's products with some rows.
class Case {
 public:
  Case(const Kernels& set, const Copies& weights, const Shape& shape, int tokens)
      : set_(set),
        weights_(weights),
        shape_(shape),
        tokens_(tokens),
        x_(static_cast<size_t>(tokens * shape.num_columns), 0.5f),
        out_(static_cast<size_t>(tokens * round_up(shape.num_rows))),
        quants_(x_.size() + 64),
        scales_(x_.size()),
        scaled_sums_(x_.size()),
        biases_(x_.size()) {}

  // By thread i of so many.
  void run(int i, int num_threads) {
    const Panels first = weights_.at(0);
    const int64_t panels = first.num_panels() / (shape_.is_swiglu ? 2 : 1);
    const int64_t begin = panels * i / num_threads, end = panels * (i + 1) / num_threads;
    const Rows out{out_.data(), round_up(shape_.num_rows)};
    for (int64_t copy = 0; copy < weights_.count(); ++copy) {
      const Panels w = weights_.at(copy);
      if (is_quantised(w.format)) {
        const auto format = static_cast<int>(w.format);
        const auto* kernels = shape_.is_swiglu ? set_.int8->linear_swiglu : set_.int8->linear;
        kernels[format](rows8(), tokens_, w, begin, end, out);
      } else {
        const Rows x{x_.data(), shape_.num_columns};
        (shape_.is_swiglu ? set_.linear_swiglu : set_.linear)(x, tokens_, w, begin, end, out);
      }
    }
  }

  void print(const char* name, double best) const {
    const double s = best / static_cast<double>(weights_.count());
    const double macs = static_cast<double>(tokens_ * shape_.num_rows * shape_.num_columns);
    std::printf("  %2d rows %-5s %8.3f ms  %5.1f GB/s  %6.1f GMAC/s\n", tokens_, name, s * 1e3,
                static_cast<double>(weights_.bytes()) / s / 1e9, macs / s / 1e9);
  }

  // Rounds all rows; seconds of one.
  double quantise() {
    double best = 1e9;
    for (int round = 0; round < 50 * kRounds; ++round)
      best = std::min(best, seconds(1, [&](int) {
                        set_.int8->quantise({x_.data(), shape_.num_columns}, 8, 0, tokens_, rows8());
                      }));
    return best / tokens_;
  }

 private:
  Int8Rows rows8() {
    const auto past = reinterpret_cast<uintptr_t>(quants_.data()) % 64;
    return {quants_.data() + (64 - past) % 64, scales_.data(), scaled_sums_.data(), biases_.data(),
            shape_.num_columns};
  }

  const Kernels& set_;
  const Copies& weights_;
  Shape shape_;
  int tokens_;
  std::vector<float> x_, out_;
  std::vector<int8_t> quants_;
  std::vector<float> scales_, scaled_sums_;
  std::vector<int32_t> biases_;
};

void bench(const Kernels& set, int num_threads, const Shape& shape, Format format) {
  const Copies plain(shape, Format::kFloat32), kept(shape, format);
  volatile float sink = 0;
  double floor_s = 1e9;
  for (int round = 0; round < kRounds; ++round)
    floor_s = std::min(floor_s, seconds(num_threads, [&](int i) {
                         const int64_t share = plain.bytes() * plain.count() / num_threads / 64 * 64;
                         sink = read_all(plain.at(0).data + i * share, share);
                       }));
  std::printf("%6ld x %ld%s: reading float32 takes %.3f ms, %.1f GB/s\n", long{shape.num_rows},
              long{shape.num_columns}, shape.is_swiglu ? " swiglu" : "",
              floor_s / static_cast<double>(plain.count()) * 1e3,
              static_cast<double>(plain.bytes() * plain.count()) / floor_s / 1e9);
  for (const int tokens : {1, 2, 4, 8, 16, 64}) {
    Case cases[] = {{set, plain, shape, tokens}, {set, kept, shape, tokens}};
    double best[] = {1e9, 1e9};
    cases[1].quantise();
    for (int round = 0; round < kRounds; ++round)
      for (int i = 0; i < 2; ++i)
        best[i] =
            std::min(best[i], seconds(num_threads, [&](int thread) { cases[i].run(thread, num_threads); }));
    cases[0].print("f32", best[0]);
    cases[1].print(kFormats[static_cast<int>(format)], best[1]);
    if (tokens == 64) std::printf("  rounding a row: %.3f us\n", cases[1].quantise() * 1e6);
  }
}

// The place of `wanted` among the names; where it has none, says which ones there are and ends with 2.
size_t place_of(const char* what, const char* wanted, std::span<const char* const> names) {
  for (size_t i = 0; i < names.size(); ++i)
    if (std::string_view(names[i]) == wanted) return i;
  std::fprintf(stderr, "%s %s is none of:", what, wanted);
  for (const char* name : names) std::fprintf(stderr, " %s", name);
  std::fprintf(stderr, "\n");
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a shape takes a while, and whoever reads a pipe waits
  const auto sets = sets_of_this_machine();
  std::vector<const char*> names;
  for (const Kernels* each : sets) names.push_back(each->name);
  const Kernels& set = *sets[argc > 1 ? place_of("set", argv[1], names) : 0];
  const int num_threads = argc > 2 ? std::max(1, std::atoi(argv[2])) : 1;
  const auto format = argc > 3 ? static_cast<Format>(place_of("format", argv[3], kFormats)) : Format::kQ4_1;
  std::printf("%s, %d threads\n", set.name, num_threads);
  for (const Shape& shape : {Shape{960, 576, false},
                             {576, 576, false},
                             {3072, 576, true},
                             {576, 1536, false},
                             {49152, 576, false}})
    bench(set, num_threads, shape, format);
}
