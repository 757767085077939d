// Quantised weights for tests, packed here by what panels.h says, and what products in eight bits give, lane
// by lane.
#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../src/int8.h"
#include "matrix.h"

inline constexpr pagecast::Format kQuantised[] = {pagecast::Format::kQ4_0, pagecast::Format::kQ4_1,
                                                  pagecast::Format::kQ4_K, pagecast::Format::kQ8_0,
                                                  pagecast::Format::kQ5_K, pagecast::Format::kQ6_K};

inline bool has_nibbles(pagecast::Format f) {
  return f == pagecast::Format::kQ4_0 || f == pagecast::Format::kQ4_1 || f == pagecast::Format::kQ4_K;
}
inline bool has_min(pagecast::Format f) {
  return f == pagecast::Format::kQ4_1 || f == pagecast::Format::kQ4_K || f == pagecast::Format::kQ5_K;
}
inline bool has_float_scales(pagecast::Format f) {
  return f == pagecast::Format::kQ4_K || f == pagecast::Format::kQ5_K || f == pagecast::Format::kQ6_K;
}

// A float16 of a size that weights have, as bits and as what it is worth.
struct Half {
  uint16_t bits;
  float value;
  static Half random(Random& random) {
    const auto exponent = random.below(5) + 4, fraction = random.below(1024), sign = random.below(2);
    const double size = std::ldexp(static_cast<double>(1024 + fraction), static_cast<int>(exponent) - 25);
    return {static_cast<uint16_t>(sign << 15 | exponent << 10 | fraction),
            static_cast<float>(sign ? -size : size)};
  }
};

struct FreeBytes {
  void operator()(std::byte* data) const { std::free(data); }
};

inline std::unique_ptr<std::byte, FreeBytes> make_bytes(int64_t count) {
  return std::unique_ptr<std::byte, FreeBytes>(
      static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>((count + 63) / 64 * 64))));
}

// `num_columns` a multiple of kGroup.
class QuantisedWeight {
 public:
  // Random; or where `extreme` is not negative with that quant everywhere.
  QuantisedWeight(pagecast::Format format, int offset, int64_t num_rows, int64_t num_columns, uint64_t seed,
                  int extreme = -1)
      : panels_{nullptr, format, offset, num_rows, num_columns},
        quants_(static_cast<size_t>(num_rows * num_columns)),
        scales_(static_cast<size_t>(num_rows * num_columns / 16)),
        mins_(static_cast<size_t>(num_rows * num_columns / 32)),
        bytes_(make_bytes(panels_.num_panels() * panels_.panel_bytes())) {
    panels_.data = bytes_.get();
    std::memset(bytes_.get(), 0, static_cast<size_t>(panels_.num_panels() * panels_.panel_bytes()));
    Random random(seed);
    for (uint8_t& quant : quants_)
      quant = static_cast<uint8_t>(extreme >= 0 ? extreme : random.below(has_nibbles(format) ? 16 : 256));
    for (int64_t n = 0; n < num_rows; ++n)
      for (int64_t g = 0; g < num_columns / pagecast::kGroup; ++g) pack_group(n, g, random);
  }

  const pagecast::Panels& panels() const { return panels_; }
  int quant(int64_t n, int64_t k) const { return quants_[static_cast<size_t>(n * panels_.num_columns + k)]; }
  // Of column k's half of a group.
  float scale(int64_t n, int64_t k) const {
    return scales_[static_cast<size_t>((n * panels_.num_columns + k) / 16)];
  }
  float min(int64_t n, int64_t k) const {
    return mins_[static_cast<size_t>((n * panels_.num_columns + k) / 32)];
  }

 private:
  void pack_group(int64_t n, int64_t g, Random& random) {
    const pagecast::Format format = panels_.format;
    const int64_t lane = n % pagecast::kLanes, at = (n * panels_.num_columns + g * pagecast::kGroup) / 32;
    std::byte* group = bytes_.get() + n / pagecast::kLanes * panels_.panel_bytes() + g * group_bytes(format);
    const int num_numbers = format == pagecast::Format::kQ6_K || has_min(format) ? 2 : 1;
    for (int i = 0; i < num_numbers; ++i) {
      const Half half = Half::random(random);
      // No float16 could hold this one.
      const float wide = half.value * 1.0001f;
      const float value = has_float_scales(format) ? wide : half.value;
      if (has_float_scales(format))
        std::memcpy(group + (i * 16 + lane) * 4, &wide, 4);
      else
        std::memcpy(group + (i * 16 + lane) * 2, &half.bits, 2);
      if (i == 1 && has_min(format))
        mins_[static_cast<size_t>(at)] = value;
      else if (i == 1)
        scales_[static_cast<size_t>(2 * at + 1)] = value;
      else
        scales_[static_cast<size_t>(2 * at)] = scales_[static_cast<size_t>(2 * at + 1)] = value;
    }
    std::byte* words = group + head_bytes(format);
    for (int64_t k = 0; k < pagecast::kGroup; ++k) {
      const auto q = static_cast<std::byte>(quant(n, g * pagecast::kGroup + k));
      if (has_nibbles(format))
        words[(k % 16 / 4 * 16 + lane) * 4 + k % 4] |= k < 16 ? q : q << 4;
      else
        words[(k / 4 * 16 + lane) * 4 + k % 4] = q;
    }
  }

  pagecast::Panels panels_;
  std::vector<uint8_t> quants_;
  std::vector<float> scales_;
  std::vector<float> mins_;
  std::unique_ptr<std::byte, FreeBytes> bytes_;
};

// Rows in eight bits and memory for them.
struct Quantised {
  Quantised(int64_t num_rows, int64_t num_columns)
      : bytes(make_bytes(num_rows * num_columns)),
        scales(static_cast<size_t>(num_rows * num_columns / 32), kNaN),
        scaled_sums(scales),
        biases(scales.size() * 2),
        rows{reinterpret_cast<int8_t*>(bytes.get()), scales.data(), scaled_sums.data(), biases.data(),
             num_columns} {}

  std::unique_ptr<std::byte, FreeBytes> bytes;
  std::vector<float> scales;
  std::vector<float> scaled_sums;
  std::vector<int32_t> biases;
  pagecast::Int8Rows rows;
};

inline Quantised quantise(const pagecast::Kernels& set, Matrix& x, int offset) {
  Quantised out(x.num_rows, x.width);
  set.int8->quantise(x.rows(), offset, 0, x.num_rows, out.rows);
  return out;
}

// The chain of int8.h, a rounding where the set has one.
inline float dot_int8_twin(bool fused, const Quantised& x, int64_t t, const QuantisedWeight& w, int64_t n) {
  const auto fma = [&](float a, float b, float c) {
    const volatile float product = a * b;
    return fused ? std::fma(a, b, c) : product + c;
  };
  const pagecast::Format format = w.panels().format;
  const int64_t num_groups = x.rows.num_groups();
  const int span = format == pagecast::Format::kQ6_K ? 16 : 32;
  float y = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    int64_t sum8 = 0;
    for (int64_t first = g * 32; first < (g + 1) * 32; first += span) {
      int64_t sum = 0;
      for (int64_t k = first; k < first + span; ++k) {
        sum += (w.quant(n, k) - w.panels().offset) * x.rows.quants[t * x.rows.num_columns + k];
        sum8 += x.rows.quants[t * x.rows.num_columns + k];
      }
      y = fma(w.scale(n, first) * x.rows.scales[t * num_groups + g], static_cast<float>(sum), y);
    }
    if (has_min(format))
      y = fma(w.min(n, g * 32), x.rows.scales[t * num_groups + g] * static_cast<float>(sum8), y);
  }
  return y;
}
