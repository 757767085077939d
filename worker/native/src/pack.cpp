#include "pack.h"

#include <cstdlib>
#include <new>
#include <stdexcept>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace pagecast {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

// Whole huge pages are asked for where there is at least one: a weight is read from end to end at every
// token.
Weight* allocate(size_t num_bytes) {
  const size_t alignment = num_bytes >= kHugePage ? kHugePage : kCacheLine;
  const size_t padded = (num_bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, padded);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
  // Advice alone: where the kernel declines, small pages serve as well, only slower.
  if (alignment == kHugePage) madvise(memory, padded, MADV_HUGEPAGE);
#endif
  return static_cast<Weight*>(memory);
}

int64_t count_rows(std::span<const Part> parts) {
  int64_t num_rows = 0;
  for (const Part& part : parts) {
    if (part.num_rows <= 0) throw std::invalid_argument("parts: each must have a row at least");
    if (part.data == nullptr) throw std::invalid_argument("parts: one has no data");
    num_rows += part.num_rows;
  }
  if (num_rows == 0) throw std::invalid_argument("parts: there is none");
  return num_rows;
}

}  // namespace

PackedMatrix::PackedMatrix(std::span<const Part> parts, int64_t num_columns)
    : panels_{nullptr, count_rows(parts), num_columns} {
  if (num_columns <= 0) throw std::invalid_argument("num_columns: must be positive");
  data_.reset(allocate(num_bytes()));
  panels_.data = data_.get();
  int64_t row = 0;
  for (const Part& part : parts)
    for (int64_t i = 0; i < part.num_rows; ++i, ++row) {
      Weight* column = data_.get() + row / kLanes * num_columns * kLanes + row % kLanes;
      for (int64_t k = 0; k < num_columns; ++k) column[k * kLanes] = part.data[i * num_columns + k];
    }
  for (; row % kLanes != 0; ++row) {
    Weight* column = data_.get() + row / kLanes * num_columns * kLanes + row % kLanes;
    for (int64_t k = 0; k < num_columns; ++k) column[k * kLanes] = 0;
  }
}

size_t PackedMatrix::num_bytes() const {
  return static_cast<size_t>(panels_.num_panels() * kLanes * panels_.num_columns) * sizeof(Weight);
}

void PackedMatrix::Free::operator()(Weight* data) const { std::free(data); }

}  // namespace pagecast
