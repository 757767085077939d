// A program of every launch: each result against its twin, equal bits for any team and cut, times, teams that
// are shared.
#include <numeric>
#include <stdexcept>

#include "check.h"
#include "program_case.h"
#include "sets.h"

namespace {

using namespace pagecast;
using namespace program_case;

void check_linear(const Step& step, const View& from, const TestWeight& weight, const View& to,
                  const char* name) {
  const Matrix x = step.read(from), out = step.read(to);
  for (int64_t t = 0; t < out.num_rows; ++t)
    for (int64_t n = 0; n < out.width; ++n) {
      const Sum sum = dot_twin(x, t, weight, n);
      if (std::fabs(out.at(t, n) - sum.value) <= sum.tolerance) continue;
      CHECK(false, "%s: row %d, column %d: %g, not %g", name, static_cast<int>(t), static_cast<int>(n),
            out.at(t, n), sum.value);
      return;
    }
}

void check_norm(const Step& step, const View& from, const View& to) {
  const Matrix x = step.read(from), out = step.read(to);
  for (int64_t t = 0; t < out.num_rows; ++t) {
    const std::vector<double> twin = rms_norm_twin(x, t, step.norm.data(), kEps);
    for (int64_t k = 0; k < out.width; ++k)
      CHECK(close(out.at(t, k), twin[static_cast<size_t>(k)], 2e-6, 1e-9), "row %d", static_cast<int>(t));
  }
}

void check_results(Step& step) {
  const Matrix x = step.read(step.x), projected = step.read(step.projected), summed = step.read(step.summed);
  const Matrix both = step.read(step.both), inner = step.read(step.inner);
  const Matrix q = step.read(Step::columns(step.qkv, 0, kQ)), turned = step.read(step.turned);
  for (int64_t t = 0; t < x.num_rows; ++t) {
    for (int64_t k = 0; k < kHidden; ++k) {
      CHECK(x.at(t, k) == step.vocab.at(step.ids[static_cast<size_t>(t)], k), "embedding");
      CHECK(summed.at(t, k) == x.at(t, k) + projected.at(t, k), "sum");
    }
    for (int64_t k = 0; k < kInner; ++k)
      CHECK(close(inner.at(t, k), silu_twin(both.at(t, k)) * both.at(t, kInner + k), 2e-6, 1e-12), "swiglu");
    const std::vector<float> twin =
        rope_twin(q, t, kHeadSize, step.position[static_cast<size_t>(t)], step.cos, step.sin);
    for (int64_t k = 0; k < kQ; ++k) CHECK(turned.at(t, k) == twin[static_cast<size_t>(k)], "rope");
  }
  CHECK(step.read(step.summed_apart).same(summed), "add is not add_rms_norm's sum");
  CHECK(step.read(step.turned_apart).same(step.read(step.turned)), "rope is not rope_store's");
  CHECK(step.read(step.inner_apart).same(inner), "linear_swiglu is not linear and swiglu");
  check_norm(step, step.x, step.normed);
  check_norm(step, step.summed, step.normed_again);
  check_linear(step, step.normed, step.qkv_weight, step.qkv, "qkv");
  check_linear(step, step.attended, step.out_weight, step.projected, "out");
  check_linear(step, step.inner, step.down, step.last, "down");
  check_linear(step, step.chosen, step.vocab, step.logits, "logits");
  const Matrix last = step.read(step.last), chosen = step.read(step.chosen);
  for (int64_t l = 0; l < chosen.num_rows; ++l)
    CHECK(chosen.same_row(l, last, step.wanted[static_cast<size_t>(l)]), "select_rows");
}

struct Shape {
  std::vector<int> lengths, contexts;
};

// A prefill, then decode with rows that come, go and idle.
const std::vector<Shape> kSteps = {{{20, 3, 0, 16}, {20, 3, 0, 16}},
                                   {{1}, {21}},
                                   {{1, 1, 0, 1, 9}, {22, 4, 0, 17, 9}},
                                   {{0, 12, 0, 1}, {0, 16, 0, 18}}};

void test_every_launch() {
  for (const Kernels* set : sets_of_this_machine()) {
    Step alone(1, set->name);
    std::vector<Matrix> expected;
    for (const Shape& shape : kSteps) {
      alone.bind(shape.lengths, shape.contexts);
      alone.run();
      check_results(alone);
      expected.push_back(alone.read(alone.logits));
    }
    for (int num_threads = 2; num_threads <= 8; num_threads += num_threads == 4 ? 4 : 1) {
      Step shared(num_threads, set->name);
      for (size_t i = 0; i < kSteps.size(); ++i) {
        shared.bind(kSteps[i].lengths, kSteps[i].contexts);
        shared.run();
        CHECK(shared.read(shared.logits).same(expected[i]), "%s, %d threads, step %zu", set->name,
              num_threads, i);
      }
    }
  }
}

void test_times() {
  Step step(2, nullptr);
  step.bind(kSteps[0].lengths, kSteps[0].contexts);
  const int64_t total = step.run();
  const std::vector<int64_t> each = step.program.launch_ns();
  CHECK(each.size() == 16 && step.program.num_launches() == 16, "%zu launches", each.size());
  const int64_t sum = std::accumulate(each.begin(), each.end(), int64_t{0});
  CHECK(std::llabs(sum - total) <= 16, "%lld and %lld ns", static_cast<long long>(sum),
        static_cast<long long>(total));
  for (const int64_t ns : each) CHECK(ns > 0, "a launch took no time");
  step.bind({0}, {0});
  CHECK(step.run() < sum, "times of an earlier run");
}

// Programs take turns with one team and go away right after a run.
void test_programs_share_a_team() {
  Team team(4);
  std::vector<float> arena(3 * 512 * 64, 1.0f);
  const auto size = static_cast<int64_t>(arena.size());
  const auto part = [&](int64_t i) {
    return View{arena.data(), size, i * 512 * 64, 64, 64, Extent::kTokens};
  };
  for (int i = 0; i < 200; ++i) {
    Program program(team, 512, 1, nullptr);
    program.add(part(0), part(1), part(2));
    program.run({512, 1, 0});
  }
  CHECK(arena.back() == 2.0f && arena[2 * 512 * 64] == 2.0f, "%g", arena.back());
  team.close();
  Program program(team, 512, 1, nullptr);
  program.add(part(0), part(1), part(2));
  bool refused = false;
  try {
    program.run({512, 1, 0});
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused, "a closed team ran a program");
}

}  // namespace

int main() {
  test_every_launch();
  test_times();
  test_programs_share_a_team();
  return report();
}
