#include "gguf.h"

#include <bit>
#include <cstring>
#include <stdexcept>

namespace pagecast {
namespace {

constexpr KindInfo kKinds[] = {
    {Kind::kF32, "f32", Format::kFloat32, 0, 1, 4},     {Kind::kF16, "f16", Format::kFloat16, 0, 1, 2},
    {Kind::kBF16, "bf16", Format::kBFloat16, 0, 1, 2},  {Kind::kQ4_0, "q4_0", Format::kQ4_0, 8, 32, 18},
    {Kind::kQ4_1, "q4_1", Format::kQ4_1, 0, 32, 20},    {Kind::kQ5_0, "q5_0", Format::kQ8_0, 16, 32, 22},
    {Kind::kQ5_1, "q5_1", Format::kQ5_K, 0, 32, 24},    {Kind::kQ8_0, "q8_0", Format::kQ8_0, 128, 32, 34},
    {Kind::kQ4_K, "q4_k", Format::kQ4_K, 0, 256, 144},  {Kind::kQ5_K, "q5_k", Format::kQ5_K, 0, 256, 176},
    {Kind::kQ6_K, "q6_k", Format::kQ6_K, 32, 256, 210},
};

constexpr uint32_t kLowNibbles = 0x0f0f0f0f;

uint32_t half_at(const std::byte* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

uint32_t word_at(const std::byte* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

uint32_t byte_at(const std::byte* from) { return static_cast<uint32_t>(*from); }

float half_to_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent > 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float size = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -size : size;
}

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// Four bits, least significant first, to a byte each.
uint32_t spread(uint32_t bits) { return (bits & 1) | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21; }

// Scale and min of a group of a block of Q4_K or Q5_K, six bits each.
struct Sixes {
  uint32_t scale;
  uint32_t min;
};

Sixes sixes_at(const std::byte* from, int64_t group) {
  const std::byte* at = from + group;
  if (group < 4) return {byte_at(at) & 63, byte_at(at + 4) & 63};
  return {(byte_at(at + 4) & 15) | (byte_at(at - 4) >> 6) << 4, byte_at(at + 4) >> 4 | (byte_at(at) >> 6)
                                                                                           << 4};
}

void take_scale_and_min(const std::byte* block, int64_t group, Group& out) {
  const Sixes sixes = sixes_at(block + 4, group);
  out.head[0] = bits_of(half_to_float(half_at(block)) * static_cast<float>(sixes.scale));
  out.head[1] = bits_of(-(half_to_float(half_at(block + 2)) * static_cast<float>(sixes.min)));
}

// Quants of 4 bits of Q4_0 and Q4_1 lie as in a panel; those of Q5 have a fifth bit each in `high`.
void take_fives(const std::byte* low, uint32_t high, Group& out) {
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = word_at(low + 4 * w);
    out.words[w] = (word & kLowNibbles) | spread(high >> 4 * w) << 4;
    out.words[w + 4] = (word >> 4 & kLowNibbles) | spread(high >> (16 + 4 * w)) << 4;
  }
}

void take_q4_k(const std::byte* block, int64_t group, Group& out) {
  take_scale_and_min(block, group, out);
  const std::byte* quants = block + 16 + group / 2 * 32;
  const int shift = group % 2 * 4;
  for (int w = 0; w < 4; ++w) {
    const uint32_t first = word_at(quants + 4 * w) >> shift & kLowNibbles;
    const uint32_t second = word_at(quants + 16 + 4 * w) >> shift & kLowNibbles;
    out.words[w] = first | second << 4;
  }
}

void take_q5_k(const std::byte* block, int64_t group, Group& out) {
  take_scale_and_min(block, group, out);
  const std::byte* quants = block + 48 + group / 2 * 32;
  for (int w = 0; w < 8; ++w) {
    const uint32_t low = word_at(quants + 4 * w) >> (group % 2 * 4) & kLowNibbles;
    const uint32_t high = word_at(block + 16 + 4 * w) >> group & 0x01010101;
    out.words[w] = low | high << 4;
  }
}

void take_q6_k(const std::byte* block, int64_t group, Group& out) {
  const int64_t half = group / 4, quarter = group % 4;
  const float scale = half_to_float(half_at(block + 208));
  for (int i = 0; i < 2; ++i) {
    const auto part = static_cast<int8_t>(byte_at(block + 192 + 2 * group + i));
    out.head[i] = bits_of(scale * static_cast<float>(part));
  }
  const std::byte* low = block + half * 64 + quarter % 2 * 32;
  const std::byte* high = block + 128 + half * 32;
  for (int w = 0; w < 8; ++w) {
    const uint32_t nibbles = word_at(low + 4 * w) >> (quarter / 2 * 4) & kLowNibbles;
    const uint32_t twos = word_at(high + 4 * w) >> 2 * quarter & 0x03030303;
    out.words[w] = nibbles | twos << 4;
  }
}

}  // namespace

std::span<const KindInfo> kinds() { return kKinds; }

const KindInfo& info_of(Kind kind) { return kKinds[static_cast<int>(kind)]; }

const KindInfo& kind_named(const std::string& name) {
  std::string known;
  for (const KindInfo& info : kKinds) {
    if (name == info.name) return info;
    known += known.empty() ? info.name : std::string(", ") + info.name;
  }
  throw std::invalid_argument("kind: \"" + name + "\", must be one of " + known);
}

Group take_group(Kind kind, const std::byte* row, int64_t index) {
  const KindInfo& info = info_of(kind);
  const int64_t groups = info.block_columns / kGroup;
  const std::byte* block = row + index / groups * info.block_bytes;
  const int64_t group = index % groups;
  Group out{};
  switch (kind) {
    case Kind::kQ4_0:
      out.head[0] = half_at(block);
      std::memcpy(out.words, block + 2, 16);
      break;
    case Kind::kQ4_1:
      out.head[0] = half_at(block);
      out.head[1] = half_at(block + 2);
      std::memcpy(out.words, block + 4, 16);
      break;
    case Kind::kQ5_0:
      out.head[0] = half_at(block);
      take_fives(block + 6, word_at(block + 2), out);
      break;
    case Kind::kQ5_1:
      out.head[0] = bits_of(half_to_float(half_at(block)));
      out.head[1] = bits_of(half_to_float(half_at(block + 2)));
      take_fives(block + 8, word_at(block + 4), out);
      break;
    case Kind::kQ8_0:
      out.head[0] = half_at(block);
      for (int w = 0; w < 8; ++w) out.words[w] = word_at(block + 2 + 4 * w) ^ 0x80808080;
      break;
    case Kind::kQ4_K:
      take_q4_k(block, group, out);
      break;
    case Kind::kQ5_K:
      take_q5_k(block, group, out);
      break;
    case Kind::kQ6_K:
      take_q6_k(block, group, out);
      break;
    default:
      break;
  }
  return out;
}

}  // namespace pagecast
