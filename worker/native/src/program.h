// A step as a flat list of launches over one arena, built once and run many times by a team of threads.
// Knows operands and kernels; neither Python nor what a model is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ahead.h"
#include "attention_plan.h"
#include "bfloat16.h"
#include "body.h"
#include "draw.h"
#include "int8.h"
#include "operands.h"
#include "scratch.h"
#include "shares.h"
#include "team.h"
#include "ticks.h"

namespace pagecast {

class Sampler;

// A result that a launch writes by panels, and whether it is to be rounded to bfloat16 as well: the launch
// behind it, which wants that, is added later.
struct RoundedToo {
  View out;
  int scratch;  // that takes it, not the one that the launch reads
  bool wanted = false;
};

// One kernel call with its operands bound. It is cut into units that any thread may do: rows of its extent,
// or weight panels, or attention items.
struct Launch {
  Extent extent;
  int64_t num_panels;        // 0: cut by rows
  AttentionPlan* attention;  // non-null: cut by its items
  int64_t cost;              // of a row over all panels, in moved elements: about 0.12 ns each
  Body body;
  // What a thread may fetch before the launch begins; empty where there is nothing worth it.
  std::vector<WeightStream> weights = {};
  std::optional<View> wrote = {};  // of a launch cut by rows: those of its last result, whole in its body
  bool counts_to_next = false;     // added in front of an operator's own launch, to which its time belongs
  RoundedToo* also = nullptr;      // of one whose result can be rounded on the way
};

// What products and attention are made of. kInt8: rows that meet quantised weights are rounded to eight bits
// (int8.h), all else is float32. kBFloat16: all products, attention's too, are of bfloat16 (bfloat16.h).
enum class Activations { kFloat32, kInt8, kBFloat16 };

class Program {
 public:
  // `kernel_set` as for kernels_for. Throws std::invalid_argument for sizes below 1.
  Program(Team& team, int64_t max_tokens, int64_t max_rows, const char* kernel_set,
          Activations activations = Activations::kFloat32);

  // Each adds a launch; what its operands point to must outlive the program. Throws std::invalid_argument
  // that names operator and argument where memory or shapes are not fit for the full capacity; nothing is
  // added then.
  // A weight is its segments, see PackedMatrix; embedding and linear_swiglu take one segment only.
  void embedding(std::span<const Panels> weight, const Array<int32_t>& token_ids, const View& out);
  void rms_norm(const View& x, const Array<float>& weight, float eps, const View& out);
  void add_rms_norm(const View& x, const View& y, const Array<float>& weight, float eps, const View& sum,
                    const View& out);
  void add(const View& x, const View& y, const View& out);
  void swiglu(const View& gate, const View& up, const View& out);
  void select_rows(const View& x, const Array<int32_t>& index, const View& out);
  void linear(const View& x, std::span<const Panels> weight, const View& out);
  void linear_swiglu(const View& x, std::span<const Panels> weight, const View& out);
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

  struct Times {
    int64_t kernel_ns;  // as run() returns it
    int64_t draw_ns;    // in draws, as the thread took it that took longest
  };
  // As run(), and then draws for rows 0 .. num_draws of the sampler, of the same team, in the same hand-over.
  // Throws what Sampler::draw does too; nothing has run then.
  Times run_and_draw(const Sizes& live, Sampler& sampler, int64_t num_draws, const DrawEntry* entries,
                     int64_t num_entries);

  // One for each operator that was added; what it needs in front of it is part of it.
  size_t num_launches() const;
  const char* kernel_set() const { return kernels_.name; }
  Activations activations() const { return activations_; }
  // Of the last run, launch by launch.
  std::vector<int64_t> launch_ns() const;
  // Time of the last run inside bodies as a mean over threads: less by what threads wait for one another
  // inside a launch.
  int64_t busy_ns() const;

 private:
  // A launch as the run at hand sees it, on a cache line of its own. What its body closes over and its
  // weights' streams lie elsewhere: see fetch_next.
  struct alignas(64) Live {
    Body::Reference body;
    std::span<const WeightStream> weights;
    uint32_t num_rows;
    uint32_t num_units;
    // The first ones behind it that are shared, and shared and read weights; the number of launches: none.
    uint32_t next_shared;
    uint32_t next_weights;
    bool is_serial;   // too little to share: whoever is the last to end the launch before it does it all
    uint8_t at_once;  // units that a kernel works on together
  };
  static_assert(sizeof(Live) == 64);

  // A launch whose units are another number in each run.
  struct Attending {
    size_t launch;
    const AttentionPlan* plan;
    int64_t cost;
  };

  // What all attention launches share.
  struct AttentionScratch {
    std::vector<Floats> threads;
    int64_t thread_floats = 0;
    Floats partials;  // [spans of split queries][KV head]
    int64_t partial_floats = 0;
    std::unique_ptr<std::atomic<int>[]> arrivals;  // parts done, [split query][first KV head of the item]
    int64_t num_arrivals = 0;
  };

  // Rows of activations in eight bits, those of one product at a time. Biases are kept by a weight's offset.
  struct Int8Scratch {
    Floats quants, scales, scaled_sums;
    std::vector<std::pair<int, Floats>> biases;
    int64_t num_elements = 0;

    Int8Rows rows(int64_t num_columns, int offset) const;
    // Room for that many rows, or columns, at least, and biases for the offsets. Nothing has changed where it
    // throws.
    void reserve(int64_t num_rows, int64_t num_columns, std::span<const int> offsets);
  };
  // Rows of activations in bfloat16, those of one product at a time, beside what it rounds for the next.
  struct BFloat16Scratch {
    Floats numbers;
    int64_t num_elements = 0;

    BFloat16Rows rows(int64_t num_columns) const;
    // Room for that many rows at least. Nothing has changed where it throws.
    void reserve(int64_t num_rows, int64_t num_columns);
  };
  struct Product;

  // Of an operator that is to be added. Throws std::logic_error during a run: threads read the list then.
  Checks checks(const char* op);
  void push(Extent extent, int64_t num_panels, int64_t cost, Body body);
  // A launch cut by the rows of `out`, its last result.
  void push_rows(const View& out, int64_t cost, Body body);
  // Rounds x for the product with these segments that is added next, where one asks for it. Returns which
  // scratch of bfloat16 it is in.
  int round_before(const View& x, std::span<const Panels> segments);
  // Rounds x by `round`: in the launch before, if that is cut by rows and wrote x, else in one in front of
  // the product. `cost` is of a row.
  template <typename Round>
  void push_before(const View& x, int64_t cost, Round round);
  void check_rope(const Checks& checks, const Array<int32_t>& position, const Array<float>& cos,
                  const Array<float>& sin, int64_t head_size) const;
  AttentionPlan& check_rows(const Checks& checks, const View& q, const Array<int32_t>& context_len,
                            const Array<int32_t>& query_start, const KvShape& shape, int64_t max_context,
                            const View& out);
  const AttentionKernels& attention_kernels() const;
  void push_attention(const AttentionCall& call, AttentionPlan& plan, int64_t max_context, bool is_paged);
  void attend(const AttentionCall& call, const AttentionPlan& plan, bool is_paged, const Share& share);

  // Runs, and draws where there is a sampler, which is prepared.
  void run(Team::Lease& lease, const Sizes& live, Sampler* sampler);
  bool draws_shared() const;
  void prepare(const Sizes& live);
  void set_sizes(const Sizes& live);
  // Tells whether it changes that the launch is shared.
  bool set_units(size_t launch, int64_t num_units, int64_t cost);
  void link_shared();
  // Every thread of a run walks the launches here.
  void work(int thread);
  // Does launches [first, last), which are serial, each after a call of idle().
  template <typename Idle>
  void run_serial(size_t first, size_t last, int thread, Idle&& idle);
  // Does this thread's shares of the launch, which was laid out for `turn`.
  void run_shared(size_t launch, int turn, int thread);
  // Asks for what a thread reads of the launches up to the next shared one, and of the list behind that.
  void fetch_next(size_t launch) const;
  // What `thread` will read first of that launch.
  WeightsAhead weights_ahead(size_t launch, int thread) const;

  int64_t kernel_ns() const;
  // Of the last run, a launch's ticks in the thread that took longest.
  int64_t longest_ticks(size_t launch) const;
  int64_t to_ns(int64_t ticks) const;

  Team& team_;
  const Kernels& kernels_;
  const Sizes capacity_;
  const Activations activations_;
  std::vector<Launch> launches_;
  std::vector<std::unique_ptr<AttentionPlan>> plans_;
  std::vector<Floats> dense_keys_;
  AttentionScratch scratch_;
  Int8Scratch int8_;
  BFloat16Scratch bfloat16_[2];  // one may be written while the other is read
  std::vector<std::unique_ptr<RoundedToo>> rounded_too_;

  std::vector<Live> live_;
  std::vector<Attending> attending_;
  std::vector<std::vector<int64_t>> body_ticks_;  // [thread][launch]
  std::atomic<bool> is_running_{false};
  Sampler* sampler_ = nullptr;  // of the run at hand; null: nothing is drawn
  TickLength tick_length_;
  double ns_per_tick_ = 0.0;
  std::optional<Sizes> last_sizes_;  // that `live_` is for; none: launches were added since
  size_t first_shared_ = 0;          // of the run at hand; the number of launches: none
  const int64_t max_ahead_bytes_;    // that a thread fetches of a launch to come
  Shares shares_;
};

}  // namespace pagecast
