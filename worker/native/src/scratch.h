// Floats on a cache line's border, as kernels like them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace pagecast {

struct FreeFloats {
  void operator()(float* data) const { std::free(data); }
};

using Floats = std::unique_ptr<float[], FreeFloats>;

// `count` floats, not set. Throws std::bad_alloc.
inline Floats make_floats(int64_t count) {
  const auto bytes = static_cast<std::size_t>(round_up(count)) * sizeof(float);
  Floats floats(static_cast<float*>(std::aligned_alloc(64, bytes)));
  if (!floats) throw std::bad_alloc();
  return floats;
}

}  // namespace pagecast
