// Draws that filters cut: the candidates of a row, found by a threshold that all kept ones reach, ranked as
// far as a filter asks and drawn from in the order of ids.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "draw.h"

namespace pagecast {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
// Ranked at once where so few are left.
constexpr int32_t kSortAtOnce = 32;
// Lanes of spans whose largest are sure to be candidates, try by try.
constexpr int64_t kFewFirst[] = {64, 768};
// Then all that is left is ranked: no row makes a choice of pivots quadratic.
constexpr int kMaxRounds = 64;

// What a draw has come to.
struct Candidates {
  const DrawKernels& kernels;
  const float* logits;
  int64_t vocab_size;
  const DrawWords& draw;
  const LogitScan& found;
  DrawScratch& scratch;
  int32_t count = 0;
  int32_t border = -1;  // place of the last that is kept, as ranked; -1: all are

  double scale() const { return 1.0 / static_cast<double>(draw.temperature); }
  float value(int32_t place) const { return scratch.values[static_cast<size_t>(place)]; }
  double weight(int32_t place) const { return scratch.weights[static_cast<size_t>(place)]; }
  // Places rise with ids.
  bool ranks_before(int32_t a, int32_t b) const {
    return value(a) > value(b) || (value(a) == value(b) && a < b);
  }
  bool is_kept(int32_t place) const { return border < 0 || !ranks_before(border, place); }
};

// No larger than the logit whose weight is `weight` (over 0): what lies below it has a smaller weight,
// however weights are rounded.
float logit_below(const Candidates& candidates, double weight) {
  const double y = std::log(weight) - 1e-6;
  const double logit = candidates.found.largest + y * static_cast<double>(candidates.draw.temperature);
  if (!(logit > -static_cast<double>(std::numeric_limits<float>::max()))) return kNone;
  const auto rounded = static_cast<float>(logit);
  return static_cast<double>(rounded) > logit ? std::nextafter(rounded, kNone) : rounded;
}

// No larger than the count-th largest logit: so many lanes of spans have one that large.
float kth_of_lanes(const Candidates& candidates, int64_t count) {
  const auto lanes = (candidates.vocab_size + kDrawSpan - 1) / kDrawSpan * kLanes;
  auto& values = candidates.scratch.values;
  if (count > lanes || lanes > candidates.vocab_size) return kNone;
  std::copy_n(candidates.scratch.maxima.begin(), lanes, values.begin());
  std::nth_element(values.begin(), values.begin() + (count - 1), values.begin() + lanes,
                   std::greater<float>());
  return values[static_cast<size_t>(count - 1)];
}

// Candidates become all logits from `threshold` on, and get their weights.
void collect(Candidates& candidates, float threshold) {
  DrawScratch& scratch = candidates.scratch;
  int32_t count = 0;
  for (int64_t first = 0; first < candidates.vocab_size; first += kDrawSpan) {
    const float* maxima = scratch.maxima.data() + first / kDrawSpan * kLanes;
    int lanes[kLanes];
    int num_lanes = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      if (maxima[lane] >= threshold) lanes[num_lanes++] = lane;
    if (num_lanes == 0) continue;
    const int64_t end = std::min(first + kDrawSpan, candidates.vocab_size);
    for (int64_t row = first; row < end; row += kLanes) {
      for (int i = 0; i < num_lanes; ++i) {
        const int64_t id = row + lanes[i];
        if (id >= end || !(candidates.logits[id] >= threshold)) continue;
        scratch.values[static_cast<size_t>(count)] = candidates.logits[id];
        scratch.ids[static_cast<size_t>(count)] = static_cast<int32_t>(id);
        ++count;
      }
    }
  }
  candidates.count = count;
  candidates.border = -1;
  for (int32_t first = 0; first < count; first += kDrawSpan)
    candidates.kernels.weigh(scratch.values.data() + first, std::min(kDrawSpan, count - first),
                             candidates.found.largest, candidates.scale(), scratch.weights.data() + first);
}

int32_t middle_of(const Candidates& candidates, int32_t a, int32_t b, int32_t c) {
  if (candidates.ranks_before(b, a)) std::swap(a, b);
  if (candidates.ranks_before(c, b)) std::swap(b, c);
  return candidates.ranks_before(b, a) ? a : b;
}

// The place where the shares of order[0 .. count), ranked, reach `target`; -1 where they do not. Those before
// a pivot are added in the order in which they lie, and left in it; of the part in which the target lies the
// same again, and what is small enough is ranked and added one by one.
int32_t select_share(const Candidates& candidates, int32_t* order, int32_t count, double target) {
  const auto before = [&](int32_t a, int32_t b) { return candidates.ranks_before(a, b); };
  double share = 0.0;
  int32_t* first = order;
  int32_t* last = order + count;
  for (int round = 0; last - first > kSortAtOnce && round < kMaxRounds; ++round) {
    const int32_t pivot = middle_of(candidates, *first, first[(last - first) / 2], last[-1]);
    int32_t* end = first;
    double sum = 0.0;
    for (int32_t* at = first; at != last; ++at) {
      if (!before(*at, pivot)) continue;
      sum += candidates.weight(*at);
      std::swap(*at, *end++);
    }
    if (share + sum >= target) {
      last = end;
      continue;
    }
    share += sum + candidates.weight(pivot);
    if (share >= target) return pivot;
    std::swap(*std::find(end, last, pivot), *end);
    first = end + 1;
  }
  std::sort(first, last, before);
  for (; first != last; ++first) {
    share += candidates.weight(*first);
    if (share >= target) return *first;
  }
  return -1;
}

void cut_to_top_k(Candidates& candidates) {
  const int32_t top_k = candidates.draw.top_k;
  if (top_k == 0 || top_k >= candidates.count) return;
  auto order = candidates.scratch.order.begin();
  std::iota(order, order + candidates.count, 0);
  std::nth_element(order, order + (top_k - 1), order + candidates.count,
                   [&](int32_t a, int32_t b) { return candidates.ranks_before(a, b); });
  candidates.border = order[top_k - 1];
}

double total_of_kept(const Candidates& candidates) {
  double total = 0.0;
  for (int32_t place = 0; place < candidates.count; ++place)
    if (candidates.is_kept(place)) total += candidates.weight(place);
  return total;
}

// Keeps the fewest that hold top_p of `total`; false, and keeps all, where they hold less.
bool cut_to_top_p(Candidates& candidates, double total) {
  if (total_of_kept(candidates) < candidates.draw.top_p * total) return false;
  // In the order of ids, whatever a selection left.
  int32_t* order = candidates.scratch.order.data();
  int32_t count = 0;
  for (int32_t place = 0; place < candidates.count; ++place)
    if (candidates.is_kept(place)) order[count++] = place;
  const int32_t border = select_share(candidates, order, count, candidates.draw.top_p * total);
  if (border >= 0) candidates.border = border;
  return border >= 0;
}

// Most rows have few tokens that hold nearly all: few candidates are tried first.
void cut_all_to_top_p(Candidates& candidates) {
  const double total = weigh_spans(candidates.kernels, candidates.logits, candidates.vocab_size,
                                   candidates.found.largest, candidates.scale(), candidates.scratch);
  for (const int64_t count : kFewFirst) {
    collect(candidates, kth_of_lanes(candidates, count));
    if (cut_to_top_p(candidates, total)) return;
  }
  // All that are lighter than this hold less than 1 - top_p together; but sums of two orders may differ by
  // more than that.
  const double lightest = (1.0 - candidates.draw.top_p) * total / static_cast<double>(candidates.vocab_size);
  collect(candidates, logit_below(candidates, lightest));
  if (cut_to_top_p(candidates, total)) return;
  collect(candidates, kNone);
  cut_to_top_p(candidates, total);
}

int32_t pick_kept(const Candidates& candidates, double at) {
  const auto min_p = static_cast<double>(candidates.draw.min_p);
  const auto is_drawn_from = [&](int32_t place) {
    return candidates.is_kept(place) && candidates.weight(place) >= min_p;
  };
  double total = 0.0;
  for (int32_t place = 0; place < candidates.count; ++place)
    if (is_drawn_from(place)) total += candidates.weight(place);
  const double target = at * total;
  double share = 0.0;
  // The product may round up to the total, beyond every token's share.
  int32_t drawn = 0;
  for (int32_t place = 0; place < candidates.count; ++place) {
    if (!is_drawn_from(place)) continue;
    if (candidates.weight(place) > 0.0) drawn = place;
    share += candidates.weight(place);
    if (share > target) break;
  }
  return candidates.scratch.ids[static_cast<size_t>(drawn)];
}

}  // namespace

bool has_filters(const DrawWords& draw, int64_t vocab_size) {
  return (draw.top_k > 0 && draw.top_k < vocab_size) || draw.top_p < 1.0 || draw.min_p > 0.0f;
}

int32_t draw_filtered(const DrawKernels& kernels, const float* logits, int64_t vocab_size,
                      const DrawWords& draw, const LogitScan& found, double at, DrawScratch& scratch) {
  Candidates candidates{kernels, logits, vocab_size, draw, found, scratch};
  const bool has_top_k = draw.top_k > 0 && draw.top_k < vocab_size;
  if (draw.top_p < 1.0 && !has_top_k) {
    cut_all_to_top_p(candidates);
    return pick_kept(candidates, at);
  }
  float threshold = has_top_k ? kth_of_lanes(candidates, draw.top_k) : kNone;
  // top_p is a share of what top_k left, whatever min_p drops of it.
  if (draw.top_p >= 1.0 && draw.min_p > 0.0f)
    threshold = std::max(threshold, logit_below(candidates, draw.min_p));
  collect(candidates, threshold);
  cut_to_top_k(candidates);
  if (draw.top_p < 1.0) cut_to_top_p(candidates, total_of_kept(candidates));
  return pick_kept(candidates, at);
}

}  // namespace pagecast
