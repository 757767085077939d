// The weights that a thread will read first in a launch to come, asked for while it has to wait: memory
// would idle meanwhile. Knows neither launches nor teams.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pagecast {

// Memory that a launch reads in the order of its units, each unit its own part and only that: unit u of
// [first_unit, first_unit + num_units) reads bytes_per_unit from data + (u - first_unit) * bytes_per_unit.
struct WeightStream {
  const std::byte* data;
  int64_t bytes_per_unit;
  int64_t first_unit;
  int64_t num_units;
};

inline constexpr int64_t kCacheLine = 64;
// What one look asks for: as much as a core has under way at once, so that it returns at once.
inline constexpr int64_t kBytesPerLook = 1024;

// Walks units [first, last) of `streams`, unit by unit, each of its streams in turn, up to `max_bytes`.
// Touch is called with the address of every line.
class WeightsAhead {
 public:
  WeightsAhead() = default;
  WeightsAhead(std::span<const WeightStream> streams, int64_t first, int64_t last, int64_t max_bytes)
      : streams_(streams), unit_(first), last_(last), left_(max_bytes) {}

  // Touches up to kBytesPerLook; false once there is nothing more to touch.
  template <typename Touch>
  bool look(Touch&& touch) {
    for (int64_t bytes = 0; bytes < kBytesPerLook; bytes += kCacheLine) {
      const std::byte* line = next();
      if (line == nullptr) return false;
      touch(line);
    }
    return true;
  }

 private:
  const std::byte* next() {
    for (; left_ > 0 && unit_ < last_; ++unit_, stream_ = 0) {
      for (; stream_ < streams_.size(); ++stream_, offset_ = 0) {
        const WeightStream& stream = streams_[stream_];
        const int64_t unit = unit_ - stream.first_unit;
        if (unit < 0 || unit >= stream.num_units || offset_ >= stream.bytes_per_unit) continue;
        const std::byte* line = stream.data + unit * stream.bytes_per_unit + offset_;
        offset_ += kCacheLine;
        left_ -= kCacheLine;
        return line;
      }
    }
    return nullptr;
  }

  std::span<const WeightStream> streams_;
  int64_t unit_ = 0;
  int64_t last_ = 0;
  int64_t left_ = 0;
  int64_t offset_ = 0;
  size_t stream_ = 0;
};

}  // namespace pagecast
