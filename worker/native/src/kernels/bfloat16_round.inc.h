// Numbers of eight significant bits; see bfloat16.h.
#pragma once

#include "../bfloat16.h"
#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

// bf(x) as float32. NaN stays NaN; infinite where rounding overflows.
PAGECAST_INLINE F16 to_bfloat(F16 x) {
  F16 out;
  PAGECAST_EACH_PART {
    const Bits bits = (Bits)x.part[part];
    const Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    // A NaN's own bits could all lie in the half that is cut off.
    const Bits quiet = (bits & 0xffff0000u) | 0x00400000u;
    const Bits is_nan = (Bits)((bits & 0x7fffffffu) > 0x7f800000u);
    const Bits counts = (Bits)((rounded & 0x7fffffffu) >= 0x27800000u);  // kLeastBFloat's bits
    out.part[part] = (Native::Vec)((is_nan & quiet) | (~is_nan & counts & rounded));
  }
  return out;
}

// The bits of x that store_bfloat would store, x being a bfloat16 already.
PAGECAST_INLINE void store_bfloat_bits(uint16_t* to, F16 x) {
  PAGECAST_EACH_PART Native::store_shorts(to + part * Native::kWidth,
                                          (Native::Ints)((Bits)x.part[part] >> 16));
}

// Keeps results as float32, and as what the next product takes where that is wanted.
struct KeepRounded {
  Rows out;
  const BFloat16Rows* rounded;  // may be null

  PAGECAST_MEMBER void operator()(int64_t row, int64_t column, F16 results) const {
    store(out.row(row) + column, results);
    if (rounded != nullptr) store_bfloat_bits(rounded->at(row, column), to_bfloat(results));
  }
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
