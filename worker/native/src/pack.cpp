#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "weight_memory.h"

namespace pagecast {
namespace {

constexpr size_t kCacheLine = 64;

size_t padded_bytes(const Panels& panels) {
  const auto bytes = static_cast<size_t>(panels.num_panels() * panels.panel_bytes());
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Where the rows of a segment lie in its parts.
using RowPointers = std::vector<const std::byte*>;

// Elements of `Word` bits, kLanes side by side.
template <typename Word>
void pack_plain(const RowPointers& rows, size_t first, int64_t num_columns, std::byte* to) {
  const size_t live = std::min<size_t>(kLanes, rows.size() - first);
  for (int64_t k = 0; k < num_columns; ++k) {
    Word column[kLanes] = {};
    for (size_t lane = 0; lane < live; ++lane)
      std::memcpy(&column[lane], rows[first + lane] + static_cast<size_t>(k) * sizeof(Word), sizeof(Word));
    std::memcpy(to + static_cast<size_t>(k) * sizeof column, column, sizeof column);
  }
}

void pack_groups(Kind kind, const RowPointers& rows, size_t first, int64_t num_columns, std::byte* to) {
  const Format format = info_of(kind).format;
  const int64_t head = head_bytes(format), bytes = group_bytes(format);
  const auto num_words = static_cast<int>((bytes - head) / (4 * kLanes));
  const size_t entry = has_half_scales(format) ? 2 : 4;
  const size_t num_entries = static_cast<size_t>(head) / (entry * kLanes);
  const size_t live = std::min<size_t>(kLanes, rows.size() - first);
  for (int64_t group = 0; group < num_columns / kGroup; ++group) {
    std::byte* at = to + group * bytes;
    uint32_t words[8][kLanes] = {};
    std::memset(at, 0, static_cast<size_t>(head));
    for (size_t lane = 0; lane < live; ++lane) {
      const Group taken = take_group(kind, rows[first + lane], group);
      // A little-endian float16 is the first two bytes of its word.
      for (size_t i = 0; i < num_entries; ++i)
        std::memcpy(at + (i * kLanes + lane) * entry, &taken.head[i], entry);
      for (int w = 0; w < num_words; ++w) words[w][lane] = taken.words[w];
    }
    std::memcpy(at + head, words, static_cast<size_t>(bytes - head));
  }
}

void pack_segment(Kind kind, const RowPointers& rows, const Panels& panels, std::byte* to) {
  for (int64_t panel = 0; panel < panels.num_panels(); ++panel) {
    std::byte* at = to + panel * panels.panel_bytes();
    const auto first = static_cast<size_t>(panel * kLanes);
    if (is_quantised(panels.format)) {
      pack_groups(kind, rows, first, panels.num_columns, at);
    } else if (panels.format == Format::kFloat32) {
      pack_plain<uint32_t>(rows, first, panels.num_columns, at);
    } else {
      pack_plain<uint16_t>(rows, first, panels.num_columns, at);
    }
  }
}

void check_parts(std::span<const Part> parts, int64_t num_columns) {
  if (num_columns <= 0) throw std::invalid_argument("num_columns: must be positive");
  if (parts.empty()) throw std::invalid_argument("parts: there is none");
  for (const Part& part : parts) {
    if (part.num_rows <= 0) throw std::invalid_argument("parts: each must have a row at least");
    if (part.data == nullptr) throw std::invalid_argument("parts: one has no data");
    const KindInfo& info = info_of(part.kind);
    if (num_columns % info.block_columns != 0) {
      throw std::invalid_argument("parts: " + std::to_string(num_columns) + " columns of " + info.name +
                                  ", must be a multiple of " + std::to_string(info.block_columns));
    }
  }
}

}  // namespace

PackedMatrix::PackedMatrix(std::span<const Part> parts, int64_t num_columns) : num_columns_(num_columns) {
  check_parts(parts, num_columns);
  std::vector<RowPointers> rows;
  for (const Part& part : parts) {
    const KindInfo& info = info_of(part.kind);
    if (kinds_.empty() || kinds_.back() != part.kind) {
      if (num_rows_ % kLanes != 0) {
        throw std::invalid_argument("parts: " + std::to_string(num_rows_) + " rows in front of one of " +
                                    info.name + ", must be a multiple of " + std::to_string(kLanes));
      }
      kinds_.push_back(part.kind);
      segments_.push_back({nullptr, info.format, info.offset, 0, num_columns});
      rows.emplace_back();
    }
    const int64_t row_bytes = num_columns / info.block_columns * info.block_bytes;
    const auto* data = static_cast<const std::byte*>(part.data);
    for (int64_t i = 0; i < part.num_rows; ++i) rows.back().push_back(data + i * row_bytes);
    segments_.back().num_rows += part.num_rows;
    num_rows_ += part.num_rows;
  }
  for (const Panels& segment : segments_) num_bytes_ += padded_bytes(segment);
  data_ = allocate_weights(num_bytes_);
  std::byte* at = data_.get();
  for (size_t i = 0; i < segments_.size(); ++i) {
    segments_[i].data = at;
    pack_segment(kinds_[i], rows[i], segments_[i], at);
    at += padded_bytes(segments_[i]);
  }
}

const Panels& PackedMatrix::panels() const {
  if (segments_.size() != 1) throw std::logic_error("a stack of several formats has no panels of one");
  return segments_.front();
}

bool PackedMatrix::is_quantised() const {
  return std::all_of(segments_.begin(), segments_.end(),
                     [](const Panels& segment) { return pagecast::is_quantised(segment.format); });
}

}  // namespace pagecast
