// Kernels that go by rows or tokens, of every set this machine runs.
#include <algorithm>
#include <functional>

#include "check.h"
#include "matrix.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

constexpr int kWidths[] = {1, 15, 16, 17, 576, 1536};
constexpr int kRows = 5;
// Rows given to a kernel: neither the first nor the last, which must stay untouched.
constexpr int kFirst = 1, kLast = 4;

void check_range(const Kernels& set, const char* kernel, const Matrix& out) {
  CHECK(out.untouched(0) && out.untouched(kRows - 1), "%s %s wrote other rows", set.name, kernel);
  CHECK(out.fence_holds(), "%s %s wrote beyond its rows", set.name, kernel);
}

void test_rms_norm(const Kernels& set) {
  for (const int width : kWidths) {
    Matrix x = Matrix::random(kRows, width, 1, 3.0f), y = Matrix::random(kRows, width, 2);
    const std::vector<float> weight = random_floats(width, 3);
    Matrix out(kRows, width), sum(kRows, width), sum_out(kRows, width), again(kRows, width);
    set.rms_norm(x.rows(), weight.data(), width, 1e-5f, kFirst, kLast, out.rows());
    set.add_rms_norm(x.rows(), y.rows(), weight.data(), width, 1e-5f, kFirst, kLast, sum.rows(),
                     sum_out.rows());
    set.rms_norm(sum.rows(), weight.data(), width, 1e-5f, kFirst, kLast, again.rows());
    for (int t = kFirst; t < kLast; ++t) {
      const std::vector<double> twin = rms_norm_twin(x, t, weight.data(), 1e-5f);
      for (int k = 0; k < width; ++k) {
        CHECK(close(out.at(t, k), twin[static_cast<size_t>(k)]), "%s %d: %g, not %g", set.name, width,
              out.at(t, k), twin[static_cast<size_t>(k)]);
        CHECK(sum.at(t, k) == x.at(t, k) + y.at(t, k), "%s %d", set.name, width);
      }
    }
    CHECK(sum_out.same(again), "%s %d: add_rms_norm is not add, then rms_norm", set.name, width);
    check_range(set, "rms_norm", out);
    check_range(set, "add_rms_norm", sum);
    check_range(set, "add_rms_norm", sum_out);
  }
}

void test_add_and_swiglu(const Kernels& set) {
  for (const int width : kWidths) {
    Matrix x = Matrix::random(kRows, width, 4, 20.0f), y = Matrix::random(kRows, width, 5);
    Matrix added(kRows, width), gated(kRows, width);
    set.add(x.rows(), y.rows(), width, kFirst, kLast, added.rows());
    set.swiglu(x.rows(), y.rows(), width, kFirst, kLast, gated.rows());
    for (int t = kFirst; t < kLast; ++t)
      for (int k = 0; k < width; ++k) {
        const double twin = silu_twin(x.at(t, k)) * y.at(t, k);
        CHECK(added.at(t, k) == x.at(t, k) + y.at(t, k), "%s %d", set.name, width);
        CHECK(close(gated.at(t, k), twin), "%s %d: %g, not %g", set.name, width, gated.at(t, k), twin);
      }
    check_range(set, "add", added);
    check_range(set, "swiglu", gated);
  }
}

void test_what_is_not_finite(const Kernels& set) {
  Matrix gate(1, 7), up(1, 7), out(1, 7);
  const float gates[] = {kNaN, kInf, -kInf, -100.0f, 100.0f, 0.0f, 1.0f};
  for (int k = 0; k < 7; ++k) gate.at(0, k) = gates[k], up.at(0, k) = k == 6 ? kNaN : 2.0f;
  set.swiglu(gate.rows(), up.rows(), 7, 0, 1, out.rows());
  CHECK(std::isnan(out.at(0, 0)) && out.at(0, 1) == kInf && std::isnan(out.at(0, 2)), "%s", set.name);
  CHECK(out.at(0, 3) == 0.0f && out.at(0, 4) == 200.0f && out.at(0, 5) == 0.0f, "%s", set.name);
  CHECK(std::isnan(out.at(0, 6)), "%s", set.name);

  Matrix x = Matrix::random(2, 40, 6), normed(2, 40);
  const std::vector<float> weight(40, 1.0f);
  x.at(0, 33) = kNaN;
  set.rms_norm(x.rows(), weight.data(), 40, 1e-5f, 0, 2, normed.rows());
  CHECK(std::isnan(normed.at(0, 0)) && std::isfinite(normed.at(1, 0)), "%s", set.name);
}

void test_copies(const Kernels& set) {
  for (const int width : kWidths) {
    const TestWeight w(37, width, 7);
    const int32_t token_ids[kRows] = {9, 0, 36, 16, 9};
    Matrix embedded(kRows, width), x = Matrix::random(9, width, 8), selected(kRows, width);
    const int32_t index[kRows] = {0, 8, 3, 3, 0};
    set.embedding(w.packed.panels(), token_ids, kFirst, kLast, embedded.rows());
    set.select_rows(x.rows(), index, width, kFirst, kLast, selected.rows());
    for (int t = kFirst; t < kLast; ++t) {
      CHECK(selected.same_row(t, x, index[t]), "%s %d", set.name, width);
      for (int k = 0; k < width; ++k)
        CHECK(embedded.at(t, k) == w.at(token_ids[t], k), "%s %d", set.name, width);
    }
    check_range(set, "embedding", embedded);
    check_range(set, "select_rows", selected);
  }
}

// Each row alone has the bits it has among others, and sets that fuse give the same ones.
void test_bits(const Kernels& set, const Kernels& first) {
  for (const int width : kWidths) {
    Matrix x = Matrix::random(kRows, width, 14, 90.0f), y = Matrix::random(kRows, width, 15);
    const std::vector<float> weight = random_floats(width, 16);
    using Run = std::function<void(const Kernels&, int, int, Matrix&)>;
    const Run runs[] = {
        [&](const Kernels& of, int from, int to, Matrix& out) {
          of.rms_norm(x.rows(), weight.data(), width, 1e-5f, from, to, out.rows());
        },
        [&](const Kernels& of, int from, int to, Matrix& out) {
          of.swiglu(x.rows(), y.rows(), width, from, to, out.rows());
        },
    };
    for (const Run& run : runs) {
      Matrix all(kRows, width), one(kRows, width), expected(kRows, width);
      run(set, 0, kRows, all);
      for (int t = kRows - 1; t >= 0; --t) run(set, t, t + 1, one);
      run(first, 0, kRows, expected);
      CHECK(one.same(all), "%s %d: bits depend on the range", set.name, width);
      if (set.fused && first.fused)
        CHECK(all.same(expected), "%s %d: not the bits of %s", set.name, width, first.name);
    }
  }
}

}  // namespace

int main() {
  const auto sets = sets_of_this_machine();
  for (const Kernels* set : sets) {
    std::printf("%s\n", set->name);
    test_rms_norm(*set);
    test_add_and_swiglu(*set);
    test_what_is_not_finite(*set);
    test_copies(*set);
    test_bits(*set, *sets.front());
  }
  return report();
}
