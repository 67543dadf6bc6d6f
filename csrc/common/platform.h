// The IEEE operations and bit casts that kernels are written in, on the host and on a GPU.
// Every rounding of the arithmetic is one of these calls, so that no compiler can contract two of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SHARDOPS_HD __host__ __device__ __forceinline__
#else
// Static, so that a translation unit compiled for AVX-512 keeps its copy to itself: with external linkage the linker
// would pick one copy for all, and the baseline path could execute it on a CPU without AVX-512.
#define SHARDOPS_HD static inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define SHARDOPS_MUL(a, b) __fmul_rn(a, b)
#define SHARDOPS_ADD(a, b) __fadd_rn(a, b)
#define SHARDOPS_SUB(a, b) __fsub_rn(a, b)
#define SHARDOPS_DIV(a, b) __fdiv_rn(a, b)
#define SHARDOPS_SQRT(a) __fsqrt_rn(a)
#else  // built with -ffp-contract=off (setup.py)
#define SHARDOPS_MUL(a, b) ((a) * (b))
#define SHARDOPS_ADD(a, b) ((a) + (b))
#define SHARDOPS_SUB(a, b) ((a) - (b))
#define SHARDOPS_DIV(a, b) ((a) / (b))
#define SHARDOPS_SQRT(a) __builtin_sqrtf(a)
#endif

namespace shardops {

SHARDOPS_HD uint32_t float_to_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

SHARDOPS_HD float bits_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

}  // namespace shardops
