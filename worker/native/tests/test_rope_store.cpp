// Rope and the stores to the KV pool, of every type and every set this machine runs: right to the bit.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "matrix.h"
#include "pool.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

constexpr int kRows = 9;
// Rows given to a kernel: neither the first nor the last, which must stay untouched.
constexpr int kFirst = 1, kLast = 8;

// The nearest number of so many mantissa bits, halves to even.
double rounded(double x, int mantissa_bits, int smallest_exponent, double largest) {
  if (x == 0 || std::isnan(x) || std::isinf(x)) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), smallest_exponent) - mantissa_bits);
  const double near = std::nearbyint(x / unit) * unit;
  return std::fabs(near) > largest ? std::copysign(static_cast<double>(kInf), x) : near;
}

struct Stored {
  std::vector<float> elements;
  float scale;
};

Stored round_twin(KvType type, const float* x, int head_size) {
  Stored out{{x, x + head_size}, 1.0f};
  if (type == KvType::kInt8) {
    float largest = 0.0f;
    for (const float at : out.elements) largest = std::isfinite(at) ? std::max(largest, std::fabs(at)) : kInf;
    for (const float at : out.elements)
      if (!std::isfinite(at)) return {std::vector<float>(static_cast<size_t>(head_size), 0.0f), kNaN};
    const float factor = 127.0f / largest;
    for (float& at : out.elements) at = std::isfinite(factor) ? std::nearbyintf(at * factor) : 0.0f;
    return {out.elements, largest / 127.0f};
  }
  for (float& at : out.elements) {
    if (type == KvType::kFloat16) at = static_cast<float>(rounded(at, 10, -14, 65504.0));
    if (type == KvType::kBFloat16) at = static_cast<float>(rounded(at, 7, -126, std::ldexp(255.0, 120)));
  }
  return out;
}

bool equal(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void check_stored(const char* set, const Pool& pool, bool is_key, int64_t slot, int head, const float* x) {
  const Stored twin = round_twin(pool.shape.type, x, pool.shape.head_size);
  const char* what = is_key ? "key" : "value";
  for (int d = 0; d < pool.shape.head_size; ++d)
    CHECK(equal(pool.element(is_key, slot, head, d), twin.elements[static_cast<size_t>(d)]),
          "%s %s %s: %g of %g, not %g", set, name_of(pool.shape.type), what,
          pool.element(is_key, slot, head, d), x[d], twin.elements[static_cast<size_t>(d)]);
  CHECK(equal(pool.scale(is_key, slot, head), twin.scale), "%s %s: scale %g, not %g", set, what,
        pool.scale(is_key, slot, head), twin.scale);
}

// Rows of any size, the last ones with what is hard to round.
Matrix hard_rows(int64_t width, uint64_t seed) {
  Matrix out = Matrix::random(kRows, width, seed);
  const float of_row[kRows] = {1.0f, 1.0f, 900.0f, 3e-6f, 1e-41f, 0.0f, 5e4f, 1.0f, 1.0f};
  for (int64_t t = 0; t < kRows; ++t)
    for (int64_t i = 0; i < width; ++i) out.at(t, i) *= 2 * of_row[t];
  out.at(7, width - 2) = kNaN;
  out.at(7, 0) = kInf;
  // Halves, up and down.
  out.at(2, 0) = 2049.0f;
  out.at(2, 1) = -2051.0f;
  out.at(2, 2) = 65519.0f;
  out.at(2, 3) = 65520.0f;
  out.at(1, 0) = 1.00390625f;
  out.at(1, 1) = 1.01171875f;
  return out;
}

void test_rope_and_store(const Kernels& set, KvType type) {
  for (const KvShape shape :
       {KvShape{16, 16, 3, 1, type}, KvShape{32, 64, 9, 3, type}, KvShape{48, 80, 2, 2, type}}) {
    const int64_t width = shape.num_heads * shape.head_size, kv_width = shape.num_kv_heads * shape.head_size;
    Matrix q = Matrix::random(kRows, width, 9), k = Matrix::random(kRows, kv_width, 10);
    Matrix v = Matrix::random(kRows, kv_width, 11);
    const std::vector<float> cos = random_floats(50 * shape.head_size / 2, 12);
    const std::vector<float> sin = random_floats(50 * shape.head_size / 2, 13);
    const Rope table{cos.data(), sin.data()};
    const int32_t position[kRows] = {0, 49, 7, 0, 3, 11, 12, 1, 0};
    const int64_t size = shape.block_size;
    const int64_t slots[kRows] = {1, 3 * size - 1, 0, size + 2, 4, 5, 2 * size, size, 3};

    Matrix turned_q(kRows, width), turned_k(kRows, kv_width), fused_q(kRows, width);
    Pool apart(shape, 3), fused(shape, 3), clean(shape, 3);
    set.rope(q.rows(), shape.num_heads, shape.head_size, position, table, kFirst, kLast, turned_q.rows());
    set.rope(k.rows(), shape.num_kv_heads, shape.head_size, position, table, kFirst, kLast, turned_k.rows());
    set.store_kv(turned_k.rows(), v.rows(), slots, apart.keys(), apart.values(), shape, kFirst, kLast);
    set.rope_store(q.rows(), k.rows(), v.rows(), position, slots, table, fused.keys(), fused.values(), shape,
                   kFirst, kLast, fused_q.rows());
    for (int t = kFirst; t < kLast; ++t) {
      const std::vector<float> twin = rope_twin(q, t, shape.head_size, position[t], cos, sin);
      const std::vector<float> key_twin = rope_twin(k, t, shape.head_size, position[t], cos, sin);
      CHECK(std::memcmp(twin.data(), turned_q.rows(t).data, twin.size() * 4) == 0, "%s rope", set.name);
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const int64_t at = int64_t{head} * shape.head_size;
        check_stored(set.name, apart, true, slots[t], head, key_twin.data() + at);
        check_stored(set.name, apart, false, slots[t], head, v.rows(t).data + at);
        // As it was: what is left then was written elsewhere.
        apart.poison(slots[t], head);
      }
    }
    CHECK(apart.data == clean.data, "%s %s: store_kv wrote elsewhere", set.name, name_of(type));
    set.store_kv(turned_k.rows(), v.rows(), slots, apart.keys(), apart.values(), shape, kFirst, kLast);
    CHECK(fused.data == apart.data && fused_q.same(turned_q), "%s: rope_store is not rope, then store_kv",
          set.name);
    for (const Matrix* out : {&turned_q, &fused_q}) {
      CHECK(out->untouched(0) && out->untouched(kRows - 1), "%s wrote other rows", set.name);
      CHECK(out->fence_holds(), "%s wrote beyond its rows", set.name);
    }
  }
}

void test_what_is_hard_to_round(const Kernels& set, const Kernels& first, KvType type) {
  const KvShape shape = {16, 32, 2, 2, type};
  Matrix k = hard_rows(64, 20), v = hard_rows(64, 21);
  const int64_t slots[kRows] = {0, 31, 2, 17, 4, 5, 30, 7, 8};
  Pool pool(shape, 2), others(shape, 2);
  set.store_kv(k.rows(), v.rows(), slots, pool.keys(), pool.values(), shape, kFirst, kLast);
  first.store_kv(k.rows(), v.rows(), slots, others.keys(), others.values(), shape, kFirst, kLast);
  for (int t = kFirst; t < kLast; ++t)
    for (int head = 0; head < 2; ++head) {
      check_stored(set.name, pool, true, slots[t], head, k.rows(t).data + head * 32);
      check_stored(set.name, pool, false, slots[t], head, v.rows(t).data + head * 32);
    }
  CHECK(pool.data == others.data, "%s %s stores other bits than %s", set.name, name_of(type), first.name);
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine())
    for (const KvType type : kKvTypes) {
      test_rope_and_store(*set, type);
      test_what_is_hard_to_round(*set, *sets_of_this_machine()[0], type);
    }
  return report();
}
