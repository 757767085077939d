// A weight packed in panels, in memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels.h"

namespace pagecast {

// One matrix of a stack: `num_rows` rows of the stack's columns, row-major and contiguous.
struct Part {
  const float* data;
  int64_t num_rows;
};

// Parts stacked by rows and cut into panels (see Panels). Immutable; 64-byte aligned, in huge pages where
// large.
class PackedMatrix {
 public:
  // Copies the parts. Throws std::invalid_argument where there is no row or no column, or a part has no data.
  PackedMatrix(std::span<const Part> parts, int64_t num_columns);

  const Panels& panels() const { return panels_; }
  int64_t num_rows() const { return panels_.num_rows; }
  int64_t num_columns() const { return panels_.num_columns; }
  // Of the panels, the last one's zero rows included.
  size_t num_bytes() const;

 private:
  struct Free {
    void operator()(Weight* data) const;
  };
  Panels panels_;
  std::unique_ptr<Weight, Free> data_;
};

}  // namespace pagecast
