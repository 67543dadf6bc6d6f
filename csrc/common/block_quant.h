// 8-bit codes <-> fp32 moments, in blocks of 128 elements of a row: the operations on one element and on one block.
// exp_avg_sq is a point of a logarithmic grid below the block's largest; exp_avg a multiple of a power of two that
// exp_avg_sq's code implies. Integers and single IEEE operations: every backend has the same bits.
#pragma once

#include "platform.h"

namespace shardops {

constexpr int64_t kBlock = 128;

constexpr uint32_t kCanonicalNan = 0x7FC00000u;
constexpr uint32_t kSmallestSecond = 0x02000000u;  // 2^-123: smaller ones become zero
constexpr uint32_t kZeroCode = 255u;
constexpr int kStepShift =
    13;  // a step of the grid is a multiple of 2^13 patterns: finer ones would follow every update
constexpr uint32_t kLargestScale = 0x7E000000u;   // 2^125: from there on the block counts as not finite
constexpr uint32_t kSmallestScale = 0x0D800000u;  // 2^-100

// What is stored of a block beside its codes.
struct BlockWords {
  uint32_t highest;         // the pattern of the largest exp_avg_sq
  uint32_t scale_and_step;  // upper half: the scale of exp_avg, a bf16; lower half: the grid's step >> 13
};

SHARDOPS_HD uint32_t multiply_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

SHARDOPS_HD uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// ---- decoding ----

// What a block's elements are decoded with.
struct BlockDecoder {
  uint32_t highest;
  uint32_t step;
  float scale;
};

SHARDOPS_HD BlockDecoder block_decoder(const BlockWords& words) {
  const float scale = bits_to_float(words.scale_and_step & 0xFFFF0000u);
  return BlockDecoder{words.highest, (words.scale_and_step & 0xFFFFu) << kStepShift,
                      SHARDOPS_MUL(scale, 1.0f / 127.0f)};
}

// The pattern that a code stands for. Also under kZeroCode, where it serves as exp_avg's reference only.
SHARDOPS_HD uint32_t raw_second(uint32_t highest, uint32_t step, uint32_t code) { return highest - code * step; }

SHARDOPS_HD float decode_second(uint32_t raw, uint32_t code) { return bits_to_float(code == kZeroCode ? 0u : raw); }

SHARDOPS_HD float decode_first(int32_t code, uint32_t raw, const BlockDecoder& decoder) {
  // About the square root of exp_avg_sq: a power of two.
  const float reference = bits_to_float(((raw & 0x7F000000u) >> 1) + 0x20000000u);
  return SHARDOPS_MUL(SHARDOPS_MUL(static_cast<float>(code), reference), decoder.scale);
}

// ---- encoding exp_avg_sq ----

// The pattern of a value, which is in the order of the values; NaN in one form above all.
SHARDOPS_HD uint32_t second_bits(float exp_avg_sq) { return smaller(float_to_bits(exp_avg_sq), kCanonicalNan); }

struct SecondGrid {
  uint32_t highest;
  uint32_t step;
  uint32_t inverse;  // of the step, times 2^48
};

// highest: the largest second_bits of the block. lowest: the smallest of second_bits - kSmallestSecond as unsigned
// numbers, so that patterns below kSmallestSecond are above all others.
SHARDOPS_HD SecondGrid second_grid(uint32_t highest, uint32_t lowest) {
  SecondGrid grid;
  grid.highest = highest < kSmallestSecond ? 0u : highest;
  const uint32_t low = lowest >= 0u - kSmallestSecond ? grid.highest : lowest + kSmallestSecond;
  const uint32_t steps = multiply_high(grid.highest - low, 2065u) + 1u;  // 254 steps reach from highest to low
  grid.step = (steps < 9u ? 9u : steps) << kStepShift;
  grid.inverse = static_cast<uint32_t>(quotient_in_range(281474976710656.0f, static_cast<float>(grid.step)));
  return grid;
}

// quotient: multiply_high(grid.highest - second_bits, grid.inverse), in steps times 2^16. dither: 16 bits. The code is
// in bits 16 to 23.
SHARDOPS_HD uint32_t second_code_16(uint32_t quotient, uint32_t dither) {
  return smaller(quotient + dither, 0xFFFFFFu);
}

SHARDOPS_HD uint32_t second_code(uint32_t quotient, uint32_t dither) { return second_code_16(quotient, dither) >> 16; }

// ---- encoding exp_avg ----

// exp_avg over the power of two that its exp_avg_sq implies, once encoded.
SHARDOPS_HD float first_ratio(float exp_avg, uint32_t raw) {
  return SHARDOPS_MUL(exp_avg, bits_to_float(((~raw & 0x7F000000u) >> 1) + 0x1F800000u));
}

struct FirstScale {
  uint32_t bits;  // a bf16 in the upper half; NaN for a block that is not finite
  float factor;   // from a ratio to its code; 0 where all codes are 0
};

// largest: the largest pattern of the ratios' magnitudes.
SHARDOPS_HD FirstScale first_scale(uint32_t largest) {
  uint32_t bits = (largest + 0xFFFFu) & 0xFFFF0000u;
  bits = largest < kSmallestScale ? 0u : bits;
  bits = largest >= kLargestScale ? kCanonicalNan : bits;
  const float scale = bits_to_float(bits);
  return FirstScale{bits, scale > 0.0f ? quotient_in_range(127.0f, scale) : 0.0f};
}

// The code in the low byte, two's complement, for a factor that is not 0; under 0, where a ratio may be NaN, codes are
// 0.
SHARDOPS_HD uint32_t first_code(float ratio, float factor) {
  // To an integer by an addition: every instruction set has it, and a GPU converts at half the pace. |scaled| is at
  // most 127, so its last bit is a one's.
  return float_to_bits(SHARDOPS_ADD(SHARDOPS_MUL(ratio, factor), 12582912.0f));
}

SHARDOPS_HD BlockWords block_words(const SecondGrid& grid, const FirstScale& scale) {
  return BlockWords{grid.highest, scale.bits | (grid.step >> kStepShift)};
}

}  // namespace shardops
