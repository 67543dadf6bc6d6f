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
#define SHARDOPS_FMA(a, b, c) __fmaf_rn(a, b, c)
#else  // built with -ffp-contract=off (setup.py)
#define SHARDOPS_MUL(a, b) ((a) * (b))
#define SHARDOPS_ADD(a, b) ((a) + (b))
#define SHARDOPS_SUB(a, b) ((a) - (b))
#define SHARDOPS_DIV(a, b) ((a) / (b))
#define SHARDOPS_SQRT(a) __builtin_sqrtf(a)
#define SHARDOPS_FMA(a, b, c) __builtin_fmaf(a, b, c)
#endif

namespace shardops {

// ---- quotients and roots where no intermediate result leaves the normal numbers ----
//
// Correctly rounded without a branch, in half of the instructions that a GPU takes for the general ones: a seed from an
// approximate instruction, then what follows it here. The sequences are those that the CUDA compiler makes of the IEEE
// operations, without its checks of the range. tests/test_cuda_arithmetic.py shows that, and all cases in which a seed
// that PTX would allow is not good enough: 3 quotients and 30 roots, times powers of two, by which the compiler's own
// would be wrong, too.

// 1 / b from a seed near it: not always the nearest number, but within 2^-24 of its size and a little.
SHARDOPS_HD float refined_inverse(float b, float seed) {
  return SHARDOPS_FMA(seed, SHARDOPS_FMA(-b, seed, 1.0f), seed);
}

// a / b; seed: near 1 / b.
SHARDOPS_HD float refined_quotient(float a, float b, float seed) {
  const float inverse = refined_inverse(b, seed);
  const float quotient = SHARDOPS_MUL(a, inverse);
  // The negated remainder: of a negative zero, the sum below is one, too.
  return SHARDOPS_FMA(-inverse, SHARDOPS_FMA(b, quotient, -a), quotient);
}

// The square root of a; seed: near its inverse.
SHARDOPS_HD float refined_root(float a, float seed) {
  const float root = SHARDOPS_MUL(a, seed);
  return SHARDOPS_FMA(SHARDOPS_FMA(-root, root, a), SHARDOPS_MUL(0.5f, seed), root);
}

constexpr float kSmallestInRange = 7.888609052210118e-31f;  // 2^-100: remainders do not underflow

// 2^-100 <= b <= 2^125; a is a zero, or |a| >= 2^-100 and 2^-126 <= |a / b| <= 2^127.
SHARDOPS_HD float quotient_in_range(float a, float b) {
#if defined(__CUDA_ARCH__)
  float seed;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(seed) : "f"(b));
  return refined_quotient(a, b, seed);
#else
  return a / b;
#endif
}

// a: a zero, or 2^-100 <= a <= 2^100. A zero's seed is that of the smallest, since it may not be infinite.
SHARDOPS_HD float root_in_range(float a) {
#if defined(__CUDA_ARCH__)
  float seed;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(seed) : "f"(fmaxf(a, kSmallestInRange)));
  return refined_root(a, seed);
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
