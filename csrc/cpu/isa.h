// What a primitive's translation unit needs when it is compiled for one instruction set: SHARDOPS_ISA is its name
// (isa_default, isa_avx2, isa_avx512), given by setup.py with the compiler's flags for it.
#pragma once

#include "kernels.h"

#ifndef SHARDOPS_ISA
#error "compile with -DSHARDOPS_ISA=... as setup.py does"
#endif

namespace shardops {
namespace SHARDOPS_ISA {

// Of one register.
#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

void sharded_adam(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, const Dither& dither,
                  int64_t begin, int64_t end);
void cast_copy(void* destination, Dtype to, const void* source, Dtype from, int64_t numel, const float* scale,
               bool stream);
double norm_block(const void* values, Dtype dtype, int64_t numel, Norm norm);

}  // namespace SHARDOPS_ISA
}  // namespace shardops
