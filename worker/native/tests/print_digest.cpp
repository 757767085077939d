// Prints a digest of each set's results: sets that fuse print the same one, on any machine (compare an x86
// one with an AArch64 one).
#include <cstdio>

#include "attention_case.h"
#include "bfloat16_case.h"
#include "gguf_twin.h"
#include "int8_case.h"
#include "matrix.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

// FNV-1a over the rows' own floats.
uint64_t digest(uint64_t hash, const Matrix& rows) {
  for (int64_t t = 0; t < rows.num_rows; ++t)
    for (int64_t k = 0; k < rows.width; ++k) {
      uint32_t bits;
      const float value = rows.at(t, k);
      std::memcpy(&bits, &value, sizeof bits);
      for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ (bits >> shift & 0xff)) * 1099511628211u;
    }
  return hash;
}

// Over pages: chunks and decode rows whole by one thread, decode rows split over spans by four.
uint64_t attention_digest(const Kernels& set, uint64_t hash) {
  for (const KvShape& shape : {KvShape{16, 64, 9, 3}, KvShape{32, 80, 4, 4}}) {
    hash = hash_bits(AttentionCase(shape, {{1, 333}, {0, 5}, {21, 90}, {1, 64}}).run(1, set.name), hash);
    hash = hash_bits(AttentionCase(shape, {{1, 300}, {1, 65}}).run(4, set.name), hash);
    const auto in_bfloat16 = Activations::kBFloat16;
    hash = hash_bits(AttentionCase(shape, {{1, 333}, {0, 5}, {21, 90}}).run(1, set.name, in_bfloat16), hash);
    hash = hash_bits(AttentionCase(shape, {{1, 300}, {1, 65}}).run(4, set.name, in_bfloat16), hash);
  }
  return hash;
}

// Rounding to eight bits, and products of every quantised format with few rows and many.
uint64_t int8_digest(const Kernels& set, uint64_t hash) {
  for (const Format format : kQuantised) {
    const QuantisedWeight w(format, 16, 2 * 112, 800, 5);
    for (const int rows : {1, 6, 29}) {
      Matrix x = Matrix::random(rows, 800, 6, 4.0f), multiplied(rows, 2 * 112), gated(rows, 112);
      const Quantised x8 = quantise(set, x, 16);
      set.int8->linear[static_cast<int>(format)](x8.rows, rows, w.panels(), 0, 14, multiplied.rows());
      set.int8->linear_swiglu[static_cast<int>(format)](x8.rows, rows, w.panels(), 0, 7, gated.rows());
      for (const Matrix* out : {&multiplied, &gated}) hash = digest(hash, *out);
    }
  }
  return hash;
}

// The same in bfloat16, of plain weights too.
uint64_t bfloat16_digest(const Kernels& set, uint64_t hash) {
  for (const KindInfo& info : kinds()) {
    const PackedMatrix w = gguf_twin::Rows(info.kind, 2 * 112, 768, 5).pack();
    for (const int rows : {1, 6, 29}) {
      Matrix x = Matrix::random(rows, 768, 6, 4.0f), multiplied(rows, 2 * 112), gated(rows, 112);
      BFloats rounded = round_rows(set, x);
      set.bfloat16->linear(rounded.rows(), rows, w.panels(), 0, 14, multiplied.rows());
      set.bfloat16->linear_swiglu(rounded.rows(), rows, w.panels(), 0, 7, gated.rows(), nullptr);
      for (const Matrix* out : {&multiplied, &gated}) hash = digest(hash, *out);
    }
  }
  return hash;
}

uint64_t digest_of(const Kernels& set) {
  uint64_t hash = int8_digest(set, attention_digest(set, 14695981039346656037u));
  hash = bfloat16_digest(set, hash);
  const TestWeight w(2 * 336, 577, 1);
  const std::vector<float> scale = random_floats(577, 2);
  for (int rows = 1; rows <= 17; ++rows) {
    Matrix x = Matrix::random(rows, 577, static_cast<uint64_t>(rows), 4.0f),
           y = Matrix::random(rows, 577, 3, 90.0f);
    Matrix normed(rows, 577), gated(rows, 577), sum(rows, 577), multiplied(rows, 672), fused(rows, 336),
        turned(rows, 672);
    const std::vector<int32_t> position(static_cast<size_t>(rows), 3);
    set.add_rms_norm(x.rows(), y.rows(), scale.data(), 577, 1e-5f, 0, rows, sum.rows(), normed.rows());
    set.swiglu(y.rows(), x.rows(), 577, 0, rows, gated.rows());
    set.linear(normed.rows(), rows, w.packed.panels(), 0, 42, multiplied.rows());
    set.linear_swiglu(x.rows(), rows, w.packed.panels(), 0, 21, fused.rows());
    set.rope(multiplied.rows(), 6, 112, position.data(), {scale.data(), scale.data() + 100}, 0, rows,
             turned.rows());
    for (const Matrix* out : {&sum, &normed, &gated, &multiplied, &fused, &turned}) hash = digest(hash, *out);
  }
  return hash;
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine())
    std::printf("%s %016llx\n", set->name, static_cast<unsigned long long>(digest_of(*set)));
}
