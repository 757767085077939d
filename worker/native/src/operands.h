// What a launch is given, as plain values, and the checks of it. Knows memory and shapes; neither Python nor
// what an operator computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace pagecast {

// What the first dimension of a view counts.
enum class Extent { kTokens, kRows, kLogits };

struct Sizes {
  int64_t tokens;
  int64_t rows;
  int64_t logits;
  int64_t of(Extent extent) const {
    return extent == Extent::kTokens ? tokens : extent == Extent::kRows ? rows : logits;
  }
  bool operator==(const Sizes&) const = default;
};

// Rows of floats in an arena of `arena_size` floats, from `offset` on.
struct View {
  float* arena;
  int64_t arena_size;
  int64_t offset;
  int64_t row_stride;
  int64_t width;
  Extent extent;

  Rows rows() const { return {arena + offset, row_stride}; }
};

// A C-contiguous array that outlives the program.
template <typename T>
struct Array {
  const T* data;
  std::vector<int64_t> shape;
};

// One layer's keys or values within a pool of `data_size` bytes; offset and strides are bytes too. See
// KvLayer for the order within a block.
struct KvView {
  std::byte* data;
  int64_t data_size;
  int64_t offset;
  int64_t num_blocks;
  int64_t block_stride;
  int64_t head_stride;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t block_size;
  KvType type = KvType::kFloat32;

  KvLayer layer() const { return {data + offset, block_stride, head_stride}; }
};

// Checks for one launch: every message starts with the operator and the argument.
class Checks {
 public:
  Checks(const char* op, Sizes capacity) : op_(op), capacity_(capacity) {}

  // Throws std::invalid_argument("op: argument: what") unless `holds`.
  void require(bool holds, const char* argument, const std::string& what) const {
    if (!holds) throw std::invalid_argument(std::string(op_) + ": " + argument + ": " + what);
  }

  // Aligned to kLanes, with all rows of the capacity, padding included, inside the arena.
  void view(const char* name, const View& view) const;
  // `view`, of this width and extent.
  void view(const char* name, const View& view, int64_t width, Extent extent) const;
  // No float of `out` is one of `in`.
  void apart(const char* out_name, const View& out, const char* in_name, const View& in) const;
  // head_size and block_size suit the kernels and every block lies inside the pool.
  void kv(const char* name, const KvView& kv) const;
  void same_shape(const KvView& keys, const KvView& values) const;

  // `num_dims` dimensions, the first with at least `min_length` entries.
  template <typename T>
  void array(const char* name, const Array<T>& array, size_t num_dims, int64_t min_length) const {
    require(array.shape.size() == num_dims, name,
            std::to_string(array.shape.size()) + " dimensions, must be " + std::to_string(num_dims));
    require(array.shape[0] >= min_length, name,
            std::to_string(array.shape[0]) + " entries, must be at least " + std::to_string(min_length));
  }

  void equal(const char* argument, const char* what, int64_t actual, int64_t expected) const {
    require(actual == expected, argument,
            std::string(what) + " " + std::to_string(actual) + ", must be " + std::to_string(expected));
  }

 private:
  const char* op_;
  Sizes capacity_;
};

}  // namespace pagecast
