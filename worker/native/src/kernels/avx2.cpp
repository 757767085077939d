// The kernels for AVX2 with FMA. Compile with -mavx2 -mfma -mf16c.
#define PAGECAST_SET avx2
#include "../simd/avx2.h"

#include "set.inc.h"

namespace pagecast {

const Kernels& avx2_kernels() { return avx2::kKernels; }

}  // namespace pagecast
