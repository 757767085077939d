// A row's draw but for filters: entries, the greedy token, the draw from all of the vocabulary, logprobs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "draw.h"

namespace pagecast {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr float kMost = std::numeric_limits<float>::max();

int64_t num_spans(int64_t count) { return (count + kDrawSpan - 1) / kDrawSpan; }

int span_size(int64_t span, int64_t count) {
  return static_cast<int>(std::min<int64_t>(kDrawSpan, count - span * kDrawSpan));
}

float changed(float logit, const DrawWords& draw, const DrawEntry& entry) {
  double value = static_cast<double>(logit);
  if (entry.in_log != 0) value = value > 0.0 ? value / draw.repetition : value * draw.repetition;
  value += entry.offset;
  if (std::isinf(entry.offset)) return static_cast<float>(value);
  return static_cast<float>(std::clamp<double>(value, -kMost, kMost));
}

// The lowest id of the largest logit.
int32_t first_largest(const float* logits, int64_t count, const LogitScan& found) {
  const int64_t first = found.first_span * kDrawSpan;
  int64_t id = first;
  while (id + 1 < std::min(first + kDrawSpan, count) && logits[id] != found.largest) ++id;
  return static_cast<int32_t>(id);
}

int32_t draw_from_all(const DrawKernels& kernels, const float* logits, int64_t count, double scale,
                      const LogitScan& found, double at, DrawScratch& scratch) {
  const double total = weigh_spans(kernels, logits, count, found.largest, scale, scratch);
  const double target = at * total;
  // The product may round up to the total, beyond every span's share: the last that has one is drawn from.
  int64_t drawn = 0;
  double share = 0.0;
  double before = 0.0;
  for (int64_t span = 0; span < num_spans(count); ++span) {
    const double of_span = scratch.sums[static_cast<size_t>(span)];
    if (of_span > 0.0) {
      drawn = span;
      before = share;
    }
    share += of_span;
    if (share > target) break;
  }
  double weights[kDrawSpan];
  const int size = span_size(drawn, count);
  kernels.weigh(logits + drawn * kDrawSpan, size, found.largest, scale, weights);
  int last = 0;
  for (int i = 0; i < size; ++i) {
    if (weights[i] > 0.0) last = i;
    before += weights[i];
    if (before > target) break;
  }
  return static_cast<int32_t>(drawn * kDrawSpan + last);
}

int32_t pick(const DrawKernels& kernels, const float* logits, int64_t count, const DrawWords& draw,
             const LogitScan& found, DrawScratch& scratch) {
  if (!(found.largest >= -kMost)) return -1;  // all are banned
  if ((draw.flags & kGreedy) != 0) return first_largest(logits, count, found);
  const double at = draw_uniform(draw.seed, draw.position);
  if (has_filters(draw, count)) return draw_filtered(kernels, logits, count, draw, found, at, scratch);
  return draw_from_all(kernels, logits, count, 1.0 / static_cast<double>(draw.temperature), found, at,
                       scratch);
}

}  // namespace

void DrawScratch::reserve(int64_t vocab_size, int64_t num_entries, bool has_filters) {
  const auto grow = [](auto& room, int64_t size) {
    if (room.size() < static_cast<size_t>(size)) room.resize(static_cast<size_t>(size));
  };
  grow(maxima, num_spans(vocab_size) * kLanes);
  grow(sums, num_spans(vocab_size));
  grow(saved, num_entries);
  if (!has_filters) return;
  grow(values, vocab_size);
  grow(ids, vocab_size);
  grow(weights, round_up(vocab_size));
  grow(order, vocab_size);
}

double weigh_spans(const DrawKernels& kernels, const float* logits, int64_t count, double largest,
                   double scale, DrawScratch& scratch) {
  double weights[kDrawSpan];
  double total = 0.0;
  for (int64_t span = 0; span < num_spans(count); ++span) {
    const double of_span =
        kernels.weigh(logits + span * kDrawSpan, span_size(span, count), largest, scale, weights);
    scratch.sums[static_cast<size_t>(span)] = of_span;
    total += of_span;
  }
  return total;
}

DrawnToken draw_row(const DrawKernels& kernels, float* logits, int64_t vocab_size, const DrawWords& draw,
                    const DrawEntry* entries, DrawScratch& scratch) {
  DrawnToken drawn{-1, std::numeric_limits<float>::quiet_NaN()};
  LogitScan found;
  kernels.scan(logits, vocab_size, scratch.maxima.data(), &found);
  if (!found.all_finite) return drawn;
  const float largest = found.largest;
  // Kept and put back in opposite orders, so that an id that comes twice ends as it was.
  for (int32_t i = 0; i < draw.num_entries; ++i) {
    if (entries[i].token_id >= vocab_size) continue;
    float& logit = logits[entries[i].token_id];
    scratch.saved[static_cast<size_t>(i)] = logit;
    logit = changed(logit, draw, entries[i]);
  }
  if (draw.num_entries > 0) kernels.scan(logits, vocab_size, scratch.maxima.data(), &found);
  drawn.id = pick(kernels, logits, vocab_size, draw, found, scratch);
  for (int32_t i = draw.num_entries - 1; i >= 0; --i)
    if (entries[i].token_id < vocab_size) logits[entries[i].token_id] = scratch.saved[static_cast<size_t>(i)];
  if (drawn.id >= 0 && (draw.flags & kWantsLogprob) != 0) {
    const double sum = weigh_spans(kernels, logits, vocab_size, largest, 1.0, scratch);
    const double below = static_cast<double>(logits[drawn.id]) - static_cast<double>(largest);
    drawn.logprob = static_cast<float>(below - std::log(sum));
  }
  return drawn;
}

double draw_uniform(uint64_t seed, int64_t position) {
  constexpr uint64_t kFactors[2] = {0xD2E7470EE14C6C93u, 0xCA5A826395121157u};
  uint64_t key[2] = {seed, 0};
  uint64_t counter[4] = {1, 0, static_cast<uint64_t>(position), 0};
  for (int round = 0; round < 10; ++round) {
    const auto product0 = static_cast<Wide>(kFactors[0]) * counter[0];
    const auto product1 = static_cast<Wide>(kFactors[1]) * counter[2];
    counter[0] = static_cast<uint64_t>(product1 >> 64) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint64_t>(product1);
    counter[2] = static_cast<uint64_t>(product0 >> 64) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint64_t>(product0);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return static_cast<double>(counter[0] >> 11) * 0x1.0p-53;
}

}  // namespace pagecast
