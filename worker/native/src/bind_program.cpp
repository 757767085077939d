// Program for Python: turns arrays into operands and holds them while the program lives.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "bindings.h"
#include "held_sampler.h"
#include "pack.h"
#include "program.h"

namespace pagecast {
namespace {

Activations to_activations(const std::string& name) {
  if (name == "float32") return Activations::kFloat32;
  if (name == "int8") return Activations::kInt8;
  if (name == "bfloat16") return Activations::kBFloat16;
  throw std::invalid_argument("activations: \"" + name + "\", must be \"float32\", \"int8\" or \"bfloat16\"");
}

const char* name_of(Activations activations) {
  if (activations == Activations::kInt8) return "int8";
  return activations == Activations::kBFloat16 ? "bfloat16" : "float32";
}

// A program and the arrays that its launches point to. Objects (weights, views, layers, the team) are held by
// nanobind, see keep_alive below.
class HeldProgram {
 public:
  HeldProgram(Team& team, int64_t max_tokens, int64_t max_rows, const std::optional<std::string>& kernel_set,
              const std::string& activations)
      : program_(team, max_tokens, max_rows, kernel_set ? kernel_set->c_str() : nullptr,
                 to_activations(activations)) {}

  const Program& program() const { return program_; }

  int64_t run(int64_t num_tokens, int64_t num_rows, int64_t num_logits) {
    const Unlocked unlocked;
    return program_.run({num_tokens, num_rows, num_logits});
  }

  nb::tuple run_and_draw(int64_t num_tokens, int64_t num_rows, int64_t num_logits, HeldSampler& sampler,
                         int64_t num_draws, const std::optional<AnyArray>& entries) {
    const HeldSampler::Entries table = HeldSampler::to_entries(entries);
    Program::Times times{};
    {
      const Unlocked unlocked;
      times = program_.run_and_draw({num_tokens, num_rows, num_logits}, sampler.sampler(), num_draws,
                                    table.data, table.count);
    }
    nb::list ids;
    for (int64_t row = 0; row < num_draws; ++row) ids.append(sampler.sampler().ids()[row]);
    return nb::make_tuple(times.kernel_ns, times.draw_ns, ids);
  }

  void embedding(const PackedMatrix& weight, const AnyArray& token_ids, const HeldView& out) {
    program_.embedding(weight.segments(), ints("embedding: token_ids", token_ids), out.view);
    hold(token_ids);
  }

  void rms_norm(const HeldView& x, const AnyArray& weight, float eps, const HeldView& out) {
    program_.rms_norm(x.view, to_floats("rms_norm: weight", weight), eps, out.view);
    hold(weight);
  }

  void add_rms_norm(const HeldView& x, const HeldView& y, const AnyArray& weight, float eps,
                    const HeldView& sum, const HeldView& out) {
    program_.add_rms_norm(x.view, y.view, to_floats("add_rms_norm: weight", weight), eps, sum.view, out.view);
    hold(weight);
  }

  void add(const HeldView& x, const HeldView& y, const HeldView& out) {
    program_.add(x.view, y.view, out.view);
  }

  void swiglu(const HeldView& gate, const HeldView& up, const HeldView& out) {
    program_.swiglu(gate.view, up.view, out.view);
  }

  void select_rows(const HeldView& x, const AnyArray& index, const HeldView& out) {
    program_.select_rows(x.view, ints("select_rows: index", index), out.view);
    hold(index);
  }

  void linear(const HeldView& x, const PackedMatrix& weight, const HeldView& out) {
    program_.linear(x.view, weight.segments(), out.view);
  }

  void linear_swiglu(const HeldView& x, const PackedMatrix& weight, const HeldView& out) {
    program_.linear_swiglu(x.view, weight.segments(), out.view);
  }

  void rope(const HeldView& x, const AnyArray& position, const AnyArray& cos, const AnyArray& sin,
            const HeldView& out) {
    program_.rope(x.view, ints("rope: position", position), to_floats("rope: cos", cos),
                  to_floats("rope: sin", sin), out.view);
    hold(position, cos, sin);
  }

  void store_kv(const HeldView& k, const HeldView& v, const AnyArray& slot_mapping, const HeldKv& keys,
                const HeldKv& values) {
    program_.store_kv(k.view, v.view, longs("store_kv: slot_mapping", slot_mapping), keys.kv, values.kv);
    hold(slot_mapping);
  }

  void rope_store(const HeldView& q, const HeldView& k, const HeldView& v, const AnyArray& position,
                  const AnyArray& slot_mapping, const AnyArray& cos, const AnyArray& sin, const HeldKv& keys,
                  const HeldKv& values, const HeldView& out) {
    program_.rope_store(q.view, k.view, v.view, ints("rope_store: position", position),
                        longs("rope_store: slot_mapping", slot_mapping), to_floats("rope_store: cos", cos),
                        to_floats("rope_store: sin", sin), keys.kv, values.kv, out.view);
    hold(position, slot_mapping, cos, sin);
  }

  void paged_attention(const HeldView& q, const HeldKv& keys, const HeldKv& values,
                       const AnyArray& block_table, const AnyArray& context_len, const AnyArray& query_start,
                       float scale, const HeldView& out) {
    program_.paged_attention(q.view, keys.kv, values.kv, ints("paged_attention: block_table", block_table),
                             ints("paged_attention: context_len", context_len),
                             ints("paged_attention: query_start", query_start), scale, out.view);
    hold(block_table, context_len, query_start);
  }

  void dense_attention(const HeldView& q, const AnyArray& keys, const AnyArray& values,
                       const AnyArray& context_len, const AnyArray& query_start, float scale,
                       const HeldView& out) {
    program_.dense_attention(q.view, to_floats("dense_attention: keys", keys),
                             to_floats("dense_attention: values", values),
                             ints("dense_attention: context_len", context_len),
                             ints("dense_attention: query_start", query_start), scale, out.view);
    hold(values, context_len, query_start);
  }

 private:
  static Array<int32_t> ints(const char* name, const AnyArray& array) {
    return to_array<int32_t>(name, array, "int32");
  }
  static Array<int64_t> longs(const char* name, const AnyArray& array) {
    return to_array<int64_t>(name, array, "int64");
  }
  template <typename... Arrays>
  void hold(const Arrays&... arrays) {
    (held_.push_back(arrays), ...);
  }

  std::vector<AnyArray> held_;
  Program program_;
};

}  // namespace

void bind_program(nb::module_& module) {
  using namespace nb::literals;
  using Held = HeldProgram;
  // keep_alive<1, n>: the program (1) holds argument n of the method, which counts the program itself.
  nb::class_<Held>(module, "Program")
      .def(nb::init<Team&, int64_t, int64_t, const std::optional<std::string>&, const std::string&>(),
           "team"_a, nb::kw_only(), "max_tokens"_a, "max_rows"_a, "kernel_set"_a = nb::none(),
           "activations"_a = "float32", nb::keep_alive<1, 2>())
      .def("embedding", &Held::embedding, "weight"_a, "token_ids"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 4>())
      .def("rms_norm", &Held::rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 5>())
      .def("add_rms_norm", &Held::add_rms_norm, "x"_a, "y"_a, "weight"_a, "eps"_a, "sum"_a, "out"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>())
      .def("add", &Held::add, "x"_a, "y"_a, "out"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>())
      .def("swiglu", &Held::swiglu, "gate"_a, "up"_a, "out"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>())
      .def("select_rows", &Held::select_rows, "x"_a, "index"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 4>())
      .def("linear", &Held::linear, "x"_a, "weight"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("linear_swiglu", &Held::linear_swiglu, "x"_a, "weight"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("rope", &Held::rope, "x"_a, "position"_a, "cos"_a, "sin"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 6>())
      .def("store_kv", &Held::store_kv, "k"_a, "v"_a, "slot_mapping"_a, "keys"_a, "values"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("rope_store", &Held::rope_store, "q"_a, "k"_a, "v"_a, "position"_a, "slot_mapping"_a, "cos"_a,
           "sin"_a, "keys"_a, "values"_a, "out"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 11>())
      .def("paged_attention", &Held::paged_attention, "q"_a, "keys"_a, "values"_a, "block_table"_a,
           "context_len"_a, "query_start"_a, "scale"_a, "out"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 9>())
      .def("dense_attention", &Held::dense_attention, "q"_a, "keys"_a, "values"_a, "context_len"_a,
           "query_start"_a, "scale"_a, "out"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 8>())
      .def("run", &Held::run, "num_tokens"_a, "num_rows"_a, "num_logits"_a)
      .def("run_and_draw", &Held::run_and_draw, "num_tokens"_a, "num_rows"_a, "num_logits"_a, "sampler"_a,
           "num_draws"_a, "entries"_a = nb::none())
      .def_prop_ro("num_launches", [](const Held& self) { return self.program().num_launches(); })
      .def_prop_ro("kernel_set", [](const Held& self) { return std::string(self.program().kernel_set()); })
      .def_prop_ro("activations", [](const Held& self) { return name_of(self.program().activations()); })
      .def_prop_ro("busy_ns", [](const Held& self) { return self.program().busy_ns(); })
      .def_prop_ro("launch_ns", [](const Held& self) { return self.program().launch_ns(); });
}

}  // namespace pagecast
