// g * sigmoid(g) = g / (1 + e^-g); at g = -inf NaN, as the product has it.
#pragma once

#include "../simd.h"

namespace pagecast::PAGECAST_SET {
namespace {

PAGECAST_INLINE F16 silu(F16 g) { return g / (broadcast(1.0f) + exp(zero() - g)); }

}  // namespace
}  // namespace pagecast::PAGECAST_SET
