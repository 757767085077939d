// A weight packed in panels, in memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gguf.h"

namespace pagecast {

// One matrix of a stack: `num_rows` rows of the stack's columns as a GGUF file has them, one after the other.
// `data` needs no alignment.
struct Part {
  const void* data;
  int64_t num_rows;
  Kind kind = Kind::kF32;
};

// Parts stacked by rows and cut into panels (see Panels). Parts of one kind that follow each other make one
// segment. Immutable; 64-byte aligned, on huge pages.
class PackedMatrix {
 public:
  // Reads the parts once, from one end to the other. Throws std::invalid_argument where there is no row or no
  // column, a part has no data, columns are not whole blocks of a part's kind, or a segment that is not the
  // last ends within a panel.
  PackedMatrix(std::span<const Part> parts, int64_t num_columns);

  // Each with a number of rows of its own; all but the last have a multiple of kLanes.
  std::span<const Panels> segments() const { return segments_; }
  // Of each segment.
  const std::vector<Kind>& kinds() const { return kinds_; }
  // The only segment. Throws std::logic_error where there are more.
  const Panels& panels() const;
  int64_t num_rows() const { return num_rows_; }
  int64_t num_columns() const { return num_columns_; }
  // Of the panels, the last one's zero rows included.
  size_t num_bytes() const { return num_bytes_; }
  // Whether every segment is.
  bool is_quantised() const;

 private:
  int64_t num_rows_ = 0;
  int64_t num_columns_;
  size_t num_bytes_ = 0;
  std::vector<Panels> segments_;
  std::vector<Kind> kinds_;
  std::shared_ptr<std::byte> data_;
};

}  // namespace pagecast
