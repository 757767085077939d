// The kernels for AVX2 with AVX-VNNI: those of avx2.cpp, but for products in eight bits, which alone gain by
// it. Compile with the flags of avx2.cpp and -mavxvnni.
#define PAGECAST_SET avx2vnni
#include "../simd/avx2.h"
#include "int8.inc.h"

namespace pagecast {

const Kernels& avx2vnni_kernels() {
  static const Kernels kernels = [] {
    Kernels copy = avx2_kernels();
    copy.name = "avx2vnni";
    copy.int8 = &avx2vnni::kInt8;
    return copy;
  }();
  return kernels;
}

}  // namespace pagecast
