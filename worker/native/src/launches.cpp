// The launches that are cut by rows: what each checks and which kernel it calls.
#include <limits>

#include "program.h"

namespace pagecast {
namespace {

// A key's elements go to a cache line each.
constexpr int64_t kStoreCost = 32;

int as_int(int64_t value) { return static_cast<int>(value); }

KvShape shape_of(const KvView& keys, int64_t num_heads) {
  return {as_int(keys.block_size), as_int(keys.head_size), as_int(num_heads), as_int(keys.num_kv_heads),
          keys.type};
}

void check_store(const Checks& checks, const View& k, const View& v, const Array<int64_t>& slot_mapping,
                 const KvView& keys, const KvView& values, int64_t max_tokens) {
  checks.kv("keys", keys);
  checks.kv("values", values);
  checks.same_shape(keys, values);
  checks.view("k", k, keys.num_kv_heads * keys.head_size, Extent::kTokens);
  checks.view("v", v, keys.num_kv_heads * keys.head_size, Extent::kTokens);
  checks.array("slot_mapping", slot_mapping, 1, max_tokens);
}

}  // namespace

void Program::check_rope(const Checks& checks, const Array<int32_t>& position, const Array<float>& cos,
                         const Array<float>& sin, int64_t head_size) const {
  checks.array("position", position, 1, capacity_.tokens);
  checks.array("cos", cos, 2, 1);
  checks.array("sin", sin, 2, 1);
  checks.equal("cos", "columns", cos.shape[1], head_size / 2);
  checks.require(sin.shape == cos.shape, "sin", "another shape than cos");
}

void Program::rms_norm(const View& x, const Array<float>& weight, float eps, const View& out) {
  const Checks checks = this->checks("rms_norm");
  checks.view("x", x);
  checks.array("weight", weight, 1, 1);
  checks.equal("weight", "length", weight.shape[0], x.width);
  checks.require(eps > 0.0f && eps < std::numeric_limits<float>::infinity(), "eps", "must be positive");
  checks.view("out", out, x.width, x.extent);
  checks.apart("out", out, "x", x);
  push_rows(out, x.width,
            [kernel = kernels_.rms_norm, from = x.rows(), scale = weight.data, width = as_int(x.width), eps,
             to = out.rows()](const Share& share) {
              kernel(from, scale, width, eps, share.first, share.last, to);
            });
}

void Program::add_rms_norm(const View& x, const View& y, const Array<float>& weight, float eps,
                           const View& sum, const View& out) {
  const Checks checks = this->checks("add_rms_norm");
  checks.view("x", x);
  checks.view("y", y, x.width, x.extent);
  checks.array("weight", weight, 1, 1);
  checks.equal("weight", "length", weight.shape[0], x.width);
  checks.require(eps > 0.0f && eps < std::numeric_limits<float>::infinity(), "eps", "must be positive");
  checks.view("sum", sum, x.width, x.extent);
  checks.view("out", out, x.width, x.extent);
  checks.apart("sum", sum, "x", x);
  checks.apart("sum", sum, "y", y);
  checks.apart("out", out, "x", x);
  checks.apart("out", out, "y", y);
  checks.apart("out", out, "sum", sum);
  push_rows(out, 2 * x.width,
            [kernel = kernels_.add_rms_norm, a = x.rows(), b = y.rows(), scale = weight.data,
             width = as_int(x.width), eps, total = sum.rows(), to = out.rows()](const Share& share) {
              kernel(a, b, scale, width, eps, share.first, share.last, total, to);
            });
}

void Program::add(const View& x, const View& y, const View& out) {
  const Checks checks = this->checks("add");
  checks.view("x", x);
  checks.view("y", y, x.width, x.extent);
  checks.view("out", out, x.width, x.extent);
  checks.apart("out", out, "x", x);
  checks.apart("out", out, "y", y);
  push_rows(out, x.width,
            [kernel = kernels_.add, a = x.rows(), b = y.rows(), width = as_int(x.width),
             to = out.rows()](const Share& share) { kernel(a, b, width, share.first, share.last, to); });
}

void Program::swiglu(const View& gate, const View& up, const View& out) {
  const Checks checks = this->checks("swiglu");
  checks.view("gate", gate);
  checks.view("up", up, gate.width, gate.extent);
  checks.view("out", out, gate.width, gate.extent);
  checks.apart("out", out, "gate", gate);
  checks.apart("out", out, "up", up);
  push_rows(out, 4 * gate.width,
            [kernel = kernels_.swiglu, g = gate.rows(), u = up.rows(), width = as_int(gate.width),
             to = out.rows()](const Share& share) { kernel(g, u, width, share.first, share.last, to); });
}

void Program::select_rows(const View& x, const Array<int32_t>& index, const View& out) {
  const Checks checks = this->checks("select_rows");
  checks.view("x", x);
  checks.view("out", out, x.width, out.extent);
  checks.array("index", index, 1, capacity_.of(out.extent));
  checks.apart("out", out, "x", x);
  push_rows(
      out, x.width,
      [kernel = kernels_.select_rows, from = x.rows(), rows = index.data, width = as_int(x.width),
       to = out.rows()](const Share& share) { kernel(from, rows, width, share.first, share.last, to); });
}

void Program::rope(const View& x, const Array<int32_t>& position, const Array<float>& cos,
                   const Array<float>& sin, const View& out) {
  const Checks checks = this->checks("rope");
  checks.view("x", x, x.width, Extent::kTokens);
  checks.array("cos", cos, 2, 1);
  const int64_t head_size = 2 * cos.shape[1];
  checks.require(head_size > 0 && x.width % head_size == 0, "x",
                 "width " + std::to_string(x.width) + ", must be a multiple of the head size " +
                     std::to_string(head_size));
  check_rope(checks, position, cos, sin, head_size);
  checks.view("out", out, x.width, Extent::kTokens);
  checks.apart("out", out, "x", x);
  push_rows(out, 2 * x.width,
            [kernel = kernels_.rope, from = x.rows(), heads = as_int(x.width / head_size),
             size = as_int(head_size), at = position.data, table = Rope{cos.data, sin.data}, to = out.rows()](
                const Share& share) { kernel(from, heads, size, at, table, share.first, share.last, to); });
}

void Program::store_kv(const View& k, const View& v, const Array<int64_t>& slot_mapping, const KvView& keys,
                       const KvView& values) {
  const Checks checks = this->checks("store_kv");
  check_store(checks, k, v, slot_mapping, keys, values, capacity_.tokens);
  push(Extent::kTokens, 0, kStoreCost * k.width,
       [kernel = kernels_.store_kv, from_k = k.rows(), from_v = v.rows(), slots = slot_mapping.data,
        key_layer = keys.layer(), value_layer = values.layer(),
        shape = shape_of(keys, keys.num_kv_heads)](const Share& share) {
         kernel(from_k, from_v, slots, key_layer, value_layer, shape, share.first, share.last);
       });
}

void Program::rope_store(const View& q, const View& k, const View& v, const Array<int32_t>& position,
                         const Array<int64_t>& slot_mapping, const Array<float>& cos, const Array<float>& sin,
                         const KvView& keys, const KvView& values, const View& out) {
  const Checks checks = this->checks("rope_store");
  check_store(checks, k, v, slot_mapping, keys, values, capacity_.tokens);
  checks.view("q", q, q.width, Extent::kTokens);
  checks.require(q.width % (keys.num_kv_heads * keys.head_size) == 0, "q",
                 "width " + std::to_string(q.width) + ", must be a multiple of that of k");
  check_rope(checks, position, cos, sin, keys.head_size);
  checks.view("out", out, q.width, Extent::kTokens);
  checks.apart("out", out, "q", q);
  checks.apart("out", out, "k", k);
  checks.apart("out", out, "v", v);
  push(Extent::kTokens, 0, 2 * q.width + kStoreCost * k.width,
       [kernel = kernels_.rope_store, from_q = q.rows(), from_k = k.rows(), from_v = v.rows(),
        at = position.data, slots = slot_mapping.data, table = Rope{cos.data, sin.data},
        key_layer = keys.layer(), value_layer = values.layer(),
        shape = shape_of(keys, q.width / keys.head_size), to = out.rows()](const Share& share) {
         kernel(from_q, from_k, from_v, at, slots, table, key_layer, value_layer, shape, share.first,
                share.last, to);
       });
}

}  // namespace pagecast
