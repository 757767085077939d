// A program of every launch: each result against its twin, equal bits for any team and cut, times, teams that
// are shared.
#include <numeric>
#include <stdexcept>

#include "../src/sampler.h"
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

// Rows of logits that a launch writes and a sampler draws from.
struct Draws {
  Draws(Team& team, int64_t num_rows, int64_t vocab)
      : rows(num_rows), width(vocab), program(team, 16, 8, nullptr) {
    const auto part = [&](int64_t i) {
      return View{arena.data(), 3 * 8 * stride, i * 8 * stride, stride, width, Extent::kLogits};
    };
    for (int64_t row = 0; row < 8; ++row) x(row, row * 11 % vocab) = 3.0f;
    program.add(part(0), part(1), part(2));
  }
  float& x(int64_t row, int64_t id) { return arena[static_cast<size_t>(row * stride + id)]; }
  Sizes live() const { return {1, 1, rows}; }
  SamplerMemory memory() {
    return {arena.data() + 16 * stride, stride, 8, width, words.data(), ids.data(), logprobs.data()};
  }
  bool ran() const { return arena[static_cast<size_t>(16 * stride)] == 4.0f; }

  int64_t rows, width, stride = round_up(width);
  std::vector<float> arena = std::vector<float>(static_cast<size_t>(3 * 8 * stride), 1.0f);
  std::vector<DrawWords> words = std::vector<DrawWords>(8, greedy());
  std::vector<int32_t> ids = std::vector<int32_t>(8, -9);
  std::vector<float> logprobs = std::vector<float>(8);
  Program program;

  static DrawWords greedy() {
    DrawWords draw{};
    draw.flags = kDraws | kGreedy;
    draw.temperature = 1.0f;
    draw.top_p = 1.0;
    draw.repetition = 1.0;
    return draw;
  }
};

void test_a_run_draws() {
  for (const int num_threads : {1, 2, 3, 8}) {
    Team team(num_threads);
    // Draws by one thread behind a small launch and behind a shared one; draws that are shared.
    for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{2, 50}, {1, 40'000}, {8, 9'000}, {0, 50}}) {
      Draws step(team, rows, vocab);
      Sampler sampler(team, step.memory(), nullptr);
      for (int run = 0; run < 3; ++run) {
        step.ids.assign(8, -9);
        const Program::Times times = step.program.run_and_draw(step.live(), sampler, rows, nullptr, 0);
        CHECK(times.kernel_ns >= 0 && (rows == 0 || times.draw_ns > 0), "%lld and %lld ns",
              static_cast<long long>(times.kernel_ns), static_cast<long long>(times.draw_ns));
        for (int64_t row = 0; row < 8; ++row) {
          const int64_t expected = row < rows ? row * 11 % vocab : -9;
          CHECK(step.ids[static_cast<size_t>(row)] == expected, "%d threads, row %d of %d: %d", num_threads,
                static_cast<int>(row), static_cast<int>(rows), step.ids[static_cast<size_t>(row)]);
        }
      }
      step.program.run(step.live());  // draws nothing, whatever was drawn before
    }
  }
}

void test_what_can_not_be_drawn_does_not_run() {
  Team team(2), other(2);
  Draws step(team, 8, 9'000);
  Sampler sampler(team, step.memory(), nullptr), stranger(other, step.memory(), nullptr);
  const auto refused = [&](Sampler& by, int64_t num_draws, const Sizes& live) {
    try {
      step.program.run_and_draw(live, by, num_draws, nullptr, 0);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refused(stranger, 8, step.live()), "a sampler of another team");
  CHECK(refused(sampler, 9, step.live()), "more rows than there are");
  CHECK(refused(sampler, 8, {1, 1, 9}), "sizes beyond the capacity");
  step.words[7].position = -1;
  CHECK(refused(sampler, 8, step.live()), "words that can't be");
  CHECK(!step.ran() && step.ids[0] == -9, "something ran");
  step.words[7].position = 0;
  CHECK(!refused(sampler, 8, step.live()) && step.ran() && step.ids[7] == 77, "id %d", step.ids[7]);
}

// What is kept of the last run must not outlive a change of the list or of a row's context.
void test_runs_of_the_same_sizes() {
  Step step(3, nullptr);
  for (const int context : {20, 60, 64, 17, 20}) {
    step.bind({1, 1}, {context, 17});
    step.run();
    Step alone(1, nullptr);
    alone.pool = step.pool;
    alone.bind({1, 1}, {context, 17});
    alone.run();
    CHECK(step.read(step.logits).same(alone.read(alone.logits)), "context %d", context);
  }
  const size_t before = step.program.num_launches();
  step.program.add(step.x, step.projected, step.next(kHidden));
  step.run();
  CHECK(step.program.num_launches() == before + 1 && step.program.launch_ns().size() == before + 1, "%zu",
        step.program.launch_ns().size());
  CHECK(step.program.launch_ns().back() > 0, "what was added did not run");
}

}  // namespace

int main() {
  test_every_launch();
  test_a_run_draws();
  test_what_can_not_be_drawn_does_not_run();
  test_runs_of_the_same_sizes();
  test_times();
  test_programs_share_a_team();
  return report();
}
