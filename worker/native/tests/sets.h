// The sets of kernels that are linked and that this machine runs, best first.
#pragma once

#include <vector>

#include "../src/dispatch.h"

inline std::vector<const pagecast::Kernels*> sets_of_this_machine() { return pagecast::kernel_sets(); }
