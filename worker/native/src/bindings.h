// What the binding files share: operands as Python holds them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "operands.h"
#include "unlocked.h"

namespace pagecast {

namespace nb = nanobind;

// Any array that can be read; what it must be is checked by us, so that errors name the argument.
using AnyArray = nb::ndarray<nb::ro>;

// Both hold the array, and with it the memory.
struct HeldView {
  View view;
  AnyArray arena;
};

struct HeldKv {
  KvView kv;
  AnyArray data;
};

// Throws std::invalid_argument that starts with `name` unless `array` holds T, C-contiguous, in host memory.
template <typename T>
Array<T> to_array(const std::string& name, const AnyArray& array, const char* dtype) {
  const auto require = [&](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(name + ": " + what);
  };
  if (array.dtype() != nb::dtype<T>()) throw std::invalid_argument(name + ": must be " + dtype);
  require(array.device_type() == nb::device::cpu::value, "must be in host memory");
  Array<T> out{static_cast<const T*>(array.data()), {}};
  int64_t stride = 1;
  for (size_t dim = array.ndim(); dim-- > 0;) {
    const auto length = static_cast<int64_t>(array.shape(dim));
    require(length < 2 || array.stride(dim) == stride, "must be C-contiguous");
    stride *= length;
    out.shape.insert(out.shape.begin(), length);
  }
  return out;
}

inline Array<float> to_floats(const std::string& name, const AnyArray& array) {
  return to_array<float>(name, array, "float32");
}

void bind_program(nb::module_& module);
void bind_sampler(nb::module_& module);

}  // namespace pagecast
