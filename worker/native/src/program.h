// A step as a flat list of launches over one arena, built once and run many times by a team of threads.
// Knows operands and kernels; neither Python nor what a model is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "operands.h"
#include "scratch.h"
#include "team.h"
#include "ticks.h"

namespace pagecast {

// What a launch works on: how many rows are live, which of its units, on which thread.
struct Share {
  int64_t num_rows;
  int64_t first;
  int64_t last;
  int thread;
};

// One kernel call with its operands bound. It is cut into units that any thread may do: rows of its extent,
// or weight panels, or attention pairs.
struct Launch {
  Extent extent;
  int64_t num_panels;        // 0: cut by rows
  AttentionPlan* attention;  // non-null: cut by its items
  int64_t cost;              // of a row over all panels: elements moved or multiply-adds
  std::function<void(const Share&)> body;
};

class Program {
 public:
  // `kernel_set` as for kernels_for. Throws std::invalid_argument for sizes below 1.
  Program(Team& team, int64_t max_tokens, int64_t max_rows, const char* kernel_set);

  // Each adds a launch; what its operands point to must outlive the program. Throws std::invalid_argument
  // that names operator and argument where memory or shapes are not fit for the full capacity; nothing is
  // added then.
  void embedding(const Panels& weight, const Array<int32_t>& token_ids, const View& out);
  void rms_norm(const View& x, const Array<float>& weight, float eps, const View& out);
  void add_rms_norm(const View& x, const View& y, const Array<float>& weight, float eps, const View& sum,
                    const View& out);
  void add(const View& x, const View& y, const View& out);
  void swiglu(const View& gate, const View& up, const View& out);
  void select_rows(const View& x, const Array<int32_t>& index, const View& out);
  void linear(const View& x, const Panels& weight, const View& out);
  void linear_swiglu(const View& x, const Panels& weight, const View& out);
  void rope(const View& x, const Array<int32_t>& position, const Array<float>& cos, const Array<float>& sin,
            const View& out);
  void store_kv(const View& k, const View& v, const Array<int64_t>& slot_mapping, const KvView& keys,
                const KvView& values);
  void rope_store(const View& q, const View& k, const View& v, const Array<int32_t>& position,
                  const Array<int64_t>& slot_mapping, const Array<float>& cos, const Array<float>& sin,
                  const KvView& keys, const KvView& values, const View& out);
  void paged_attention(const View& q, const KvView& keys, const KvView& values,
                       const Array<int32_t>& block_table, const Array<int32_t>& context_len,
                       const Array<int32_t>& query_start, float scale, const View& out);
  // Keys and values [num_kv_heads, context, head_size] of one row. Keys are copied, into panels of kLanes
  // tokens.
  void dense_attention(const View& q, const Array<float>& keys, const Array<float>& values,
                       const Array<int32_t>& context_len, const Array<int32_t>& query_start, float scale,
                       const View& out);

  // Runs all launches on the live sizes. Throws std::invalid_argument beyond the capacity or for rows that
  // don't fit the sizes, std::logic_error where the team is closed or in use; nothing has run then.
  // Returns the time inside launches' bodies in ns, each as its longest thread took it: what is left of the
  // run is hand-over, meetings and bookkeeping.
  int64_t run(const Sizes& live);

  size_t num_launches() const { return launches_.size(); }
  const char* kernel_set() const { return kernels_.name; }
  // Of the last run, launch by launch.
  std::vector<int64_t> launch_ns() const;
  // Time of the last run inside bodies as a mean over threads: less by what threads wait for one another
  // inside a launch.
  int64_t busy_ns() const;

 private:
  // A launch as the run at hand sees it.
  struct Live {
    int64_t num_rows;
    int64_t num_units;
    bool is_serial;  // too little to share: whoever is the last to end the launch before it does it all
  };

  // What all attention launches share.
  struct AttentionScratch {
    std::vector<Floats> threads;
    int64_t thread_floats = 0;
    Floats partials;  // [split query][span][KV head]
    int64_t partial_floats = 0;
    std::unique_ptr<std::atomic<int>[]> arrivals;  // parts done, [split query][first KV head of the item]
    int64_t num_arrivals = 0;
  };

  Checks checks(const char* op) const { return Checks(op, capacity_); }
  void push(Extent extent, int64_t num_panels, int64_t cost, std::function<void(const Share&)> body);
  void check_rope(const Checks& checks, const Array<int32_t>& position, const Array<float>& cos,
                  const Array<float>& sin, int64_t head_size) const;
  AttentionPlan& check_rows(const Checks& checks, const View& q, const Array<int32_t>& context_len,
                            const Array<int32_t>& query_start, const KvShape& shape, int64_t max_context,
                            const View& out);
  void push_attention(const AttentionCall& call, AttentionPlan& plan, int64_t max_context, bool is_paged);
  void attend(const AttentionCall& call, const AttentionPlan& plan, int64_t max_spans, bool is_paged,
              const Share& share);

  void prepare(const Sizes& live);
  // Every thread of a run walks the launches here.
  void work(int thread);
  // Does serial launches from `launch` on; returns the first that is not.
  size_t run_serial(size_t launch, int thread);
  void run_timed(size_t launch, int64_t first, int64_t last, int thread);
  void run_shared(size_t launch, int thread);

  // Of the last run, a launch's ticks in the thread that took longest.
  int64_t longest_ticks(size_t launch) const;
  int64_t to_ns(int64_t ticks) const;

  Team& team_;
  const Kernels& kernels_;
  const Sizes capacity_;
  std::vector<Launch> launches_;
  std::vector<std::unique_ptr<AttentionPlan>> plans_;
  std::vector<Floats> dense_keys_;
  AttentionScratch scratch_;

  std::vector<Live> live_;
  std::vector<std::vector<int64_t>> body_ticks_;  // [thread][launch]
  double ns_per_tick_ = 0.0;                      // over the last run
  size_t last_shared_ = 0;                        // the last launch of the run at hand that is not serial
  alignas(64) std::atomic<int64_t> claimed_{0};   // units of the launch at hand that some thread has taken
  // Where threads go on after a meeting; written by the last to arrive.
  alignas(64) size_t next_shared_ = 0;
};

}  // namespace pagecast
