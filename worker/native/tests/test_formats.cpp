// Weights in every kind of GGUF against the same weights as float32: each product, and embedding, has the
// same bits.
#include "check.h"
#include "gguf_twin.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

Matrix multiply(const Kernels& set, bool is_swiglu, Matrix& x, const PackedMatrix& w) {
  const Panels& panels = w.panels();
  const int64_t halves = is_swiglu ? 2 : 1;
  Matrix out(x.num_rows, w.num_rows() / halves);
  (is_swiglu ? set.linear_swiglu : set.linear)(x.rows(), static_cast<int>(x.num_rows), panels, 0,
                                               panels.num_panels() / halves, out.rows());
  return out;
}

// Columns that fill pieces, and that don't.
const std::vector<int64_t>& columns_of(const KindInfo& info) {
  static const std::vector<int64_t> any = {1, 31, 97, 250}, groups = {32, 96, 160}, blocks = {256, 768};
  return info.block_columns == 1 ? any : info.block_columns == 32 ? groups : blocks;
}

// Few rows and many are computed in ways of their own.
void test_products_have_the_bits_of_float32(const Kernels& set, const KindInfo& info) {
  for (const int64_t columns : columns_of(info))
    for (const int64_t outputs : {1, 17, 96, 160}) {
      const gguf_twin::Rows rows(info.kind, outputs, columns, 1);
      const PackedMatrix packed = rows.pack(), plain = pack_one(rows.floats(), columns);
      for (const int num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 15, 33, 65}) {
        Matrix x = Matrix::random(num_rows, columns, 2);
        const Matrix out = multiply(set, false, x, packed);
        CHECK(out.same(multiply(set, false, x, plain)), "%s linear %s %d x %ld x %ld", set.name, info.name,
              num_rows, long{outputs}, long{columns});
        CHECK(out.fence_holds(), "%s wrote beyond", info.name);
        if (outputs % (2 * kLanes) != 0) continue;
        const Matrix gated = multiply(set, true, x, packed);
        CHECK(gated.same(multiply(set, true, x, plain)), "%s linear_swiglu %s %d x %ld x %ld", set.name,
              info.name, num_rows, long{outputs}, long{columns});
        CHECK(gated.fence_holds(), "%s wrote beyond", info.name);
      }
    }
}

void test_no_bit_depends_on_the_cut(const Kernels& set, const KindInfo& info) {
  const gguf_twin::Rows rows(info.kind, 2 * 112, 256, 3);
  const PackedMatrix packed = rows.pack();
  const Panels& panels = packed.panels();
  for (const int num_rows : {1, 7, 20}) {
    Matrix x = Matrix::random(num_rows, 256, 4);
    const Matrix all = multiply(set, false, x, packed), gated = multiply(set, true, x, packed);
    for (int64_t cut = 0; cut <= 7; ++cut) {
      Matrix out(num_rows, packed.num_rows()), half(num_rows, packed.num_rows() / 2);
      set.linear(x.rows(), num_rows, panels, 0, 2 * cut, out.rows());
      set.linear(x.rows(), num_rows, panels, 2 * cut, 14, out.rows());
      set.linear_swiglu(x.rows(), num_rows, panels, 0, cut, half.rows());
      set.linear_swiglu(x.rows(), num_rows, panels, cut, 7, half.rows());
      CHECK(out.same(all) && half.same(gated), "%s %s cut at %ld", set.name, info.name, long{cut});
    }
  }
}

void test_a_bad_row_stays_alone(const Kernels& set, const KindInfo& info) {
  const PackedMatrix packed = gguf_twin::Rows(info.kind, 48, 256, 5).pack();
  for (const int64_t num_rows : {5, 20}) {
    Matrix x = Matrix::random(num_rows, 256, 6);
    const Matrix good = multiply(set, false, x, packed);
    x.at(3, 77) = kNaN;
    const Matrix out = multiply(set, false, x, packed);
    for (int64_t t = 0; t < num_rows; ++t)
      CHECK(t == 3 ? std::isnan(out.at(t, 47)) : out.same_row(t, good, t), "%s %s row %ld", set.name,
            info.name, long{t});
  }
}

void test_embedding_is_the_twin(const Kernels& set, const KindInfo& info) {
  for (const int64_t columns : columns_of(info)) {
    const gguf_twin::Rows rows(info.kind, 37, columns, 7);
    const PackedMatrix packed = rows.pack();
    std::vector<int32_t> ids;
    for (int32_t id = 36; id >= 0; --id) ids.push_back(id);
    Matrix out(38, columns);
    set.embedding(packed.panels(), ids.data(), 0, 37, out.rows());
    for (int64_t t = 0; t < 37; ++t)
      for (int64_t k = 0; k < columns; ++k)
        CHECK(out.at(t, k) == rows.at(36 - t, k), "%s %s at %ld, %ld: %g, not %g", set.name, info.name,
              long{t}, long{k}, out.at(t, k), rows.at(36 - t, k));
    CHECK(out.fence_holds() && out.untouched(37), "%s wrote beyond", info.name);
  }
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine())
    for (const KindInfo& info : kinds()) {
      test_products_have_the_bits_of_float32(*set, info);
      test_no_bit_depends_on_the_cut(*set, info);
      test_a_bad_row_stays_alone(*set, info);
      test_embedding_is_the_twin(*set, info);
    }
  return report();
}
