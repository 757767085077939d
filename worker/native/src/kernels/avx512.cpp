// The kernels for AVX-512. Compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma.
#define PAGECAST_SET avx512
#include "../simd/avx512.h"

#include "set.inc.h"

namespace pagecast {

const Kernels& avx512_kernels() { return avx512::kKernels; }

}  // namespace pagecast
