// GGUF's formats, element by element as their definitions in llama.cpp say, and random blocks of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../src/pack.h"
#include "matrix.h"

namespace gguf_twin {

using namespace pagecast;

inline float half_at(const uint8_t* from) {
  const int bits = from[0] | from[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>((bits & 0x8000) != 0 ? -size : size);
}

// `sixes`[0..7] scales and mins of Q4_K and Q5_K.
inline int scale_six(const uint8_t* s, int i) {
  return i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
}
inline int min_six(const uint8_t* s, int i) {
  return i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6) << 4;
}

// Element k of a block.
inline float element(Kind kind, const uint8_t* block, int k) {
  const int i = k % 16, shift = k % 32 < 16 ? 0 : 4;
  const auto fifth = [&](const uint8_t* high) { return (high[k / 8] >> k % 8 & 1) << 4; };
  const auto k_quant = [&](int q) {
    const int group = k / 32;
    const float d = half_at(block) * static_cast<float>(scale_six(block + 4, group));
    const float m = half_at(block + 2) * static_cast<float>(min_six(block + 4, group));
    return d * static_cast<float>(q) - m;
  };
  const int k_nibble_at = k / 64 * 32 + k % 32, k_shift = k / 32 % 2 * 4;
  switch (kind) {
    case Kind::kF32: {
      float value;
      std::memcpy(&value, block, 4);
      return value;
    }
    case Kind::kF16:
      return half_at(block);
    case Kind::kBF16: {
      const uint32_t bits = static_cast<uint32_t>(block[0] | block[1] << 8) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    case Kind::kQ4_0:
      return half_at(block) * static_cast<float>((block[2 + i] >> shift & 15) - 8);
    case Kind::kQ4_1:
      return half_at(block) * static_cast<float>(block[4 + i] >> shift & 15) + half_at(block + 2);
    case Kind::kQ5_0:
      return half_at(block) * static_cast<float>(((block[6 + i] >> shift & 15) | fifth(block + 2)) - 16);
    case Kind::kQ5_1:
      return half_at(block) * static_cast<float>((block[8 + i] >> shift & 15) | fifth(block + 4)) +
             half_at(block + 2);
    case Kind::kQ8_0:
      return half_at(block) * static_cast<float>(static_cast<int8_t>(block[2 + k]));
    case Kind::kQ4_K:
      return k_quant(block[16 + k_nibble_at] >> k_shift & 15);
    case Kind::kQ5_K:
      return k_quant((block[48 + k_nibble_at] >> k_shift & 15) | (block[16 + k % 32] >> k / 32 & 1) << 4);
    case Kind::kQ6_K: {
      const int quarter = k / 32 % 4;
      const int low = block[k / 128 * 64 + quarter % 2 * 32 + k % 32] >> quarter / 2 * 4 & 15;
      const int high = block[128 + k / 128 * 32 + k % 32] >> 2 * quarter & 3;
      const float scale = half_at(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + k / 16]));
      return scale * static_cast<float>((low | high << 4) - 32);
    }
  }
  return kNaN;
}

// Where a block of the kind has its numbers in float16.
inline std::vector<int> half_offsets(Kind kind) {
  switch (kind) {
    case Kind::kQ4_0:
    case Kind::kQ5_0:
    case Kind::kQ8_0:
    case Kind::kF16:
      return {0};
    case Kind::kQ4_1:
    case Kind::kQ5_1:
    case Kind::kQ4_K:
    case Kind::kQ5_K:
      return {0, 2};
    case Kind::kQ6_K:
      return {208};
    default:
      return {};
  }
}

// Rows of random blocks: quants of any value, float16 numbers of either sign from 2^-11 to 0.25 and now and
// then a subnormal one.
struct Rows {
  Rows(Kind kind, int64_t num_rows, int64_t num_columns, uint64_t seed)
      : kind(kind), num_rows(num_rows), num_columns(num_columns) {
    const KindInfo& info = info_of(kind);
    row_bytes = num_columns / info.block_columns * info.block_bytes;
    bytes.resize(static_cast<size_t>(num_rows * row_bytes));
    Random random(seed);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.below(256));
    const auto set = [&](size_t at, int64_t bits) {
      bytes[at] = static_cast<uint8_t>(bits & 255);
      bytes[at + 1] = static_cast<uint8_t>(bits >> 8);
    };
    const size_t size = static_cast<size_t>(info.block_bytes);
    for (size_t block = 0; block < bytes.size(); block += size) {
      for (const int offset : half_offsets(kind)) {
        const int64_t exponent = random.below(30) == 0 ? 0 : 4 + random.below(10);
        set(block + static_cast<size_t>(offset), random.below(2) << 15 | exponent << 10 | random.below(1024));
      }
      if (kind == Kind::kBF16)
        set(block, random.below(2) << 15 | (115 + random.below(10)) << 7 | random.below(128));
      if (kind == Kind::kF32) {
        const float value = random.uniform();
        std::memcpy(&bytes[block], &value, 4);
      }
    }
  }

  float at(int64_t n, int64_t k) const {
    const KindInfo& info = info_of(kind);
    const uint8_t* row = bytes.data() + n * row_bytes;
    return element(kind, row + k / info.block_columns * info.block_bytes,
                   static_cast<int>(k % info.block_columns));
  }
  std::vector<float> floats() const {
    std::vector<float> out;
    for (int64_t n = 0; n < num_rows; ++n)
      for (int64_t k = 0; k < num_columns; ++k) out.push_back(at(n, k));
    return out;
  }
  Part part() const { return {bytes.data(), num_rows, kind}; }
  PackedMatrix pack() const {
    const Part one = part();
    return PackedMatrix({&one, 1}, num_columns);
  }

  Kind kind;
  int64_t num_rows, num_columns, row_bytes;
  std::vector<uint8_t> bytes;
};

}  // namespace gguf_twin
