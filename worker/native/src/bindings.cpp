// The Python module, but Program: weights, threads, operands. Types and documentation are in _core.pyi.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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

int64_t size_of(const Array<float>& array) {
  int64_t size = 1;
  for (const int64_t length : array.shape) size *= length;
  return size;
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
             int64_t head_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size) {
  const Array<float> floats = to_memory("data", data);
  new (self) HeldKv{{const_cast<float*>(floats.data), size_of(floats), offset, num_blocks, block_stride,
                     head_stride, num_kv_heads, head_size, block_size},
                    AnyArray(data)};
}

void make_packed(PackedMatrix* self, const std::vector<AnyArray>& parts) {
  if (parts.empty()) throw std::invalid_argument("parts: none");
  std::vector<Part> rows;
  int64_t num_columns = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "parts[" + std::to_string(i) + "]";
    const Array<float> part = to_floats(name, parts[i]);
    if (part.shape.size() != 2) throw std::invalid_argument(name + ": must have two dimensions");
    if (i == 0) num_columns = part.shape[1];
    if (part.shape[1] != num_columns) {
      throw std::invalid_argument(name + ": " + std::to_string(part.shape[1]) +
                                  " columns, those before have " + std::to_string(num_columns));
    }
    rows.push_back({part.data, part.shape[0]});
  }
  nb::gil_scoped_release release;
  new (self) PackedMatrix(rows, num_columns);
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

  nb::class_<PackedMatrix>(module, "PackedMatrix")
      .def("__init__", &make_packed, "parts"_a)
      .def_prop_ro("num_rows", &PackedMatrix::num_rows)
      .def_prop_ro("num_columns", &PackedMatrix::num_columns)
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes);

  nb::class_<Team>(module, "Team")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &Team::size)
      .def("close", &Team::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<HeldView>(module, "View")
      .def("__init__", &make_view, "arena"_a, "offset"_a, "row_stride"_a, "width"_a, "extent"_a);

  nb::class_<HeldKv>(module, "KvLayer")
      .def("__init__", &make_kv, "data"_a, "offset"_a, "num_blocks"_a, "block_stride"_a, "head_stride"_a,
           "num_kv_heads"_a, "head_size"_a, "block_size"_a);

  bind_program(module);
}
