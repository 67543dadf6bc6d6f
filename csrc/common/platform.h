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

// The same for a member of a class.
#if defined(__CUDACC__)
#define SHARDOPS_MEMBER __host__ __device__ __forceinline__
#else
#define SHARDOPS_MEMBER inline __attribute__((always_inline))
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

// a / b and the square root of a, correctly rounded, where no intermediate result leaves the normal numbers: no branch,
// and on a GPU half of the instructions of the general ones. tests/test_cuda_arithmetic.py shows the rounding for every
// result that the approximate instructions may give.
//
// quotient: 2^-100 <= b <= 2^125; a zero, or |a| >= 2^-100 and a / b normal.
SHARDOPS_HD float quotient_in_range(float a, float b) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse);
  const float quotient = __fmul_rn(a, inverse);
  // The negated remainder: of a negative zero, the sum below is one, too.
  return __fmaf_rn(-inverse, __fmaf_rn(b, quotient, -a), quotient);
#else
  return a / b;
#endif
}

// root: a zero, or 2^-100 <= a <= 2^100.
SHARDOPS_HD float root_in_range(float a) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(fmaxf(a, 7.888609052210118e-31f)));
  const float root = __fmul_rn(a, inverse);
  return __fmaf_rn(__fmaf_rn(-root, root, a), __fmul_rn(0.5f, inverse), root);
#else
  return __builtin_sqrtf(a);
#endif
}

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

// The larger magnitude, NaN above all.
SHARDOPS_HD float larger_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
#else
  const uint32_t a_bits = float_to_bits(a) & 0x7FFFFFFFu, b_bits = float_to_bits(b) & 0x7FFFFFFFu;
  return bits_to_float(a_bits > b_bits ? a_bits : b_bits);
#endif
}

}  // namespace shardops
