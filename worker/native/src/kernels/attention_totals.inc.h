// How spans are put together, and what is made of their totals; see attention.h.
#pragma once

#include "../attention.h"
#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

// Totals of some query vectors over spans.
struct Totals {
  float* m;    // [count]
  float* l;    // [count]
  float* acc;  // [count, head_size]
};

// Folds m, l and acc of `count` vectors into totals; the first span is taken as it is.
void fold(const Totals& to, const Totals& from, int count, int head_size, bool is_first) {
  for (int begin = 0; begin < count; begin += kLanes) {
    const int n = count - begin < kLanes ? count - begin : kLanes;
    const F16 m = load_n(from.m + begin, n);
    const F16 l = load_n(from.l + begin, n);
    const F16 total_m = is_first ? m : load_n(to.m + begin, n);
    const F16 peak = max(total_m, m);
    const F16 total_share = exp(total_m - peak);
    const F16 share = exp(m - peak);
    store_n(to.m + begin, peak, n);
    store_n(to.l + begin, is_first ? l : fma(l, share, load_n(to.l + begin, n) * total_share), n);
    float shares[kLanes], total_shares[kLanes];
    store(shares, share);
    store(total_shares, total_share);
    for (int i = 0; i < n; ++i) {
      float* total = to.acc + int64_t{begin + i} * head_size;
      const float* acc = from.acc + int64_t{begin + i} * head_size;
      for (int d = 0; d < head_size; d += kLanes) {
        const F16 part = load(acc + d);
        store(total + d, is_first
                             ? part
                             : fma(part, broadcast(shares[i]), load(total + d) * broadcast(total_shares[i])));
      }
    }
  }
}

void write_out(const AttentionCall& call, const AttentionItem& item, int kv_head, const Totals& totals) {
  const int group = call.shape.num_heads / call.shape.num_kv_heads;
  const int head_size = call.shape.head_size;
  for (int query = 0; query < item.num_queries; ++query) {
    float* out =
        call.out.data + (item.first_query + query) * call.out.stride + int64_t{kv_head} * group * head_size;
    for (int head = 0; head < group; ++head) {
      const int vector = query * group + head;
      const F16 l = broadcast(totals.l[vector]);
      for (int d = 0; d < head_size; d += kLanes)
        store(out + int64_t{head} * head_size + d, load(totals.acc + int64_t{vector} * head_size + d) / l);
    }
  }
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
