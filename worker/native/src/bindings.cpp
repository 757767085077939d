// The Python module, but Program: weights, threads, operands. Types and documentation are in _core.pyi.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "attention.h"
#include "dispatch.h"
#include "pack.h"
#include "team.h"

namespace pagecast {
namespace {

Extent to_extent(const std::string& extent) {
  if (extent == "T") return Extent::kTokens;
  if (extent == "R") return Extent::kRows;
  if (extent == "L") return Extent::kLogits;
  throw std::invalid_argument("extent: \"" + extent + "\", must be \"T\", \"R\" or \"L\"");
}

// Kernels write there, so an array that only lets itself be read is refused by its type.
using Writable = nb::ndarray<>;

Array<float> to_memory(const char* name, const Writable& array) {
  const Array<float> floats = to_floats(name, AnyArray(array));
  if (floats.data == nullptr) throw std::invalid_argument(std::string(name) + ": no memory");
  return floats;
}

KvType to_kv_type(const std::string& dtype) {
  if (dtype == "float32") return KvType::kFloat32;
  if (dtype == "float16") return KvType::kFloat16;
  if (dtype == "bfloat16") return KvType::kBFloat16;
  if (dtype == "int8") return KvType::kInt8;
  throw std::invalid_argument("dtype: \"" + dtype +
                              "\", must be \"float32\", \"float16\", \"bfloat16\" or \"int8\"");
}

void make_view(HeldView* self, const Writable& arena, int64_t offset, int64_t row_stride, int64_t width,
               const std::string& extent) {
  const Array<float> floats = to_memory("arena", arena);
  if (floats.shape.size() != 1) throw std::invalid_argument("arena: must have one dimension");
  new (self) HeldView{
      {const_cast<float*>(floats.data), floats.shape[0], offset, row_stride, width, to_extent(extent)},
      AnyArray(arena)};
}

void make_kv(HeldKv* self, const Writable& data, int64_t offset, int64_t num_blocks, int64_t block_stride,
             int64_t head_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
             const std::string& dtype) {
  const Array<uint8_t> bytes = to_array<uint8_t>("data", AnyArray(data), "uint8");
  if (bytes.data == nullptr || bytes.shape.size() != 1)
    throw std::invalid_argument("data: must have one dimension");
  auto* first = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(bytes.data));
  new (self) HeldKv{{first, bytes.shape[0], offset, num_blocks, block_stride, head_stride, num_kv_heads,
                     head_size, block_size, to_kv_type(dtype)},
                    AnyArray(data)};
}

// A part as Python has it: its rows, and the array that holds them.
struct HeldPart {
  Part part;
  int64_t num_columns;
  AnyArray data;
};

Array<uint8_t> to_rows(const std::string& name, const AnyArray& array) {
  const auto bytes = to_array<uint8_t>(name, array, "uint8");
  if (bytes.shape.size() != 2) throw std::invalid_argument(name + ": must have two dimensions");
  return bytes;
}

void make_gguf_part(HeldPart* self, const std::string& kind, const AnyArray& data) {
  const KindInfo& info = kind_named(kind);
  const Array<uint8_t> bytes = to_rows("data", data);
  if (bytes.shape[1] % info.block_bytes != 0) {
    throw std::invalid_argument("data: " + std::to_string(bytes.shape[1]) + " bytes a row, a block of " +
                                info.name + " has " + std::to_string(info.block_bytes));
  }
  const int64_t num_columns = bytes.shape[1] / info.block_bytes * info.block_columns;
  new (self) HeldPart{{bytes.data, bytes.shape[0], info.kind}, num_columns, data};
}

HeldPart to_part(const std::string& name, nb::handle object) {
  HeldPart held;
  if (nb::try_cast(object, held)) return held;
  AnyArray array;
  if (!nb::try_cast(object, array)) throw std::invalid_argument(name + ": neither an array nor a GgufPart");
  const Array<float> floats = to_floats(name, array);
  if (floats.shape.size() != 2) throw std::invalid_argument(name + ": must have two dimensions");
  return {{floats.data, floats.shape[0], Kind::kF32}, floats.shape[1], array};
}

void make_packed(PackedMatrix* self, const std::vector<nb::object>& parts) {
  if (parts.empty()) throw std::invalid_argument("parts: none");
  std::vector<HeldPart> held;
  std::vector<Part> rows;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "parts[" + std::to_string(i) + "]";
    held.push_back(to_part(name, parts[i]));
    if (held[i].num_columns != held[0].num_columns) {
      throw std::invalid_argument(name + ": " + std::to_string(held[i].num_columns) +
                                  " columns, those before have " + std::to_string(held[0].num_columns));
    }
    rows.push_back(held[i].part);
  }
  const Unlocked unlocked;
  new (self) PackedMatrix(rows, held[0].num_columns);
}

nb::tuple formats_of(const PackedMatrix& packed) {
  nb::list names;
  for (const Kind kind : packed.kinds()) names.append(info_of(kind).name);
  return nb::tuple(names);
}

void make_team(Team* self, int num_threads, const std::optional<std::vector<int>>& cpus) {
  if (cpus && cpus->empty()) throw std::invalid_argument("cpus: none");
  new (self) Team(num_threads, cpus.value_or(std::vector<int>()));
}

}  // namespace
}  // namespace pagecast

NB_MODULE(_core, module) {
  using namespace pagecast;
  using namespace nb::literals;

  // A daemon thread's or a module's reference may well outlive the interpreter: nothing to alarm a user with.
  nb::set_leak_warnings(false);
  module.attr("KERNEL_VERSION") = kKernelVersion;
  module.attr("LANES") = kLanes;
  module.attr("MAX_HEAD_SIZE") = kMaxHeadSize;
  module.attr("MAX_THREADS") = +Team::kMaxThreads;
  module.def("kernel_sets", [] {
    std::vector<std::string> names;
    for (const Kernels* set : kernel_sets()) names.emplace_back(set->name);
    return names;
  });
  module.def("default_kernel_set", [] { return std::string(kernels_for().name); });
  module.def("is_fused", [](const std::string& name) { return kernels_for(name.c_str()).fused; }, "name"_a);

  nb::class_<HeldPart>(module, "GgufPart")
      .def("__init__", &make_gguf_part, "kind"_a, "data"_a)
      .def_prop_ro("kind", [](const HeldPart& self) { return info_of(self.part.kind).name; })
      .def_prop_ro("num_rows", [](const HeldPart& self) { return self.part.num_rows; })
      .def_prop_ro("num_columns", [](const HeldPart& self) { return self.num_columns; });
  module.def("gguf_kinds", [] {
    std::vector<std::string> names;
    for (const KindInfo& info : kinds()) names.emplace_back(info.name);
    return names;
  });

  nb::class_<PackedMatrix>(module, "PackedMatrix")
      .def("__init__", &make_packed, "parts"_a)
      .def_prop_ro("num_rows", &PackedMatrix::num_rows)
      .def_prop_ro("num_columns", &PackedMatrix::num_columns)
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
      .def_prop_ro("formats", &formats_of)
      .def_prop_ro("is_quantised", &PackedMatrix::is_quantised);

  nb::class_<Team>(module, "Team")
      .def("__init__", &make_team, "num_threads"_a, "cpus"_a = nb::none())
      .def_prop_ro("num_threads", &Team::size)
      .def("close", &Team::close, nb::call_guard<Unlocked>());

  nb::class_<HeldView>(module, "View")
      .def("__init__", &make_view, "arena"_a, "offset"_a, "row_stride"_a, "width"_a, "extent"_a);

  nb::class_<HeldKv>(module, "KvLayer")
      .def("__init__", &make_kv, "data"_a, "offset"_a, "num_blocks"_a, "block_stride"_a, "head_stride"_a,
           "num_kv_heads"_a, "head_size"_a, "block_size"_a, "dtype"_a = "float32");

  bind_program(module);
  bind_sampler(module);
}
