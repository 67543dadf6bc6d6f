// fp32 <-> bf16 and fp16, round to nearest even or, to bf16, dithered; without branches so that plain loops vectorise.
// Denormals are exact and NaN stays NaN; nothing here depends on F16C or AVX512-BF16 (cpu/cast_copy.cpp has AVX-512's
// instruction for long copies to fp16). A GPU has instructions for the same roundings, which differ in a NaN's payload
// only.
#pragma once

#include "platform.h"

namespace shardops {

// Storage types: the bits of a value, so that a kernel is chosen by type.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

SHARDOPS_HD float to_float(float value) { return value; }

SHARDOPS_HD float to_float(Bf16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

SHARDOPS_HD float to_float(Fp16 value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  // The exponent is moved from bias 15 to 127. A subnormal half is made a normal float with a known leading one,
  // which an exact subtraction then removes.
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = (value.bits & 0x7FFFu) << 13;
  const uint32_t exponent = magnitude & 0x0F800000u;
  const uint32_t normal = magnitude + 0x38000000u;
  const uint32_t infinite = magnitude + 0x70000000u;
  const uint32_t subnormal =
      float_to_bits(SHARDOPS_SUB(bits_to_float(normal + 0x00800000u), bits_to_float(0x38800000u)));
  uint32_t bits = exponent == 0x0F800000u ? infinite : normal;
  bits = exponent == 0u ? subnormal : bits;
  return bits_to_float(bits | sign);
#endif
}

SHARDOPS_HD void from_float(float value, float& result) { result = value; }

SHARDOPS_HD void from_float(float value, Bf16& result) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));  // a NaN becomes 0x7FFF
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;  // rounding alone could carry a NaN's payload into the sign
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  result.bits = static_cast<uint16_t>(is_nan ? quiet : rounded);
#endif
}

SHARDOPS_HD void from_float(float value, Fp16& result) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Adding 0.5 puts the last bit of a half's subnormal in the last bit of the float: the addition itself rounds.
  // Larger magnitudes are not used from this path; clamping keeps the addition free of infinities.
  const uint32_t small = magnitude < 0x38800000u ? magnitude : 0u;
  const uint32_t subnormal = float_to_bits(SHARDOPS_ADD(bits_to_float(small), 0.5f)) - 0x3F000000u;
  const uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  result.bits = static_cast<uint16_t>(half | sign);
#endif
}

// Up to this magnitude a dither of 16 bits cannot make an infinity, and there is no NaN to take care of.
constexpr uint32_t kLargestPlain = 0x7F7EFFFFu;

// The bits of a value whose magnitude the dither has raised. A finite value stays finite, a NaN becomes 0x7FC00000.
// kPlain: the magnitude is known to be at most kLargestPlain.
template <bool kPlain>
SHARDOPS_HD uint32_t raised_bits(float value, uint32_t dither) {
  if constexpr (kPlain) return float_to_bits(value) + dither;
  const uint32_t bits = value != value ? 0x7FC00000u : float_to_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t limit = magnitude < 0x7F800000u ? 0x7F7FFFFFu : magnitude;
  const uint32_t raised = magnitude + dither;
  return (raised < limit ? raised : limit) | (bits & 0x80000000u);
}

// To bf16 by adding the dither, 16 bits, to the magnitude and cutting.
template <bool kPlain = false>
SHARDOPS_HD Bf16 round_dithered(float value, uint32_t dither) {
  return Bf16{static_cast<uint16_t>(raised_bits<kPlain>(value, dither) >> 16)};
}

}  // namespace shardops
