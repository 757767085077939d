// The table of products in eight bits; see int8.h for the order of additions.
#pragma once

#include "../int8.h"
#include "int8_linear.inc.h"
#include "int8_quantise.inc.h"

namespace pagecast::PAGECAST_SET {
namespace {

constexpr Int8Kernels kInt8 = {
    .quantise = quantise,
    .linear = {nullptr, nullptr, nullptr, int8_linear<Format::kQ4_0>, int8_linear<Format::kQ4_1>,
               int8_linear<Format::kQ4_K>, int8_linear<Format::kQ8_0>, int8_linear<Format::kQ5_K>,
               int8_linear<Format::kQ6_K>},
    .linear_swiglu = {nullptr, nullptr, nullptr, int8_linear_swiglu<Format::kQ4_0>,
                      int8_linear_swiglu<Format::kQ4_1>, int8_linear_swiglu<Format::kQ4_K>,
                      int8_linear_swiglu<Format::kQ8_0>, int8_linear_swiglu<Format::kQ5_K>,
                      int8_linear_swiglu<Format::kQ6_K>},
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
