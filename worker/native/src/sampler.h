// Draws the tokens of a step from the rows of logits where they lie, shared by a team's threads. See draw.h
// for what a draw is.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "draw.h"
#include "team.h"

namespace pagecast {

// Memory of a sampler's rows; all of it outlives the sampler.
struct SamplerMemory {
  float* logits;  // a draw changes those of its entries, and puts them back
  int64_t row_stride;
  int64_t num_rows;
  int64_t vocab_size;      // ids from here on are never drawn
  const DrawWords* draws;  // [num_rows]
  int32_t* ids;            // [num_rows]
  float* logprobs;         // [num_rows]
};

class Sampler {
 public:
  // `kernel_set` as for kernels_for. Throws std::invalid_argument for sizes below 1, a vocabulary over
  // kMaxVocab or wider than a row.
  Sampler(Team& team, const SamplerMemory& memory, const char* kernel_set);

  // Draws for rows 0 .. num_rows, each alone: those without flags get id -1. Throws std::invalid_argument for
  // words or entries that can't be, std::logic_error where the team is closed or in use; nothing was drawn
  // then.
  void draw(int64_t num_rows, const DrawEntry* entries, int64_t num_entries);

  // The parts of draw(), for who has a lease of the team and a run of it under way.
  // Checks, and makes room; throws as draw() does, and std::invalid_argument for another team.
  void prepare(const Team& team, int64_t num_rows, const DrawEntry* entries, int64_t num_entries);
  // Whether every thread of the team is to call draw_share(), or one of them draw_all().
  bool is_shared() const { return is_shared_; }
  void draw_share(int thread);
  void draw_all(int thread);
  const int32_t* ids() const { return memory_.ids; }
  // Of the last draws, in the thread that took longest.
  int64_t longest_ticks() const;

  static constexpr int64_t kMaxVocab = int64_t{1} << 30;

 private:
  // What a row's draw is reckoned to cost, in logits that a scan passes; 0: nothing is drawn.
  int64_t checked_cost(int64_t row, const DrawEntry* entries, int64_t num_entries) const;
  void draw_one(int64_t row, int thread);

  Team& team_;
  const SamplerMemory memory_;
  const DrawKernels& kernels_;
  std::vector<DrawScratch> scratch_;  // by thread
  std::vector<int64_t> ticks_;        // by thread
  const DrawEntry* entries_ = nullptr;
  int64_t num_live_ = 0;
  bool is_shared_ = false;
  alignas(64) std::atomic<int64_t> claimed_{0};  // rows that some thread has taken
};

}  // namespace pagecast
