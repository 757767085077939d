// The kernels for any machine. Compile with no flag of its own.
#define PAGECAST_SET baseline
#include "../simd/baseline.h"

#include "set.inc.h"

namespace pagecast {

const Kernels& baseline_kernels() { return baseline::kKernels; }

}  // namespace pagecast
