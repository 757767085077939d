// The kernels for AVX-512 with VNNI: those of avx512.cpp, but for products in eight bits, which alone gain by
// it. Compile with the flags of avx512.cpp and -mavx512vnni.
#define PAGECAST_SET avx512vnni
#include "../simd/avx512.h"
#include "int8.inc.h"

namespace pagecast {

const Kernels& avx512vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels copy = avx512_kernels();
    copy.name = "avx512vnni";
    copy.int8 = &avx512vnni::kInt8;
    return copy;
  }();
  return kernels;
}

}  // namespace pagecast
