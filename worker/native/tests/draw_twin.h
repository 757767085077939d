// A row's draw as draw.h tells it, one candidate after the other, and random rows to draw from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "../src/draw.h"

struct DrawCase {
  std::vector<float> logits;
  pagecast::DrawWords draw;
  std::vector<pagecast::DrawEntry> entries;
};

inline pagecast::DrawnToken draw_twin(const DrawCase& given) {
  using namespace pagecast;
  const DrawWords& draw = given.draw;
  const std::vector<float>& raw = given.logits;
  DrawnToken drawn{-1, std::numeric_limits<float>::quiet_NaN()};
  for (const float logit : raw)
    if (!std::isfinite(logit)) return drawn;
  std::vector<float> logits = raw;
  for (const DrawEntry& entry : given.entries) {
    if (entry.token_id >= static_cast<int64_t>(logits.size())) continue;
    float& logit = logits[static_cast<size_t>(entry.token_id)];
    double value = logit;
    if (entry.in_log != 0) value = value > 0.0 ? value / draw.repetition : value * draw.repetition;
    logit = static_cast<float>(value + entry.offset);
  }
  std::vector<int32_t> ranked(logits.size());
  std::iota(ranked.begin(), ranked.end(), 0);
  const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
  std::stable_sort(ranked.begin(), ranked.end(), [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
  const double largest = logit(ranked[0]);
  if (std::isinf(largest)) return drawn;
  drawn.id = ranked[0];
  if ((draw.flags & kGreedy) == 0) {
    const auto weight = [&](int32_t id) {
      return std::exp((logit(id) - largest) / static_cast<double>(draw.temperature));
    };
    if (draw.top_k > 0 && static_cast<size_t>(draw.top_k) < ranked.size())
      ranked.resize(static_cast<size_t>(draw.top_k));
    if (draw.top_p < 1.0) {
      double total = 0.0;
      for (const int32_t id : ranked) total += weight(id);
      double share = 0.0;
      size_t count = 0;
      while (count < ranked.size() && share < draw.top_p * total) share += weight(ranked[count++]);
      ranked.resize(count);
    }
    std::erase_if(ranked, [&](int32_t id) { return weight(id) < static_cast<double>(draw.min_p); });
    std::sort(ranked.begin(), ranked.end());
    double total = 0.0;
    for (const int32_t id : ranked) total += weight(id);
    const double target = draw_uniform(draw.seed, draw.position) * total;
    double share = 0.0;
    for (const int32_t id : ranked) {
      if (weight(id) > 0.0) drawn.id = id;
      share += weight(id);
      if (share > target) break;
    }
  }
  if ((draw.flags & kWantsLogprob) != 0) {
    const double most = *std::max_element(raw.begin(), raw.end());
    double sum = 0.0;
    for (const float each : raw) sum += std::exp(each - most);
    drawn.logprob = static_cast<float>(raw[static_cast<size_t>(drawn.id)] - most - std::log(sum));
  }
  return drawn;
}

// A row of any kind: rounded ones tie by the hundred; parameters at their ends, the defaults often.
inline DrawCase random_draw(std::mt19937_64& random, int vocab_size) {
  using namespace pagecast;
  const auto choose = [&](std::initializer_list<double> values) {
    return *(values.begin() + random() % values.size());
  };
  const auto below = [&](int64_t limit) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(limit));
  };
  DrawCase made;
  std::normal_distribution<float> normal(0.0f, static_cast<float>(choose({0.0, 0.5, 3.0, 3.0, 40.0})));
  const auto steps = static_cast<float>(choose({0.0, 0.0, 2.0, 4.0}));
  for (int i = 0; i < vocab_size; ++i) {
    const float value = normal(random);
    made.logits.push_back(steps > 0.0f ? std::round(value * steps) / steps : value);
  }
  DrawWords& draw = made.draw;
  draw = {};
  draw.flags = kDraws | (random() % 6 == 0 ? kGreedy : 0) | (random() % 3 == 0 ? kWantsLogprob : 0);
  draw.top_k = static_cast<int32_t>(choose({0, 0, 0, 1, 2, 7, 40, vocab_size / 2 + 1.0, 2147483647.0}));
  draw.position = below(int64_t{1} << 31);
  draw.seed = random();
  draw.temperature = static_cast<float>(choose({2e-4, 0.3, 0.7, 1.0, 1.0, 1.3, 2.0, 100.0}));
  draw.min_p = static_cast<float>(choose({0.0, 0.0, 0.0, 1e-9, 0.02, 0.3, 1.0}));
  draw.top_p = choose({1.0, 1.0, 1e-300, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0 - 0x1p-53});
  if (random() % 3 == 0) {
    draw.top_k = 0;
    draw.min_p = 0.0f;
    draw.top_p = 1.0;
  }
  draw.repetition = choose({1.0, 1.1, 0.5, 2.0});
  draw.inverse_repetition = 1.0 / draw.repetition;
  const int num_entries = random() % 2 == 0 ? 0 : below(20);
  std::vector<int32_t> ids(static_cast<size_t>(vocab_size) + 3);
  std::iota(ids.begin(), ids.end(), 0);
  for (int i = 0; i < num_entries && i < vocab_size; ++i) {
    std::swap(ids[static_cast<size_t>(i)],
              ids[static_cast<size_t>(i) + random() % (ids.size() - static_cast<size_t>(i))]);
    made.entries.push_back({ids[static_cast<size_t>(i)], below(2),
                            choose({0.0, -0.5, 2.0, 8.0, -std::numeric_limits<double>::infinity()})});
  }
  draw.num_entries = static_cast<int32_t>(made.entries.size());
  return made;
}
