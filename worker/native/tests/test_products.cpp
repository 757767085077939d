// Products of a program: weights of several formats in one stack, activations in eight bits, what is added in
// front of them, and equal bits for any team.
#include <stdexcept>
#include <string>

#include "../src/program.h"
#include "bfloat16_case.h"
#include "check.h"
#include "gguf_twin.h"
#include "sets.h"
#include "twins.h"

namespace {

using namespace pagecast;

constexpr int64_t kTokens = 70, kHidden = 256;

// A weight whose parts have formats of their own, in quants and as floats.
struct Stack {
  Stack(const std::vector<std::pair<Kind, int64_t>>& parts, int64_t num_columns) {
    for (const auto& [kind, num_rows] : parts)
      rows.emplace_back(kind, num_rows, num_columns, 10 + rows.size());
    std::vector<Part> list;
    std::vector<float> floats;
    for (const gguf_twin::Rows& part : rows) {
      list.push_back(part.part());
      const std::vector<float> more = part.floats();
      floats.insert(floats.end(), more.begin(), more.end());
    }
    packed = std::make_unique<PackedMatrix>(list, num_columns);
    plain = std::make_unique<PackedMatrix>(pack_one(floats, num_columns));
  }

  std::vector<gguf_twin::Rows> rows;
  std::unique_ptr<PackedMatrix> packed, plain;
};

// x normed, a product of it, its gated product, and one of that: all ways to round x.
struct Case {
  Case(int num_threads, const char* set, Activations activations, const Stack& qkv, const Stack& gate_up,
       const Stack& down, bool is_plain = false)
      : team(num_threads), program(team, kTokens, 1, set, activations) {
    const auto segments = [&](const Stack& stack) {
      return (is_plain ? stack.plain : stack.packed)->segments();
    };
    Random random(1);
    for (int64_t i = 0; i < kTokens * kHidden; ++i)
      arena[static_cast<size_t>(x.offset + i)] = random.uniform(3.0f);
    program.rms_norm(x, {norm.data(), {kHidden}}, 1e-5f, normed);
    program.linear(normed, segments(qkv), projected);
    program.linear_swiglu(normed, segments(gate_up), inner);
    program.linear(inner, segments(down), last);
  }

  View next(int64_t width) {
    const int64_t offset = used;
    used += kTokens * round_up(width);
    return {arena.data(),   static_cast<int64_t>(arena.size()), offset, round_up(width), width,
            Extent::kTokens};
  }
  Matrix read(const View& view, int64_t num_rows) const {
    Matrix out(num_rows, view.width);
    for (int64_t t = 0; t < num_rows; ++t)
      for (int64_t k = 0; k < view.width; ++k)
        out.at(t, k) = arena[static_cast<size_t>(view.offset + t * view.row_stride + k)];
    return out;
  }

  std::vector<float> arena = std::vector<float>(kTokens * 4096, kNaN);
  int64_t used = 0;
  Team team;
  Program program;
  std::vector<float> norm = random_floats(kHidden, 2);
  View x = next(kHidden), normed = next(kHidden), projected = next(16 * 9 + 5), inner = next(kHidden),
       last = next(kHidden);
};

const Stack& mixed() {
  static const Stack stack(
      {{Kind::kQ4_K, 64}, {Kind::kQ6_K, 48}, {Kind::kF16, 16}, {Kind::kQ5_0, 16}, {Kind::kQ4_1, 5}}, kHidden);
  return stack;
}
const Stack& gated() {
  static const Stack stack({{Kind::kQ4_1, 2 * kHidden}}, kHidden);
  return stack;
}
const Stack& narrowing() {
  static const Stack stack({{Kind::kQ6_K, kHidden}}, kHidden);
  return stack;
}

void test_a_stack_of_formats_has_the_bits_of_float32(const Kernels& set) {
  Case kept(1, set.name, Activations::kFloat32, mixed(), gated(), narrowing());
  Case plain(1, set.name, Activations::kFloat32, mixed(), gated(), narrowing(), true);
  for (const int64_t tokens : {int64_t{1}, int64_t{9}, kTokens}) {
    kept.program.run({tokens, 1, 0});
    plain.program.run({tokens, 1, 0});
    for (View Case::* view : {&Case::projected, &Case::inner, &Case::last})
      CHECK(kept.read(kept.*view, tokens).same(plain.read(plain.*view, tokens)), "%s: %ld tokens", set.name,
            long{tokens});
  }
}

// Rows rounded as int8.h says.
struct Rounded {
  Rounded(const Kernels& set, Matrix& x, int offset)
      : quants(static_cast<size_t>(x.num_rows * x.width) / 64 + 1),
        scales(groups(x)),
        sums(groups(x)),
        biases(2 * groups(x)),
        rows{reinterpret_cast<int8_t*>(quants.data()), scales.data(), sums.data(), biases.data(), x.width} {
    set.int8->quantise(x.rows(), offset, 0, x.num_rows, rows);
  }
  static size_t groups(const Matrix& x) { return static_cast<size_t>(x.num_rows * x.width / kGroup); }

  struct alignas(64) Line {
    int8_t bytes[64];
  };
  std::vector<Line> quants;
  std::vector<float> scales, sums;
  std::vector<int32_t> biases;
  Int8Rows rows;
};

// What the kernels give when they are called one by one.
Matrix multiply_by_hand(const Kernels& set, Matrix x, const PackedMatrix& weight, bool is_swiglu) {
  Matrix out(x.num_rows, weight.num_rows() / (is_swiglu ? 2 : 1));
  const int num_rows = static_cast<int>(x.num_rows);
  int64_t column = 0;
  for (const Panels& w : weight.segments()) {
    Rows to = out.rows();
    to.data += column;
    column += w.num_rows;
    const int64_t last = w.num_panels() / (is_swiglu ? 2 : 1);
    if (!is_quantised(w.format)) {
      set.linear(x.rows(), num_rows, w, 0, last, to);
      continue;
    }
    const Rounded rounded(set, x, w.offset);
    const auto& kernels = is_swiglu ? set.int8->linear_swiglu : set.int8->linear;
    kernels[static_cast<int>(w.format)](rounded.rows, num_rows, w, 0, last, to);
  }
  return out;
}

void test_int8_is_what_kernels_give_by_hand(const Kernels& set) {
  for (int num_threads = 1; num_threads <= 3; ++num_threads) {
    Case step(num_threads, set.name, Activations::kInt8, mixed(), gated(), narrowing());
    for (const int64_t tokens : {int64_t{1}, int64_t{2}, int64_t{17}, kTokens}) {
      step.program.run({tokens, 1, 0});
      const Matrix normed = step.read(step.normed, tokens), inner = step.read(step.inner, tokens);
      const auto same = [&](const View& view, const Matrix& expected, const char* name) {
        CHECK(step.read(view, tokens).same(expected), "%s %s: %ld tokens, %d threads", set.name, name,
              long{tokens}, num_threads);
      };
      same(step.projected, multiply_by_hand(set, normed, *mixed().packed, false), "qkv");
      same(step.inner, multiply_by_hand(set, normed, *gated().packed, true), "gate and up");
      same(step.last, multiply_by_hand(set, inner, *narrowing().packed, false), "down");
    }
  }
}

// As multiply_by_hand, in bfloat16, of all formats alike.
Matrix multiply_bfloats_by_hand(const Kernels& set, Matrix x, const PackedMatrix& weight, bool is_swiglu) {
  Matrix out(x.num_rows, weight.num_rows() / (is_swiglu ? 2 : 1));
  BFloats rounded = round_rows(set, x);
  int64_t column = 0;
  for (const Panels& w : weight.segments()) {
    Rows to = out.rows();
    to.data += column;
    column += w.num_rows;
    const auto num_rows = static_cast<int>(x.num_rows);
    if (is_swiglu)
      set.bfloat16->linear_swiglu(rounded.rows(), num_rows, w, 0, w.num_panels() / 2, to, nullptr);
    else
      set.bfloat16->linear(rounded.rows(), num_rows, w, 0, w.num_panels(), to);
  }
  return out;
}

void test_bfloat16_is_what_kernels_give_by_hand(const Kernels& set) {
  for (int num_threads = 1; num_threads <= 3; ++num_threads) {
    Case step(num_threads, set.name, Activations::kBFloat16, mixed(), gated(), narrowing());
    for (const int64_t tokens : {kTokens, int64_t{1}, int64_t{2}, int64_t{17}}) {
      step.program.run({tokens, 1, 0});
      const Matrix normed = step.read(step.normed, tokens), inner = step.read(step.inner, tokens);
      const auto same = [&](const View& view, const Matrix& expected, const char* name) {
        CHECK(step.read(view, tokens).same(expected), "%s %s: %ld tokens, %d threads", set.name, name,
              long{tokens}, num_threads);
      };
      same(step.projected, multiply_bfloats_by_hand(set, normed, *mixed().packed, false), "qkv");
      same(step.inner, multiply_bfloats_by_hand(set, normed, *gated().packed, true), "gate and up");
      same(step.last, multiply_bfloats_by_hand(set, inner, *narrowing().packed, false), "down");
    }
  }
}

// A product rounds its own result where the next one takes it: into the scratch that it doesn't read,
// whatever was in there; a second one that takes it, and one of half tiles, have it rounded as ever.
void test_bfloat16_is_rounded_on_the_way(const Kernels& set) {
  const Stack narrow({{Kind::kF32, 2 * 48}}, kHidden), wide({{Kind::kF32, 2 * kHidden}}, 48);
  for (int num_threads = 1; num_threads <= 2; ++num_threads) {
    Case step(num_threads, set.name, Activations::kBFloat16, mixed(), gated(), narrowing());
    const View a = step.next(kHidden), b = step.next(48), c = step.next(kHidden), d = step.next(kHidden),
               e = step.next(kHidden);
    step.program.linear_swiglu(step.inner, gated().packed->segments(), a);
    step.program.linear_swiglu(a, narrow.packed->segments(), b);
    step.program.linear_swiglu(b, wide.packed->segments(), c);
    step.program.linear(c, narrowing().packed->segments(), d);
    step.program.linear(c, narrowing().packed->segments(), e);
    for (const int64_t tokens : {kTokens, int64_t{1}, int64_t{19}}) {
      step.program.run({tokens, 1, 0});
      const auto same = [&](const View& view, const View& from, const Stack& weight, bool is_swiglu) {
        const Matrix expected =
            multiply_bfloats_by_hand(set, step.read(from, tokens), *weight.packed, is_swiglu);
        CHECK(step.read(view, tokens).same(expected), "%s: %ld tokens, %d threads, width %ld", set.name,
              long{tokens}, num_threads, long{view.width});
      };
      same(a, step.inner, gated(), true);
      same(b, a, narrow, true);
      same(c, b, wide, true);
      same(d, c, narrowing(), false);
      same(e, c, narrowing(), false);
    }
  }
}

// Far enough from float32 that rounding took place, near enough that it is rounding.
void test_rounded_is_near_float32(Activations activations) {
  Case rounded(1, nullptr, activations, mixed(), gated(), narrowing());
  Case exact(1, nullptr, Activations::kFloat32, mixed(), gated(), narrowing());
  rounded.program.run({8, 1, 0});
  exact.program.run({8, 1, 0});
  const Matrix a = rounded.read(rounded.projected, 8), b = exact.read(exact.projected, 8);
  double error = 0, size = 0;
  for (int64_t t = 0; t < 8; ++t)
    for (int64_t n = 0; n < a.width; ++n) {
      error += std::pow(a.at(t, n) - b.at(t, n), 2);
      size += std::pow(b.at(t, n), 2);
    }
  CHECK(error > 0 && std::sqrt(error / size) < 0.02, "%g", std::sqrt(error / size));
}

// Rounding in front of a product belongs to it, whether in a launch of its own or in the one before.
void test_launches_are_those_added() {
  for (const Activations activations : {Activations::kFloat32, Activations::kInt8, Activations::kBFloat16}) {
    Case step(2, nullptr, activations, mixed(), gated(), narrowing());
    const int64_t total = step.program.run({kTokens, 1, 0});
    const std::vector<int64_t> each = step.program.launch_ns();
    CHECK(step.program.num_launches() == 4 && each.size() == 4, "%zu launches", each.size());
    int64_t sum = 0;
    for (const int64_t ns : each) sum += ns;
    CHECK(std::llabs(sum - total) <= 8, "%ld and %ld ns", long{sum}, long{total});
    CHECK(step.program.activations() == activations, "activations");
  }
}

void test_refusals() {
  Case step(1, nullptr, Activations::kInt8, mixed(), gated(), narrowing());
  const auto refuse = [](const char* start, auto&& add) {
    try {
      add();
      CHECK(false, "%s was not refused", start);
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(start) == 0, "%s", error.what());
    }
  };
  const size_t before = step.program.num_launches();
  const Stack halves({{Kind::kQ4_1, kHidden}, {Kind::kQ4_0, kHidden}}, kHidden);
  refuse("linear_swiglu: weight: gate and up must have one format",
         [&] { step.program.linear_swiglu(step.normed, halves.packed->segments(), step.last); });
  refuse("linear: x: width 149, must be 256",
         [&] { step.program.linear(step.projected, gated().packed->segments(), step.last); });
  refuse("linear: out: overlaps x",
         [&] { step.program.linear(step.normed, narrowing().packed->segments(), step.normed); });
  refuse("linear: weight: has no rows", [&] { step.program.linear(step.normed, {}, step.last); });
  const std::vector<int32_t> ids(kTokens);
  refuse("embedding: weight: must have one format",
         [&] { step.program.embedding(halves.packed->segments(), {ids.data(), {kTokens}}, step.x); });
  CHECK(step.program.num_launches() == before, "a refused launch was added");
}

}  // namespace

int main() {
  for (const Kernels* set : sets_of_this_machine()) {
    test_a_stack_of_formats_has_the_bits_of_float32(*set);
    test_int8_is_what_kernels_give_by_hand(*set);
    test_bfloat16_is_what_kernels_give_by_hand(*set);
    test_bfloat16_is_rounded_on_the_way(*set);
  }
  test_rounded_is_near_float32(Activations::kInt8);
  test_rounded_is_near_float32(Activations::kBFloat16);
  test_launches_are_those_added();
  test_refusals();
  return report();
}
