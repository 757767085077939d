// A row's draw of a token from its logits. Knows the words in which parameters travel; neither threads nor
// Python.
//
// A row is changed by its entries, drawn from and put back: x becomes x / r if positive, else x * r, where
// the log holds the token, then the entry's offset is added, in float64, and the sum is rounded to float32
// (beyond its range to its largest number). Candidates, ranked by falling logit and rising id, are cut to
// top_k, to the fewest that hold top_p of what is left and to those of at least min_p of the largest weight,
// exp((x - largest) / temperature) in float64. The draw is by inverse of the cumulative weights in the order
// of ids, with the number that belongs to (seed, position).
//
// Order of additions. Without a filter: of a span's kDrawSpan weights lane i of 16 takes each 16th from i on,
// lanes are added pairwise (i + 8, i + 4, i + 2, i + 1), spans in rising order, and within the drawn span
// weights one by one. With filters kept weights are added one by one in the order of ids; shares for top_p
// are those of the ranking, added as `select_share` in draw_filters.cpp does. Nothing depends on threads or
// on other rows.
#pragma once

#include <cstdint>
#include <vector>

#include "draw_kernels.h"

namespace pagecast {

// A draw's parameters, word for word as worker/kernels/draw_words.py lays them out.
struct DrawWords {
  int32_t flags;
  int32_t slot;
  int32_t first_entry;
  int32_t num_entries;
  int32_t top_k;
  int32_t position;
  uint64_t seed;
  float temperature;
  float min_p;
  double top_p;
  double repetition;
  double inverse_repetition;
};
static_assert(sizeof(DrawWords) == 64);

inline constexpr int32_t kDraws = 1;
inline constexpr int32_t kGreedy = 2;
inline constexpr int32_t kWantsLogprob = 4;

// A token whose logit changes before the draw.
struct DrawEntry {
  int32_t token_id;
  int32_t in_log;
  double offset;
};
static_assert(sizeof(DrawEntry) == 16);

// What a thread works in; grows to what the vocabulary wants and is kept.
struct DrawScratch {
  std::vector<float> maxima;
  std::vector<double> sums;  // of spans
  std::vector<float> saved;  // logits that entries changed
  // Candidates, ids rising, and their places as a filter ranks them.
  std::vector<float> values;
  std::vector<int32_t> ids;
  std::vector<double> weights;
  std::vector<int32_t> order;

  // Room for rows of `vocab_size` logits with up to `num_entries` entries; for candidates where wanted.
  // Throws std::bad_alloc.
  void reserve(int64_t vocab_size, int64_t num_entries, bool has_filters);
};

struct DrawnToken {
  int32_t id;     // -1: a logit is NaN or infinite, or all ids are banned
  float logprob;  // log softmax by the logits before their entries; NaN unless asked for
};

// Whether the draw cuts candidates, and so needs room for them.
bool has_filters(const DrawWords& draw, int64_t vocab_size);

// Draws from logits[0 .. vocab_size); `entries` are the row's. Allocates nothing beyond `scratch`'s room.
DrawnToken draw_row(const DrawKernels& kernels, float* logits, int64_t vocab_size, const DrawWords& draw,
                    const DrawEntry* entries, DrawScratch& scratch);

// The place of the drawn token among the candidates that filters leave of changed logits. `at` is the draw's
// number in [0, 1).
int32_t draw_filtered(const DrawKernels& kernels, const float* logits, int64_t vocab_size,
                      const DrawWords& draw, const LogitScan& found, double at, DrawScratch& scratch);

// Sum over all logits of exp((x - largest) * scale); the sums of spans go to scratch.sums.
double weigh_spans(const DrawKernels& kernels, const float* logits, int64_t count, double largest,
                   double scale, DrawScratch& scratch);

// The number in [0, 1) of a seed and a position: the top 53 bits of the first word of Philox4x64-10 with key
// (seed, 0) and counter (1, 0, position, 0), as NumPy counts. Source: Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011).
double draw_uniform(uint64_t seed, int64_t position);

}  // namespace pagecast
