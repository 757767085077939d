// What a launch refuses, and that the error names operator and argument.
#include <functional>
#include <stdexcept>
#include <string>

#include "check.h"
#include "program_case.h"

namespace {

using namespace pagecast;
using namespace program_case;

void refuse(const char* start, const std::function<void(Step&)>& call) {
  Step step(1, nullptr);
  const size_t before = step.program.num_launches();
  try {
    call(step);
    CHECK(false, "%s was not refused", start);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find(start) == 0, "%s, not %s", error.what(), start);
  }
  CHECK(step.program.num_launches() == before, "%s: a launch was added all the same", start);
}

// One block of one head, within the pool whatever its size.
KvView kv(Step& step, int64_t head_size, int64_t block_size) {
  const int64_t bytes = 4 * head_size * block_size;
  KvView view = step.layer(true);
  view.num_blocks = view.num_kv_heads = 1;
  view.block_stride = view.head_stride = bytes;
  view.head_size = head_size;
  view.block_size = block_size;
  return view;
}

void test_bad_operands_are_named() {
  using S = Step;
  refuse("linear: x: width", [](S& s) { s.program.linear(s.inner, s.vocab.packed.segments(), s.both); });
  refuse("linear: out: width", [](S& s) { s.program.linear(s.x, s.vocab.packed.segments(), s.normed); });
  refuse("linear: out: its rows", [](S& s) { s.program.linear(s.x, s.vocab.packed.segments(), s.logits); });
  refuse("linear_swiglu: weight",
         [](S& s) { s.program.linear_swiglu(s.x, s.vocab.packed.segments(), s.normed); });
  refuse("add: out: overlaps x", [](S& s) { s.program.add(s.x, s.normed, s.x); });
  refuse("add_rms_norm: out: overlaps sum",
         [](S& s) { s.program.add_rms_norm(s.x, s.normed, S::flat(s.norm), kEps, s.summed, s.summed); });
  refuse("add: y: offset", [](S& s) { s.program.add(s.x, S::columns(s.qkv, 8, kHidden), s.normed); });
  refuse("add: x: 40 rows end at", [](S& s) {
    View far = s.x;
    far.offset = S::kArena - 16;
    s.program.add(far, s.x, s.normed);
  });
  refuse("add: x: row_stride", [](S& s) {
    View thin = s.x;
    thin.row_stride = 16;
    s.program.add(thin, s.x, s.normed);
  });
  refuse("add: x: row_stride 200", [](S& s) {
    View odd = s.x;
    odd.row_stride = 200;
    s.program.add(odd, s.x, s.normed);
  });
  // Rows end with their padding, which kernels write.
  const auto narrow = [](S& s, int64_t from, int64_t size) {
    return View{s.arena.data() + from, size, 0, 32, 20, Extent::kTokens};
  };
  refuse("add: out: 40 rows end at float 1280, the arena has 1268",
         [&](S& s) { s.program.add(narrow(s, 4096, 1280), narrow(s, 8192, 1280), narrow(s, 0, 1268)); });
  refuse("add: out: overlaps y",
         [&](S& s) { s.program.add(narrow(s, 8192, 1280), narrow(s, 0, 1280), narrow(s, 1268, 1280)); });
  refuse("rms_norm: weight: length", [](S& s) { s.program.rms_norm(s.x, S::flat(s.cos), kEps, s.normed); });
  refuse("rms_norm: eps", [](S& s) { s.program.rms_norm(s.x, S::flat(s.norm), 0, s.normed); });
  refuse("embedding: token_ids: 5 entries",
         [](S& s) { s.program.embedding(s.vocab.packed.segments(), S::flat(s.context), s.x); });
  refuse("select_rows: index: 5 entries",
         [](S& s) { s.program.select_rows(s.x, S::flat(s.context), s.normed); });
  refuse("rope: cos: ", [](S& s) {
    s.program.rope(s.turned, S::flat(s.position), S::flat(s.cos), S::flat(s.sin), s.attended);
  });
  refuse("store_kv: values: block_size", [](S& s) {
    KvView values = s.layer(false);
    values.block_size = 32;
    values.head_size = 16;
    values.num_blocks = 3;
    values.num_kv_heads = 2;
    KvView keys = values;
    keys.block_size = 16;
    s.program.store_kv(s.turned, s.turned, S::flat(s.slots), keys, values);
  });
  refuse("store_kv: keys: blocks end at", [](S& s) {
    KvView keys = s.layer(true);
    ++keys.num_blocks;
    s.program.store_kv(s.turned, s.turned, S::flat(s.slots), keys, s.layer(false));
  });
  const auto store = [](S& s, const KvView& keys) {
    s.program.store_kv(s.turned, s.turned, S::flat(s.slots), keys, s.layer(false));
  };
  refuse("store_kv: values: another dtype", [&](S& s) {
    KvView keys = s.layer(true);
    keys.type = KvType::kFloat16;
    store(s, keys);
  });
  refuse("store_kv: keys: offset 6, must be a multiple of 4", [&](S& s) {
    KvView keys = s.layer(true);
    keys.offset = 6;
    store(s, keys);
  });
  // A head of a block needs room for its scales.
  refuse("store_kv: keys: head_stride 512, a block of a head has 576 bytes", [&](S& s) {
    KvView keys = s.layer(true);
    keys.type = KvType::kInt8;
    keys.head_stride = kHeadSize * kBlock;
    store(s, keys);
  });
  for (const auto field : {&KvView::head_stride, &KvView::block_stride})
    refuse("store_kv: keys: ", [&](S& s) {
      KvView keys = s.layer(true);
      keys.type = KvType::kFloat16;
      keys.num_blocks = 2;
      ++(keys.*field);
      store(s, keys);
    });
  refuse("store_kv: keys: data does not start at a multiple of 4", [&](S& s) {
    KvView keys = s.layer(true);
    keys.data += 2;
    keys.data_size -= 4;
    --keys.num_blocks;
    store(s, keys);
  });
  refuse("store_kv: slot_mapping: 39 entries", [](S& s) {
    s.slots.pop_back();
    const View k = S::columns(s.qkv, kQ, kKv);
    s.program.store_kv(k, k, S::flat(s.slots), s.layer(true), s.layer(false));
  });
  for (const int64_t head_size : {0, 24, 272})
    refuse("store_kv: keys: head_size", [&](S& s) {
      s.program.store_kv(s.x, s.x, S::flat(s.slots), kv(s, head_size, 16), kv(s, 16, 16));
    });
  for (const int64_t block_size : {0, 24})
    refuse("store_kv: keys: block_size", [&](S& s) {
      s.program.store_kv(s.x, s.x, S::flat(s.slots), kv(s, 16, block_size), kv(s, 16, 16));
    });
  refuse("rope_store: cos: columns 8, must be 16", [](S& s) {
    const Array<float> thin{s.cos.data(), {kBlocks * kBlock, 8}};
    const View k = S::columns(s.qkv, kQ, kKv);
    s.program.rope_store(s.turned, k, k, S::flat(s.position), S::flat(s.slots), thin, thin, s.layer(true),
                         s.layer(false), s.attended);
  });
  refuse("rope_store: k: width", [](S& s) {
    s.program.rope_store(s.turned, s.x, s.x, S::flat(s.position), S::flat(s.slots), S::table_of(s.cos),
                         S::table_of(s.sin), s.layer(true), s.layer(false), s.attended);
  });
  refuse("paged_attention: query_start: 5 entries", [](S& s) {
    s.program.paged_attention(s.turned, s.layer(true), s.layer(false), {s.table.data(), {kRows, kTableWidth}},
                              S::flat(s.context), S::flat(s.context), 1, s.attended);
  });
  refuse("paged_attention: block_table: 4 entries", [](S& s) {
    s.program.paged_attention(s.turned, s.layer(true), s.layer(false),
                              {s.table.data(), {kRows - 1, kTableWidth}}, S::flat(s.context),
                              S::flat(s.start), 1, s.attended);
  });
  const auto attend = [](S& s, const KvView& values) {
    s.program.paged_attention(s.turned, s.layer(true), values, {s.table.data(), {kRows, kTableWidth}},
                              S::flat(s.context), S::flat(s.start), 1, s.attended);
  };
  refuse("paged_attention: values: num_blocks", [&](S& s) {
    KvView values = s.layer(false);
    --values.num_blocks;
    attend(s, values);
  });
  refuse("paged_attention: values: num_kv_heads", [&](S& s) {
    KvView values = s.layer(false);
    --values.num_kv_heads;
    attend(s, values);
  });
  refuse("paged_attention: values: head_size", [&](S& s) {
    KvView values = s.layer(false);
    values.head_size -= kLanes;
    attend(s, values);
  });
  refuse("num_tokens: 41", [](S& s) { s.program.run({41, 1, 1}); });
  refuse("num_rows: 6", [](S& s) { s.program.run({1, 6, 1}); });
  refuse("num_logits: -1", [](S& s) { s.program.run({1, 1, -1}); });
  refuse("kernel_set: ", [](S& s) { Program(s.team, 1, 1, "sse9"); });
  refuse("max_rows: 0", [](S& s) { Program(s.team, 1, 0, nullptr); });
}

}  // namespace

int main() {
  test_bad_operands_are_named();
  return report();
}
