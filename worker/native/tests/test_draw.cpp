// Draws: each set's kernels, rows beside their slow twin, and samplers in any company and number of threads.
#include <cstring>
#include <string>

#include "../src/kernels.h"
#include "../src/sampler.h"
#include "check.h"
#include "draw_twin.h"
#include "sets.h"

namespace {

using namespace pagecast;

constexpr float kInf = std::numeric_limits<float>::infinity();

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void test_numbers_are_pinned() {
  // Those of worker/sampling.py: sessions outlive releases.
  CHECK(draw_uniform(1, 0) == 0.3035680343067586, "%.17g", draw_uniform(1, 0));
  CHECK(draw_uniform(0, 0) == 0.011546754286331562, "%.17g", draw_uniform(0, 0));
}

void test_scans() {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (const Kernels* set : sets_of_this_machine()) {
    for (const int count : {1, 2, 15, 16, 17, 255, 256, 257, 2047, 2048, 2049, 5003}) {
      std::vector<float> logits(static_cast<size_t>(count));
      for (float& logit : logits) logit = std::round(normal(random) * 4.0f);
      std::vector<float> maxima(static_cast<size_t>(count + kDrawSpan), NAN);
      LogitScan found;
      const auto scan = [&] { set->draw->scan(logits.data(), count, maxima.data(), &found); };
      scan();
      const auto largest = std::max_element(logits.begin(), logits.end());
      CHECK(found.all_finite && found.largest == *largest, "%s, %d", set->name, count);
      CHECK(found.first_span == (largest - logits.begin()) / kDrawSpan, "%s, %d", set->name, count);
      for (int i = 0; i < (count + kDrawSpan - 1) / kDrawSpan * kLanes; ++i) {
        float most = -kInf;
        const int first = i / kLanes * kDrawSpan;
        for (int at = first + i % kLanes; at < std::min(first + kDrawSpan, count); at += kLanes)
          most = std::max(most, logits[static_cast<size_t>(at)]);
        CHECK(maxima[static_cast<size_t>(i)] == most, "%s, %d: maxima[%d]", set->name, count, i);
      }
      for (const float broken : {kInf, -kInf, NAN}) {
        const size_t at = random() % logits.size();
        const float was = logits[at];
        logits[at] = broken;
        scan();
        CHECK(!found.all_finite, "%s, %d: %f at %zu", set->name, count, broken, at);
        logits[at] = was;
      }
    }
  }
}

void test_weights() {
  std::mt19937_64 random(4);
  std::uniform_real_distribution<float> uniform(-720.0f, 0.0f);
  for (const Kernels* set : sets_of_this_machine()) {
    for (const int count : {1, 7, 16, 255, 256}) {
      std::vector<float> logits(static_cast<size_t>(count));
      for (float& logit : logits) logit = random() % 4 == 0 ? uniform(random) : uniform(random) / 40.0f;
      logits[0] = random() % 2 == 0 ? 0.0f : -kInf;
      double weights[kDrawSpan];
      std::fill_n(weights, kDrawSpan, 7.0);
      const double scale = count % 2 == 0 ? 1.0 : 1.0 / 0.7;
      const double sum = set->draw->weigh(logits.data(), count, 0.0, scale, weights);
      double expected_sum = 0.0;
      for (int i = 0; i < count; ++i) {
        const double y = static_cast<double>(logits[static_cast<size_t>(i)]) * scale;
        const double expected = y < -708.0 ? 0.0 : std::exp(y);
        expected_sum += expected;
        CHECK(std::abs(weights[i] - expected) <= 3e-16 * expected, "%s: exp(%.17g): %.17g", set->name, y,
              weights[i]);
        if (y == 0.0) CHECK(weights[i] == 1.0, "%s: exp(0) is %.17g", set->name, weights[i]);
      }
      for (int64_t i = count; i < round_up(count); ++i) CHECK(weights[i] == 0.0, "%s", set->name);
      CHECK(std::abs(sum - expected_sum) <= 1e-14 * expected_sum, "%s: sum %.17g", set->name, sum);
    }
  }
}

void test_rows_beside_their_twin() {
  std::mt19937_64 random(5);
  DrawScratch scratch;
  int kinds[3] = {};
  for (int round = 0; round < 1500; ++round) {
    const int sizes[] = {1, 2, 7, 40, 129, 1000, 3000};
    const DrawCase given = random_draw(random, sizes[round % 7]);
    const auto vocab_size = static_cast<int64_t>(given.logits.size());
    const DrawnToken expected = draw_twin(given);
    scratch.reserve(vocab_size, given.draw.num_entries, has_filters(given.draw, vocab_size));
    float first = 0.0f;
    for (const Kernels* set : sets_of_this_machine()) {
      std::vector<float> logits = given.logits;
      logits.push_back(kInf);  // padding, that nobody reads
      const DrawnToken drawn =
          draw_row(*set->draw, logits.data(), vocab_size, given.draw, given.entries.data(), scratch);
      CHECK(drawn.id == expected.id, "%s, round %d: %d, not %d", set->name, round, drawn.id, expected.id);
      CHECK(std::isnan(drawn.logprob) == std::isnan(expected.logprob) &&
                !(std::abs(drawn.logprob - expected.logprob) > 1e-5f + 1e-6f * std::abs(expected.logprob)),
            "%s, round %d: logprob %g, not %g", set->name, round, drawn.logprob, expected.logprob);
      CHECK(std::memcmp(logits.data(), given.logits.data(), given.logits.size() * sizeof(float)) == 0,
            "%s, round %d: logits were changed", set->name, round);
      if (!set->fused) continue;
      if (set == sets_of_this_machine().front()) first = drawn.logprob;
      CHECK(same_bits(drawn.logprob, first) || std::isnan(first), "%s, round %d: other bits", set->name,
            round);
    }
    ++kinds[expected.id < 0 ? 0 : has_filters(given.draw, vocab_size) ? 1 : 2];
  }
  CHECK(kinds[0] > 0 && kinds[1] > 400 && kinds[2] > 300, "%d, %d, %d", kinds[0], kinds[1], kinds[2]);
}

// Beyond any sort of a moment: selections by shares over most of a flat row, and rows that tie throughout.
void test_wide_rows() {
  std::mt19937_64 random(6);
  DrawScratch scratch;
  const int vocab_size = 49152;
  scratch.reserve(vocab_size, 0, true);
  for (const double top_p : {0.2, 0.9, 0.999, 1.0 - 0x1p-53}) {
    for (const float spread : {0.0f, 0.01f, 1.0f, 4.0f}) {
      for (const int32_t top_k : {0, 5000, 40000}) {
        DrawCase given = random_draw(random, vocab_size);
        std::normal_distribution<float> normal(0.0f, 1.0f);
        for (float& logit : given.logits) logit = spread * normal(random);
        given.entries.clear();
        given.draw.num_entries = 0;
        given.draw.flags = kDraws;
        given.draw.top_p = top_p;
        given.draw.top_k = top_k;
        const DrawnToken drawn =
            draw_row(*kernels_for().draw, given.logits.data(), vocab_size, given.draw, nullptr, scratch);
        CHECK(drawn.id == draw_twin(given).id, "top_p %g, spread %g, top_k %d", top_p, spread, top_k);
      }
    }
  }
}

void test_overflow_and_bans() {
  DrawScratch scratch;
  scratch.reserve(4, 4, true);
  float logits[4] = {3.4e38f, -3.4e38f, 3.3e38f, 0.0f};
  DrawWords draw{};
  draw.flags = kDraws;
  draw.temperature = 1.0f;
  draw.top_p = 0.9;
  draw.repetition = 1e-3;
  draw.num_entries = 1;
  const DrawEntry in_log{0, 1, 0.0};
  CHECK(draw_row(*kernels_for().draw, logits, 4, draw, &in_log, scratch).id == 0, "beyond float32");
  const double ban = -std::numeric_limits<double>::infinity();
  const DrawEntry bans[4] = {{0, 0, ban}, {1, 0, ban}, {2, 0, ban}, {3, 0, ban}};
  draw.num_entries = 3;
  CHECK(draw_row(*kernels_for().draw, logits, 4, draw, bans, scratch).id == 3, "one is left");
  draw.num_entries = 4;
  for (const int32_t flags : {kDraws, kDraws | kGreedy, kDraws | kWantsLogprob}) {
    draw.flags = flags;
    const DrawnToken drawn = draw_row(*kernels_for().draw, logits, 4, draw, bans, scratch);
    CHECK(drawn.id == -1 && std::isnan(drawn.logprob), "all are banned: %d", drawn.id);
  }
  CHECK(logits[0] == 3.4e38f && logits[3] == 0.0f, "put back");
}

// Rows of a step, as a sampler has them.
struct Step {
  explicit Step(int num_rows, int vocab_size, uint64_t seed) : stride(round_up(vocab_size) + 16) {
    std::mt19937_64 random(seed);
    for (int row = 0; row < num_rows; ++row) {
      DrawCase given = random_draw(random, vocab_size);
      given.draw.first_entry = static_cast<int32_t>(entries.size());
      entries.insert(entries.end(), given.entries.begin(), given.entries.end());
      given.logits.resize(static_cast<size_t>(stride), NAN);
      logits.insert(logits.end(), given.logits.begin(), given.logits.end());
      draws.push_back(given.draw);
    }
    memory = {logits.data(), stride, num_rows, vocab_size, draws.data(), nullptr, nullptr};
    ids.assign(draws.size(), -9);
    logprobs.assign(draws.size(), 9.0f);
    memory.ids = ids.data();
    memory.logprobs = logprobs.data();
  }
  void draw(Sampler& sampler, int64_t num_rows) {
    sampler.draw(num_rows, entries.data(), static_cast<int64_t>(entries.size()));
  }
  int64_t stride;
  std::vector<float> logits;
  std::vector<DrawWords> draws;
  std::vector<DrawEntry> entries;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  SamplerMemory memory;
};

void test_company_and_threads_change_nothing() {
  Team one(1);
  for (const int vocab_size : {100, 20000}) {
    Step alone(9, vocab_size, 7);
    alone.draws[4].flags = 0;
    for (size_t row = 0; row < 9; ++row) {
      SamplerMemory memory = alone.memory;
      memory.logits += static_cast<int64_t>(row) * alone.stride;
      memory.num_rows = 1;
      memory.draws += row;
      memory.ids += row;
      memory.logprobs += row;
      Sampler sampler(one, memory, nullptr);
      alone.draw(sampler, 1);
    }
    CHECK(alone.ids[4] == -1 && std::isnan(alone.logprobs[4]), "a row without flags: %d", alone.ids[4]);
    for (const int num_threads : {1, 2, 3}) {
      Team team(num_threads);
      Step step(9, vocab_size, 7);
      step.draws[4].flags = 0;
      Sampler sampler(team, step.memory, nullptr);
      for (int round = 0; round < 20; ++round) {
        std::fill(step.ids.begin(), step.ids.end(), -9);
        const int64_t num_rows = round == 0 ? 9 : 1 + round % 9;
        step.draw(sampler, num_rows);
        for (size_t row = 0; row < 9; ++row) {
          const bool is_drawn = static_cast<int64_t>(row) < num_rows;
          CHECK(step.ids[row] == (is_drawn ? alone.ids[row] : -9), "%d threads, row %zu: %d", num_threads,
                row, step.ids[row]);
          CHECK(same_bits(step.logprobs[row], alone.logprobs[row]) || std::isnan(alone.logprobs[row]),
                "%d threads, row %zu", num_threads, row);
        }
      }
    }
  }
}

template <typename Act>
std::string refusal(Act&& act) {
  try {
    act();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void test_refusals_draw_nothing() {
  Team team(2);
  Step step(3, 50, 8);
  const auto make = [&](auto&& change) {
    SamplerMemory memory = step.memory;
    change(memory);
    return refusal([&] { Sampler(team, memory, nullptr); });
  };
  CHECK(make([](auto& memory) { memory.num_rows = 0; }).rfind("num_rows: 0", 0) == 0, "num_rows");
  CHECK(make([](auto& memory) { memory.vocab_size = 0; }).rfind("vocab_size: 0", 0) == 0, "vocab_size");
  CHECK(make([](auto& memory) { memory.row_stride = 49; }).rfind("logits: ", 0) == 0, "row_stride");
  Sampler sampler(team, step.memory, nullptr);
  CHECK(refusal([&] { step.draw(sampler, 4); }).rfind("num_rows: 4", 0) == 0, "num_rows");
  const DrawWords good = step.draws[2];
  const auto draw = [&](auto&& change) {
    step.draws[2] = good;
    step.draws[2].flags = kDraws;
    change(step.draws[2]);
    const std::string told = refusal([&] { step.draw(sampler, 3); });
    CHECK(told.rfind("draws[2]: ", 0) == 0 || told.rfind("entries[", 0) == 0, "told \"%s\"", told.c_str());
    for (const int32_t id : step.ids) CHECK(id == -9, "drew %d", id);
  };
  draw([](DrawWords& words) { words.flags = 8; });
  draw([](DrawWords& words) { words.first_entry = -1; });
  draw([](DrawWords& words) { words.num_entries = 1 << 30; });
  draw([](DrawWords& words) { words.position = -1; });
  draw([](DrawWords& words) { words.top_k = -1; });
  for (const float wrong : {0.0f, NAN, kInf}) draw([&](DrawWords& words) { words.temperature = wrong; });
  for (const float wrong : {-0.1f, 1.1f, NAN}) draw([&](DrawWords& words) { words.min_p = wrong; });
  for (const double wrong : {0.0, 1.1, static_cast<double>(NAN)})
    draw([&](DrawWords& words) { words.top_p = wrong; });
  draw([](DrawWords& words) { words.repetition = 0.0; });
  step.entries.push_back({-1, 0, 0.0});
  const auto last = static_cast<int32_t>(step.entries.size()) - 1;
  const auto use_last = [&](DrawWords& words) { words.first_entry = last, words.num_entries = 1; };
  draw(use_last);
  step.entries.back() = {1, 0, static_cast<double>(kInf)};
  draw(use_last);
  team.close();
  step.draws[2] = good;
  CHECK(refusal([&] { step.draw(sampler, 3); }).find("closed") != std::string::npos, "a closed team");
}

}  // namespace

int main() {
  test_numbers_are_pinned();
  test_scans();
  test_weights();
  test_rows_beside_their_twin();
  test_wide_rows();
  test_overflow_and_bans();
  test_company_and_threads_change_nothing();
  test_refusals_draw_nothing();
  return report();
}
