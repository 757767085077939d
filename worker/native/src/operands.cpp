#include "operands.h"

#include "attention.h"

namespace pagecast {
namespace {

// Dimensions beyond this can't be right, and products of a few of them can't overflow.
constexpr int64_t kMaxExtent = int64_t{1} << 31;
constexpr int64_t kMaxFloats = int64_t{1} << 46;

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
  require(kv.num_blocks >= 1 && kv.num_blocks < kMaxExtent, name, "num_blocks " + number(kv.num_blocks));
  const int64_t floats = kv.block_size * kv.head_size;
  require(kv.offset >= 0 && kv.offset < kMaxFloats, name, "offset " + number(kv.offset));
  require(kv.head_stride >= floats && kv.head_stride < kMaxExtent, name,
          "head_stride " + number(kv.head_stride) + ", a block of a head has " + number(floats) + " floats");
  require(kv.block_stride >= (kv.num_kv_heads - 1) * kv.head_stride + floats && kv.block_stride < kMaxExtent,
          name, "block_stride " + number(kv.block_stride) + ", too small for the heads or too large");
  const int64_t end =
      kv.offset + (kv.num_blocks - 1) * kv.block_stride + (kv.num_kv_heads - 1) * kv.head_stride + floats;
  require(end <= kv.data_size, name,
          "blocks end at float " + number(end) + ", data has " + number(kv.data_size));
}

void Checks::same_shape(const KvView& keys, const KvView& values) const {
  equal("values", "num_blocks", values.num_blocks, keys.num_blocks);
  equal("values", "num_kv_heads", values.num_kv_heads, keys.num_kv_heads);
  equal("values", "head_size", values.head_size, keys.head_size);
  equal("values", "block_size", values.block_size, keys.block_size);
}

}  // namespace pagecast
