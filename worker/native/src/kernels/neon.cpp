// The kernels for AArch64. Compile with no flag of its own.
#define PAGECAST_SET neon
#include "../simd/neon.h"

#include "set.inc.h"

namespace pagecast {

const Kernels& neon_kernels() { return neon::kKernels; }

}  // namespace pagecast
