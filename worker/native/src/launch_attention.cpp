// The attention launches: their checks, their scratch, and how a split query's parts come together.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace pagecast {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

const AttentionKernels& Program::attention_kernels() const {
  return activations_ == Activations::kBFloat16 ? *kernels_.bfloat16_attention : *kernels_.attention;
}

AttentionPlan& Program::check_rows(const Checks& checks, const View& q, const Array<int32_t>& context_len,
                                   const Array<int32_t>& query_start, const KvShape& shape,
                                   int64_t max_context, const View& out) {
  checks.view("q", q, q.width, Extent::kTokens);
  const int64_t kv_width = int64_t{shape.num_kv_heads} * shape.head_size;
  checks.require(
      q.width % kv_width == 0, "q",
      "width " + number(q.width) + ", must be a multiple of " + number(kv_width) + ", that of the keys");
  checks.view("out", out, q.width, Extent::kTokens);
  checks.apart("out", out, "q", q);
  checks.array("context_len", context_len, 1, capacity_.rows);
  checks.array("query_start", query_start, 1, capacity_.rows + 1);
  checks.require(max_context < (int64_t{1} << 30), "keys",
                 "room for " + number(max_context) + " tokens a row");
  const int64_t max_partials = AttentionPlan::max_partials(shape, max_context, team_.size());
  for (const auto& plan : plans_)
    if (plan->is_for(context_len.data, query_start.data, shape.num_kv_heads, max_context, max_partials))
      return *plan;
  plans_.push_back(std::make_unique<AttentionPlan>(context_len.data, query_start.data, shape.num_kv_heads,
                                                   max_context, max_partials, team_.size(),
                                                   attention_kernels().cut));
  return *plans_.back();
}

void Program::push_attention(const AttentionCall& call, AttentionPlan& plan, int64_t max_context,
                             bool is_paged) {
  const int64_t splits = AttentionPlan::max_splits(team_.size());
  const int64_t thread_floats = attention_scratch_floats(call.shape);
  const int64_t partials = AttentionPlan::max_partials(call.shape, max_context, team_.size()) *
                           call.shape.num_kv_heads * partial_floats(call.shape);
  scratch_.threads.resize(static_cast<size_t>(team_.size()));
  if (splits * call.shape.num_kv_heads > scratch_.num_arrivals) {
    scratch_.num_arrivals = splits * call.shape.num_kv_heads;
    scratch_.arrivals = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(scratch_.num_arrivals));
  }
  if (thread_floats > scratch_.thread_floats) {
    for (Floats& floats : scratch_.threads) floats = make_floats(thread_floats);
    scratch_.thread_floats = thread_floats;
  }
  if (team_.size() > 1 && partials > scratch_.partial_floats) {
    scratch_.partials = make_floats(partials);
    scratch_.partial_floats = partials;
  }
  // Four multiply-adds in the time of an element.
  push(Extent::kTokens, 0, int64_t{call.shape.num_heads} * call.shape.head_size * kSpanTokens / 2,
       [this, call, &plan, is_paged](const Share& share) { attend(call, plan, is_paged, share); });
  launches_.back().attention = &plan;
}

void Program::attend(const AttentionCall& call, const AttentionPlan& plan, bool is_paged,
                     const Share& share) {
  const AttentionKernels& kernels = attention_kernels();
  float* scratch = scratch_.threads[static_cast<size_t>(share.thread)].get();
  const int64_t num_kv_heads = call.shape.num_kv_heads;
  for (int64_t i = share.first; i < share.last; ++i) {
    const AttentionItem& item = plan.items()[static_cast<size_t>(i)];
    if (item.split < 0) {
      (is_paged ? kernels.paged : kernels.dense)(call, item, scratch);
      continue;
    }
    float* partials =
        scratch_.partials.get() + item.first_partial * num_kv_heads * partial_floats(call.shape);
    (is_paged ? kernels.paged_spans : kernels.dense_spans)(call, item, scratch, partials);
    // The last part to be done folds all of them, in the order of spans, whoever computed what.
    std::atomic<int>& arrivals =
        scratch_.arrivals[static_cast<size_t>(item.split * num_kv_heads + item.first_head)];
    if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == item.num_parts) {
      arrivals.store(0, std::memory_order_relaxed);
      kernels.merge(call, item, AttentionPlan::num_spans(int64_t{item.first_position} + 1), scratch,
                    partials);
    }
  }
}

void Program::paged_attention(const View& q, const KvView& keys, const KvView& values,
                              const Array<int32_t>& block_table, const Array<int32_t>& context_len,
                              const Array<int32_t>& query_start, float scale, const View& out) {
  const Checks checks = this->checks("paged_attention");
  checks.kv("keys", keys);
  checks.kv("values", values);
  checks.same_shape(keys, values);
  checks.array("block_table", block_table, 2, capacity_.rows);
  checks.require(block_table.shape[1] >= 1, "block_table", "no columns");
  const KvShape shape = {static_cast<int>(keys.block_size), static_cast<int>(keys.head_size),
                         static_cast<int>(q.width / keys.head_size), static_cast<int>(keys.num_kv_heads),
                         keys.type};
  const int64_t max_context = block_table.shape[1] * keys.block_size;
  AttentionPlan& plan = check_rows(checks, q, context_len, query_start, shape, max_context, out);
  const AttentionCall call = {q.rows(), out.rows(),       keys.layer(),         values.layer(),
                              shape,    block_table.data, block_table.shape[1], scale};
  push_attention(call, plan, max_context, true);
}

void Program::dense_attention(const View& q, const Array<float>& keys, const Array<float>& values,
                              const Array<int32_t>& context_len, const Array<int32_t>& query_start,
                              float scale, const View& out) {
  const Checks checks = this->checks("dense_attention");
  checks.array("keys", keys, 3, 1);
  checks.array("values", values, 3, 1);
  checks.require(values.shape == keys.shape, "values", "another shape than keys");
  checks.equal("query_start", "rows of the program", capacity_.rows, 1);
  const int64_t heads = keys.shape[0];
  const int64_t context = keys.shape[1];
  const int64_t head_size = keys.shape[2];
  checks.require(head_size >= kLanes && head_size <= kMaxHeadSize && head_size % kLanes == 0, "keys",
                 "head_size " + number(head_size) + ", must be a multiple of " + number(kLanes) + " up to " +
                     number(kMaxHeadSize));
  checks.require(context >= 1 && heads < (1 << 16), "keys", "no context or too many heads");
  const KvShape shape = {kLanes, static_cast<int>(head_size), static_cast<int>(q.width / head_size),
                         static_cast<int>(heads)};
  AttentionPlan& plan = check_rows(checks, q, context_len, query_start, shape, context, out);

  const int64_t head_floats = round_up(context) * head_size;
  Floats panels = make_floats(heads * head_floats);
  std::fill_n(panels.get(), heads * head_floats, 0.0f);
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t token = 0; token < context; ++token)
      for (int64_t d = 0; d < head_size; ++d)
        panels[static_cast<size_t>(head * head_floats + (token / kLanes * head_size + d) * kLanes +
                                   token % kLanes)] = keys.data[(head * context + token) * head_size + d];

  // The kernel only reads them.
  const auto layer_of = [](const float* data, int64_t floats) {
    auto* bytes = reinterpret_cast<std::byte*>(const_cast<float*>(data));
    return KvLayer{bytes, 0, floats * int64_t{sizeof(float)}};
  };
  const KvLayer key_layer = layer_of(panels.get(), head_floats);
  const KvLayer value_layer = layer_of(values.data, context * head_size);
  const AttentionCall call = {q.rows(), out.rows(), key_layer, value_layer, shape, nullptr, 0, scale};
  dense_keys_.push_back(std::move(panels));
  push_attention(call, plan, context, false);
}

}  // namespace pagecast
