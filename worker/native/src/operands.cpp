#include "operands.h"

#include "attention.h"

namespace pagecast {
namespace {

// Dimensions beyond this can't be right, and products of a few of them can't overflow.
constexpr int64_t kMaxExtent = int64_t{1} << 31;
constexpr int64_t kMaxFloats = int64_t{1} << 46;
// The same of the pool, which counts bytes, and has fewer blocks for it.
constexpr int64_t kMaxStride = 4 * kMaxExtent;
constexpr int64_t kMaxBytes = 4 * kMaxFloats;

// One past the last float that rows of the capacity cover.
int64_t end_of(const View& view, int64_t num_rows) {
  return view.offset + (num_rows - 1) * view.row_stride + round_up(view.width);
}

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

void Checks::view(const char* name, const View& view) const {
  const int64_t rows = capacity_.of(view.extent);
  require(view.width >= 1 && view.width < kMaxExtent, name, "width " + number(view.width));
  require(view.offset >= 0 && view.offset < kMaxFloats && view.offset % kLanes == 0, name,
          "offset " + number(view.offset) + ", must be a multiple of " + number(kLanes));
  require(view.row_stride < kMaxExtent && view.row_stride % kLanes == 0 &&
              view.row_stride >= round_up(view.width),
          name,
          "row_stride " + number(view.row_stride) + ", must be a multiple of " + number(kLanes) +
              " and hold a width of " + number(view.width));
  require(end_of(view, rows) <= view.arena_size, name,
          number(rows) + " rows end at float " + number(end_of(view, rows)) + ", the arena has " +
              number(view.arena_size));
}

void Checks::view(const char* name, const View& view, int64_t width, Extent extent) const {
  this->view(name, view);
  equal(name, "width", view.width, width);
  require(view.extent == extent, name, "its rows count something else than those it must go with");
}

void Checks::apart(const char* out_name, const View& out, const char* in_name, const View& in) const {
  const bool overlap = out.arena + out.offset < in.arena + end_of(in, capacity_.of(in.extent)) &&
                       in.arena + in.offset < out.arena + end_of(out, capacity_.of(out.extent));
  require(!overlap, out_name, std::string("overlaps ") + in_name);
}

void Checks::kv(const char* name, const KvView& kv) const {
  require(kv.head_size >= kLanes && kv.head_size <= kMaxHeadSize && kv.head_size % kLanes == 0, name,
          "head_size " + number(kv.head_size) + ", must be a multiple of " + number(kLanes) + " up to " +
              number(kMaxHeadSize));
  require(kv.block_size >= kLanes && kv.block_size < (1 << 20) && kv.block_size % kLanes == 0, name,
          "block_size " + number(kv.block_size) + ", must be a multiple of " + number(kLanes));
  require(kv.num_kv_heads >= 1 && kv.num_kv_heads < (1 << 16), name,
          "num_kv_heads " + number(kv.num_kv_heads));
  require(kv.num_blocks >= 1 && kv.num_blocks < kMaxExtent / 4, name, "num_blocks " + number(kv.num_blocks));
  // Scales of kInt8 are floats.
  const int64_t unit = kv.type == KvType::kInt8 ? 4 : element_bytes(kv.type);
  const auto require_unit = [&](const char* what, int64_t bytes) {
    require(bytes % unit == 0, name,
            std::string(what) + " " + number(bytes) + ", must be a multiple of " + number(unit));
  };
  const int64_t bytes = head_block_bytes(kv.type, kv.block_size, kv.head_size);
  require(reinterpret_cast<uintptr_t>(kv.data) % static_cast<uintptr_t>(unit) == 0, name,
          "data does not start at a multiple of " + number(unit) + " bytes");
  require(kv.offset >= 0 && kv.offset < kMaxBytes, name, "offset " + number(kv.offset));
  require_unit("offset", kv.offset);
  require(kv.head_stride >= bytes && kv.head_stride < kMaxStride, name,
          "head_stride " + number(kv.head_stride) + ", a block of a head has " + number(bytes) + " bytes");
  require_unit("head_stride", kv.head_stride);
  require(kv.block_stride >= (kv.num_kv_heads - 1) * kv.head_stride + bytes && kv.block_stride < kMaxStride,
          name, "block_stride " + number(kv.block_stride) + ", too small for the heads or too large");
  require_unit("block_stride", kv.block_stride);
  const int64_t end =
      kv.offset + (kv.num_blocks - 1) * kv.block_stride + (kv.num_kv_heads - 1) * kv.head_stride + bytes;
  require(end <= kv.data_size, name,
          "blocks end at byte " + number(end) + ", data has " + number(kv.data_size));
}

void Checks::same_shape(const KvView& keys, const KvView& values) const {
  equal("values", "num_blocks", values.num_blocks, keys.num_blocks);
  equal("values", "num_kv_heads", values.num_kv_heads, keys.num_kv_heads);
  equal("values", "head_size", values.head_size, keys.head_size);
  equal("values", "block_size", values.block_size, keys.block_size);
  require(values.type == keys.type, "values", "another dtype than keys");
}

}  // namespace pagecast
