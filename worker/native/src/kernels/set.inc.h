// The kernels of one set, compiled once for each: include simd/<set>.h first. No header of the C++ library
// with functions of its own comes in here, since the linker could pick this set's copy of one for everybody.
#pragma once

#include "attention.inc.h"
#include "bfloat16_linear.inc.h"
#include "draw.inc.h"
#include "elementwise.inc.h"
#include "int8.inc.h"
#include "linear.inc.h"
#include "linear_swiglu.inc.h"
#include "rms_norm.inc.h"
#include "rope.inc.h"

#define PAGECAST_STRING_(name) #name
#define PAGECAST_STRING(name) PAGECAST_STRING_(name)

namespace pagecast::PAGECAST_SET {
namespace {

constexpr Kernels kKernels = {
    .name = PAGECAST_STRING(PAGECAST_SET),
    .fused = Native::kFused,
    .linear = linear,
    .linear_swiglu = linear_swiglu,
    .rms_norm = rms_norm,
    .add_rms_norm = add_rms_norm,
    .add = add,
    .swiglu = swiglu,
    .embedding = embedding,
    .select_rows = select_rows,
    .rope = rope,
    .store_kv = store_kv,
    .rope_store = rope_store,
    .int8 = &kInt8,
    .bfloat16 = &kBFloat16,
    .draw = &kDraw,
    .attention = &kAttention,
    .bfloat16_attention = &kBFloat16Attention,
};

}  // namespace
}  // namespace pagecast::PAGECAST_SET
