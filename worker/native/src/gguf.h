// Rows as a GGUF file has them: blocks of quants with their scales, one after the other. Takes them apart
// into the groups that panels are made of, without loss. Knows neither files nor panels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "panels.h"

namespace pagecast {

// GGUF's types of tensors that are read; k-quants after llama.cpp's block_q4_K, block_q5_K and block_q6_K.
enum class Kind : int { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

struct KindInfo {
  Kind kind;
  const char* name;   // "f32", "q4_1", ...
  Format format;      // how it lies in panels
  int offset;         // of the quants there
  int block_columns;  // columns of a block of the file: 1 where it is not quantised
  int64_t block_bytes;
};

std::span<const KindInfo> kinds();
const KindInfo& info_of(Kind kind);
// Throws std::invalid_argument("kind: ...") for a name that is none.
const KindInfo& kind_named(const std::string& name);

// kGroup columns of a row: what of them goes to a panel's group, in the order of panels.h.
struct Group {
  uint32_t head[2];   // the scale and the min, or two scales: float16 in the low bits, or float32
  uint32_t words[8];  // four for quants of 4 bits
};

// Group `index` of a row of a quantised kind that begins at `row`, which needs no alignment.
Group take_group(Kind kind, const std::byte* row, int64_t index);

}  // namespace pagecast
