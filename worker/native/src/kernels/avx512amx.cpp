// The kernels for AVX-512 with AMX: those of avx512vnni.cpp, but for products in eight bits of many rows and
// in bfloat16. Compile with the flags of avx512vnni.cpp, -mavx512bf16, -mamx-tile, -mamx-int8 and -mamx-bf16.
#define PAGECAST_SET avx512amx
#include "../simd/avx512.h"
#include "attention_amx.inc.h"
#include "bfloat16_amx.inc.h"
#include "int8_amx.inc.h"

namespace pagecast {

const Kernels& avx512amx_kernels() {
  static const Kernels kernels = [] {
    Kernels copy = avx512vnni_kernels();
    copy.name = "avx512amx";
    copy.int8 = &avx512amx::int8_kernels();
    copy.bfloat16 = &avx512amx::bfloat16_kernels();
    copy.bfloat16_attention = &avx512amx::bfloat16_attention_kernels();
    return copy;
  }();
  return kernels;
}

}  // namespace pagecast
