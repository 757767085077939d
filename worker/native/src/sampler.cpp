#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "ticks.h"

namespace pagecast {
namespace {

// Below it a second thread takes as long to come as it saves: some 8 us of scanning.
constexpr int64_t kSerialCost = 1 << 16;
// A draw by weights beside a scan for the largest.
constexpr int64_t kWeighCost = 6;

void require(bool holds, const char* argument, const std::string& what) {
  if (!holds) throw std::invalid_argument(std::string(argument) + ": " + what);
}

void require_size(const char* argument, int64_t value, int64_t most) {
  require(value >= 1 && value <= most, argument,
          std::to_string(value) + ", must be 1 to " + std::to_string(most));
}

}  // namespace

Sampler::Sampler(Team& team, const SamplerMemory& memory, const char* kernel_set)
    : team_(team),
      memory_(memory),
      kernels_(*kernels_for(kernel_set).draw),
      scratch_(static_cast<size_t>(team.size())),
      ticks_(static_cast<size_t>(team.size())) {
  require_size("num_rows", memory.num_rows, int64_t{1} << 24);
  require_size("vocab_size", memory.vocab_size, kMaxVocab);
  require(memory.num_rows == 1 || memory.row_stride >= memory.vocab_size, "logits",
          "rows are " + std::to_string(memory.row_stride) + " apart, fewer than vocab_size");
  for (DrawScratch& scratch : scratch_) scratch.reserve(memory.vocab_size, 0, false);
}

int64_t Sampler::checked_cost(int64_t row, const DrawEntry* entries, int64_t num_entries) const {
  const DrawWords& draw = memory_.draws[row];
  if (draw.flags == 0) return 0;
  const auto need = [row](bool holds, const char* what) {
    if (holds) return;
    throw std::invalid_argument("draws[" + std::to_string(row) + "]: " + what);
  };
  need((draw.flags & ~(kDraws | kGreedy | kWantsLogprob)) == 0, "flags that are none");
  need(draw.num_entries >= 0 && draw.first_entry >= 0 &&
           int64_t{draw.first_entry} + draw.num_entries <= num_entries,
       "its entries are not in the table");
  need(draw.position >= 0, "position is below 0");
  need(draw.top_k >= 0, "top_k is below 0");
  need((draw.flags & kGreedy) != 0 || (draw.temperature > 0.0f && std::isfinite(draw.temperature)),
       "temperature is not over 0, or infinite");
  need(draw.min_p >= 0.0f && draw.min_p <= 1.0f, "min_p is not in 0..1");
  need(draw.top_p > 0.0 && draw.top_p <= 1.0, "top_p is not in 0..1, without 0");
  need(draw.repetition > 0.0 && std::isfinite(draw.repetition), "repetition is not over 0, or infinite");
  for (int32_t i = draw.first_entry; i < draw.first_entry + draw.num_entries; ++i) {
    const char* wrong = entries[i].token_id < 0           ? "token_id is below 0"
                        : !(entries[i].offset < INFINITY) ? "offset is NaN or +inf"
                                                          : nullptr;
    if (wrong != nullptr) throw std::invalid_argument("entries[" + std::to_string(i) + "]: " + wrong);
  }
  const bool weighs = (draw.flags & kGreedy) == 0 || (draw.flags & kWantsLogprob) != 0;
  return memory_.vocab_size * (1 + (weighs ? kWeighCost : 0) + (draw.num_entries > 0 ? 1 : 0));
}

void Sampler::draw(int64_t num_rows, const DrawEntry* entries, int64_t num_entries) {
  Team::Lease lease(team_);
  prepare(team_, num_rows, entries, num_entries);
  if (!is_shared_) return draw_all(0);
  lease.run(
      [](void* context, int thread) {
        auto* sampler = static_cast<Sampler*>(context);
        sampler->draw_share(thread);
        sampler->team_.meet([] {});
      },
      this);
}

void Sampler::prepare(const Team& team, int64_t num_rows, const DrawEntry* entries, int64_t num_entries) {
  require(&team == &team_, "sampler", "is of another team");
  require(num_rows >= 0 && num_rows <= memory_.num_rows, "num_rows",
          std::to_string(num_rows) + ", must be 0 to " + std::to_string(memory_.num_rows));
  int64_t cost = 0;
  int64_t most_entries = 0;
  bool any_filters = false;
  for (int64_t row = 0; row < num_rows; ++row) {
    cost += checked_cost(row, entries, num_entries);
    const DrawWords& draw = memory_.draws[row];
    if (draw.flags == 0) continue;
    most_entries = std::max<int64_t>(most_entries, draw.num_entries);
    any_filters = any_filters || ((draw.flags & kGreedy) == 0 && has_filters(draw, memory_.vocab_size));
  }
  for (DrawScratch& scratch : scratch_) scratch.reserve(memory_.vocab_size, most_entries, any_filters);
  std::fill(ticks_.begin(), ticks_.end(), 0);
  entries_ = entries;
  num_live_ = num_rows;
  is_shared_ = team_.size() > 1 && num_rows > 1 && cost > kSerialCost;
  claimed_.store(0, std::memory_order_relaxed);
}

void Sampler::draw_one(int64_t row, int thread) {
  const DrawWords& draw = memory_.draws[row];
  DrawnToken drawn{-1, NAN};
  if (draw.flags != 0)
    drawn = draw_row(kernels_, memory_.logits + row * memory_.row_stride, memory_.vocab_size, draw,
                     entries_ + draw.first_entry, scratch_[static_cast<size_t>(thread)]);
  memory_.ids[row] = drawn.id;
  memory_.logprobs[row] = drawn.logprob;
}

void Sampler::draw_all(int thread) {
  const int64_t start = ticks();
  for (int64_t row = 0; row < num_live_; ++row) draw_one(row, thread);
  ticks_[static_cast<size_t>(thread)] = ticks() - start;
}

void Sampler::draw_share(int thread) {
  const int64_t start = ticks();
  const int64_t num_live = num_live_;
  for (int64_t row = claimed_.fetch_add(1, std::memory_order_relaxed); row < num_live;
       row = claimed_.fetch_add(1, std::memory_order_relaxed)) {
    draw_one(row, thread);
  }
  ticks_[static_cast<size_t>(thread)] = ticks() - start;
}

int64_t Sampler::longest_ticks() const {
  // Counters of two CPUs may disagree.
  return std::max(int64_t{0}, *std::max_element(ticks_.begin(), ticks_.end()));
}

}  // namespace pagecast
