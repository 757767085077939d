// Linear and linear_swiglu of every set this machine runs.
#include "check.h"
#include "matrix.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

struct Shape {
  int num_rows;
  int64_t num_outputs;
  int64_t num_columns;
};

// Odd and even everything; large ones with few rows, for time.
std::vector<Shape> shapes() {
  std::vector<Shape> out;
  for (int rows = 1; rows <= 33; ++rows)
    for (const int64_t outputs : {1, 16, 17, 48, 192})
      for (const int64_t columns : {1, 15, 16, 17, 64}) out.push_back({rows, outputs, columns});
  for (const int rows : {1, 3, 8, 13}) out.push_back({rows, 1536, 576}), out.push_back({rows, 192, 1536});
  // Columns in several pieces, and more rows than a block has.
  for (const int rows : {7, 14, 15, 30, 65}) out.push_back({rows, 80, 193});
  return out;
}

Matrix run_linear(const Kernels& set, Matrix& x, const TestWeight& w) {
  Matrix out(x.num_rows, w.packed.num_rows());
  set.linear(x.rows(), static_cast<int>(x.num_rows), w.packed.panels(), 0, w.packed.panels().num_panels(),
             out.rows());
  return out;
}

Matrix run_linear_swiglu(const Kernels& set, Matrix& x, const TestWeight& w) {
  Matrix out(x.num_rows, w.packed.num_rows() / 2);
  set.linear_swiglu(x.rows(), static_cast<int>(x.num_rows), w.packed.panels(), 0,
                    w.packed.panels().num_panels() / 2, out.rows());
  return out;
}

void test_linear_is_its_twin(const Kernels& set) {
  for (const auto& [rows, outputs, columns] : shapes()) {
    Matrix x = Matrix::random(rows, columns, 1);
    const TestWeight w(outputs, columns, 2);
    const Matrix out = run_linear(set, x, w);
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t n = 0; n < outputs; ++n) {
        const Sum twin = dot_twin(x, t, w, n);
        CHECK(std::fabs(out.at(t, n) - twin.value) <= twin.tolerance,
              "%s %d x %ld x %ld at %ld, %ld: %g, not %g", set.name, rows, long{outputs}, long{columns},
              long{t}, long{n}, out.at(t, n), twin.value);
      }
    CHECK(out.fence_holds(), "%s %d x %ld x %ld wrote beyond", set.name, rows, long{outputs}, long{columns});
  }
}

void test_linear_swiglu_is_its_twin(const Kernels& set) {
  for (const auto& [rows, outputs, columns] : shapes()) {
    if (outputs % kLanes != 0) continue;
    Matrix x = Matrix::random(rows, columns, 3);
    const TestWeight w(2 * outputs, columns, 4);
    const Matrix out = run_linear_swiglu(set, x, w);
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t n = 0; n < outputs; ++n) {
        const Sum gate = dot_twin(x, t, w, n), up = dot_twin(x, t, w, n + outputs);
        // silu's slope stays below 1.1.
        const double tolerance = 1.1 * gate.tolerance * std::fabs(up.value) +
                                 std::fabs(gate.value) * up.tolerance +
                                 1e-6 * std::fabs(gate.value * up.value);
        const double twin = silu_twin(gate.value) * up.value;
        CHECK(std::fabs(out.at(t, n) - twin) <= tolerance, "%s %d x %ld x %ld at %ld, %ld: %g, not %g",
              set.name, rows, long{outputs}, long{columns}, long{t}, long{n}, out.at(t, n), twin);
      }
    CHECK(out.fence_holds(), "%s %d x %ld x %ld wrote beyond", set.name, rows, long{outputs}, long{columns});
  }
}

// A row alone, its panels cut in any two: the bits it has among others.
void test_no_bit_depends_on_rows_or_cut(const Kernels& set) {
  constexpr int64_t kColumns = 250;  // in pieces, where rows are many tiles
  const TestWeight w(2 * 112, kColumns, 5);
  const int64_t panels = w.packed.panels().num_panels();
  std::vector<int> counts;
  for (int rows = 1; rows <= 33; ++rows) counts.push_back(rows);
  for (const int rows : {64, 65, 130}) counts.push_back(rows);
  for (const int rows : counts) {
    Matrix x = Matrix::random(rows, kColumns, 6);
    const Matrix all = run_linear(set, x, w), all_swiglu = run_linear_swiglu(set, x, w);
    for (int64_t t = 0; t < rows; ++t) {
      Matrix one(1, w.packed.num_rows()), one_swiglu(1, w.packed.num_rows() / 2);
      const int64_t cut = t % (panels + 1), half_cut = t % (panels / 2 + 1);
      set.linear(x.rows(t), 1, w.packed.panels(), 0, cut, one.rows());
      set.linear(x.rows(t), 1, w.packed.panels(), cut, panels, one.rows());
      set.linear_swiglu(x.rows(t), 1, w.packed.panels(), 0, half_cut, one_swiglu.rows());
      set.linear_swiglu(x.rows(t), 1, w.packed.panels(), half_cut, panels / 2, one_swiglu.rows());
      CHECK(one.same_row(0, all, t), "%s linear: row %ld of %d", set.name, long{t}, rows);
      CHECK(one_swiglu.same_row(0, all_swiglu, t), "%s linear_swiglu: row %ld of %d", set.name, long{t},
            rows);
    }
  }
}

void test_linear_writes_its_panels_only(const Kernels& set) {
  const TestWeight w(80, 16, 7);
  Matrix x = Matrix::random(5, 16, 8);
  Matrix out(6, 80);
  set.linear(x.rows(), 5, w.packed.panels(), 1, 3, out.rows());
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t n = 0; n < out.stride; ++n)
      CHECK(std::isnan(out.at(t, n)) == (n < 16 || n >= 48), "%s at %ld, %ld", set.name, long{t}, long{n});
  CHECK(out.untouched(5), "%s wrote a row too many", set.name);
}

void test_a_bad_row_stays_alone(const Kernels& set) {
  const TestWeight w(48, 33, 9);
  for (const float bad : {kNaN, kInf}) {
    for (int64_t at = 0; at < 9; ++at) {
      Matrix x = Matrix::random(9, 33, 10);
      const Matrix good = run_linear(set, x, w);
      x.at(at, 7) = bad;
      const Matrix out = run_linear(set, x, w);
      for (int64_t t = 0; t < 9; ++t)
        CHECK(t == at ? !std::isfinite(out.at(t, 47)) : out.same_row(t, good, t), "%s row %ld", set.name,
              long{t});
    }
  }
}

// Sets that fuse: the same bits. The others are close, which their twins show.
void test_fused_sets_are_equal() {
  const Kernels* first = nullptr;
  for (const Kernels* set : sets_of_this_machine()) {
    if (!set->fused) continue;
    if (first == nullptr) first = set;
    for (const auto& [rows, outputs, columns] : shapes()) {
      Matrix x = Matrix::random(rows, columns, 11, 3.0f);
      const TestWeight w(outputs, columns, 12);
      CHECK(run_linear(*set, x, w).same(run_linear(*first, x, w)), "%s: %d x %ld x %ld", set->name, rows,
            long{outputs}, long{columns});
      if (outputs % (2 * kLanes) == 0)
        CHECK(run_linear_swiglu(*set, x, w).same(run_linear_swiglu(*first, x, w)), "%s: %d x %ld x %ld",
              set->name, rows, long{outputs}, long{columns});
    }
  }
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine()) {
    std::printf("%s\n", set->name);
    test_linear_is_its_twin(*set);
    test_linear_swiglu_is_its_twin(*set);
    test_no_bit_depends_on_rows_or_cut(*set);
    test_linear_writes_its_panels_only(*set);
    test_a_bad_row_stays_alone(*set);
  }
  test_fused_sets_are_equal();
  return report();
}
