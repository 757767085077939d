// I16: sixteen words of 32 bits, whatever the machine's registers hold, and sixteen numbers of 16 or 8 bits
// as floats. Comes with simd.h. Written in the compilers' own vector types but for what `Native` does better.
#pragma once

#include "simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct I16 {
  Native::Ints part[kParts];
};

// A register's lanes, without a sign.
typedef uint32_t Bits __attribute__((vector_size(4 * Native::kWidth)));

// 64 bytes; `from` needs no alignment.
PAGECAST_INLINE I16 load_words(const void* from) {
  I16 out;
  const char* bytes = static_cast<const char*>(from);
  PAGECAST_EACH_PART __builtin_memcpy(&out.part[part], bytes + part * sizeof out.part[0], sizeof out.part[0]);
  return out;
}

// 64 bytes; `to` needs no alignment.
PAGECAST_INLINE void store_words(void* to, I16 value) {
  char* bytes = static_cast<char*>(to);
  PAGECAST_EACH_PART __builtin_memcpy(bytes + part * sizeof value.part[0], &value.part[part],
                                      sizeof value.part[0]);
}

PAGECAST_INLINE I16 broadcast_word(int32_t value) {
  I16 out;
  PAGECAST_EACH_PART out.part[part] = Native::Ints{} + value;
  return out;
}

// Wraps around.
PAGECAST_INLINE I16 operator+(I16 a, I16 b) {
  PAGECAST_EACH_PART a.part[part] = (Native::Ints)((Bits)a.part[part] + (Bits)b.part[part]);
  return a;
}

// Rounded to nearest even beyond 2^24.
PAGECAST_INLINE F16 to_float(I16 a) {
  F16 out;
  PAGECAST_EACH_PART out.part[part] = (Native::Vec) __builtin_convertvector(a.part[part], Native::Floats);
  return out;
}

// Towards zero; every lane within int32.
PAGECAST_INLINE I16 to_words(F16 a) {
  I16 out;
  PAGECAST_EACH_PART out.part[part] = __builtin_convertvector((Native::Floats)a.part[part], Native::Ints);
  return out;
}

// Byte J of each lane, 0 being the lowest, without a sign.
template <int J>
PAGECAST_INLINE I16 byte_at(I16 a) {
  PAGECAST_EACH_PART a.part[part] = (Native::Ints)(((Bits)a.part[part] >> (8 * J)) & 0xffu);
  return a;
}

// The low four bits of each byte.
PAGECAST_INLINE I16 low_nibbles(I16 a) {
  PAGECAST_EACH_PART a.part[part] = a.part[part] & 0x0f0f0f0f;
  return a;
}

// The high four bits of each byte.
PAGECAST_INLINE I16 high_nibbles(I16 a) {
  PAGECAST_EACH_PART a.part[part] = (Native::Ints)(((Bits)a.part[part] >> 4) & 0x0f0f0f0fu);
  return a;
}

// Sixteen float16, exactly.
PAGECAST_INLINE F16 load_half(const uint16_t* from) {
  F16 out;
  PAGECAST_EACH_PART out.part[part] = Native::load_half(from + part * Native::kWidth);
  return out;
}

// To nearest even; infinite from 65520 on, NaN stays NaN.
PAGECAST_INLINE void store_half(uint16_t* to, F16 value) {
  PAGECAST_EACH_PART Native::store_half(to + part * Native::kWidth, value.part[part]);
}

// Sixteen bfloat16, exactly.
PAGECAST_INLINE F16 load_bfloat(const uint16_t* from) {
  F16 out;
  PAGECAST_EACH_PART out.part[part] =
      (Native::Vec)((Bits)Native::load_shorts(from + part * Native::kWidth) << 16);
  return out;
}

// To nearest even, infinite where that overflows; NaN stays NaN.
PAGECAST_INLINE void store_bfloat(uint16_t* to, F16 value) {
  PAGECAST_EACH_PART {
    const Bits bits = (Bits)value.part[part];
    const Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Bits is_nan = (Bits)((bits & 0x7fffffffu) > 0x7f800000u);
    // A NaN's own bits could carry into its sign or leave none: it is made a quiet one.
    const Bits chosen = (is_nan & (bits >> 16 | 0x40u)) | (~is_nan & rounded);
    Native::store_shorts(to + part * Native::kWidth, (Native::Ints)chosen);
  }
}

// Sixteen int8.
PAGECAST_INLINE F16 load_int8(const int8_t* from) {
  I16 out;
  PAGECAST_EACH_PART out.part[part] = Native::load_chars(from + part * Native::kWidth);
  return to_float(out);
}

// Lanes that are integers in [-128, 127].
PAGECAST_INLINE void store_int8(int8_t* to, F16 value) {
  const I16 words = to_words(value);
  PAGECAST_EACH_PART Native::store_chars(to + part * Native::kWidth, words.part[part]);
}

// To integers, halves to even; |x| < 2^22. Of -0.5 to 0.5 it makes +0.
PAGECAST_INLINE F16 round_even(F16 x) {
  const F16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: from here to 2^24 floats are integers
  return (x + magic) - magic;
}

// Drops the sign, of NaN too.
PAGECAST_INLINE F16 absolute(F16 x) {
  PAGECAST_EACH_PART x.part[part] = (Native::Vec)((Bits)x.part[part] & 0x7fffffffu);
  return x;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET
