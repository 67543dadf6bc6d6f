// The scalar steps of one block of the gradient norm's tree, for C++ and CUDA.
// The specification is shardops/backends/reference/grad_norm.py; the order of operations here is the same.
#pragma once

#include "platform.h"

namespace shardops {

// What a block's values are divided by, as a biased exponent, so that they become smaller than 4 in magnitude. 253,
// since the inverse of the largest exponent would be a denormal. largest: the bits of the largest magnitude.
SHARDOPS_HD uint32_t norm_exponent(uint32_t largest) { return (largest >> 23) < 253u ? (largest >> 23) : 253u; }

// 2^-(exponent - 127)
SHARDOPS_HD float norm_scale(uint32_t exponent) { return bits_to_float((254u - exponent) << 23); }

// Whether the largest magnitude is the block's value already: it is infinite, NaN or zero.
SHARDOPS_HD bool is_norm_value(uint32_t largest) { return largest >= 0x7F800000u || largest == 0u; }

// s + c holds a sum and the rounding error made (Knuth's two-sum).
SHARDOPS_HD void two_sum(float& sum, float& error, float term) {
  const float total = SHARDOPS_ADD(sum, term);
  const float added = SHARDOPS_SUB(total, sum);
  error = SHARDOPS_ADD(SHARDOPS_SUB(sum, SHARDOPS_SUB(total, added)), SHARDOPS_SUB(term, added));
  sum = total;
}

// A lane takes another one's sum and errors.
SHARDOPS_HD void take_lane(float& sum, float& errors, float other_sum, float other_errors) {
  float error;
  two_sum(sum, error, other_sum);
  errors = SHARDOPS_ADD(SHARDOPS_ADD(errors, other_errors), error);
}

// 2^exponent for -1022 <= exponent <= 1023.
SHARDOPS_HD double power_of_two(int64_t exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The tree's sum and errors, scaled back. power: 2 of squares, 1 of magnitudes.
SHARDOPS_HD double norm_value(float sum, float errors, uint32_t exponent, int power) {
  const double total = static_cast<double>(sum) + static_cast<double>(errors);
  return total * power_of_two(power * (static_cast<int64_t>(exponent) - 127));
}

}  // namespace shardops
