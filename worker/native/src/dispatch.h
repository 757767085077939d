// Which kernel sets were built, and which of them this machine runs.
#pragma once

#include <vector>

#include "kernels.h"

namespace pagecast {

// Goes into the fingerprint of a plan's numerics: changes whenever a fused set's bits do.
inline constexpr int kKernelVersion = 2;

// The sets that this machine runs, the fastest first; "baseline" is always among them. The
// first call asks the system for AMX's registers, for the whole process.
std::vector<const Kernels*> kernel_sets();

}  // namespace pagecast
