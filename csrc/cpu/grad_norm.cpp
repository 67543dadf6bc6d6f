// One block of the gradient norm's fixed tree on a CPU; the specification is backends/reference/grad_norm.py.
// A block is scaled by a power of two before it is squared, so that neither 1e30 nor 1e-30 leaves fp32's range.
#include "isa.h"

#include <cstring>

#include "../common/low_precision.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

// Lanes whose sums stay in registers while their rows are walked. As a vector type, since the compiler keeps an array
// of them in memory.
typedef float LaneGroup __attribute__((vector_size(128)));
constexpr int64_t kGroup = sizeof(LaneGroup) / sizeof(float);

template <typename T>
void decode(float* __restrict tile, const T* __restrict source, int64_t numel, int64_t rows) {
  for (int64_t i = 0; i < numel; ++i) tile[i] = to_float(source[i]);
  for (int64_t i = numel; i < rows * kNormLanes; ++i) tile[i] = 0.0f;
}

uint32_t max_magnitude(const float* __restrict tile, int64_t rows) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < rows * kNormLanes; ++i) {
    const uint32_t magnitude = float_to_bits(tile[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Each lane's sum over its rows, and the rounding errors made on the way (Kahan).
template <bool kSquare>
void sum_lanes(const float* __restrict tile, int64_t rows, float scale, float* __restrict sums,
               float* __restrict errors) {
  for (int64_t group = 0; group < kNormLanes; group += kGroup) {
    LaneGroup sum = {};
    LaneGroup compensation = {};
    for (int64_t row = 0; row < rows; ++row) {
      LaneGroup value;
      std::memcpy(&value, tile + row * kNormLanes + group, sizeof(value));
      value *= scale;
      const LaneGroup term = kSquare ? value * value : (value < 0.0f ? -value : value);
      const LaneGroup corrected = term - compensation;
      const LaneGroup raised = sum + corrected;
      compensation = (raised - sum) - corrected;
      sum = raised;
    }
    compensation = -compensation;
    std::memcpy(sums + group, &sum, sizeof(sum));
    std::memcpy(errors + group, &compensation, sizeof(compensation));
  }
}

// s + c holds a sum and the rounding error made (Knuth's two-sum).
SHARDOPS_HD void two_sum(float& sum, float& error, float term) {
  const float total = SHARDOPS_ADD(sum, term);
  const float added = SHARDOPS_SUB(total, sum);
  error = SHARDOPS_ADD(SHARDOPS_SUB(sum, SHARDOPS_SUB(total, added)), SHARDOPS_SUB(term, added));
  sum = total;
}

// Lane l takes lane l + width, for width = 128, 64, .. 1.
void sum_tree(float* __restrict sums, float* __restrict errors) {
  for (int64_t width = kNormLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) {
      float error;
      two_sum(sums[lane], error, sums[lane + width]);
      errors[lane] = SHARDOPS_ADD(SHARDOPS_ADD(errors[lane], errors[lane + width]), error);
    }
  }
}

// 2^exponent for -1022 <= exponent <= 1023.
double power_of_two(int64_t exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

double norm_block(const void* values, Dtype dtype, int64_t numel, Norm norm) {
  const int64_t rows = (numel + kNormLanes - 1) / kNormLanes;
  alignas(64) float decoded[kNormBlock];
  const float* tile = decoded;
  switch (dtype) {
    case Dtype::kFloat32:
      if (numel % kNormLanes == 0) {
        tile = static_cast<const float*>(values);
      } else {
        decode(decoded, static_cast<const float*>(values), numel, rows);
      }
      break;
    case Dtype::kBFloat16: decode(decoded, static_cast<const Bf16*>(values), numel, rows); break;
    case Dtype::kFloat16: decode(decoded, static_cast<const Fp16*>(values), numel, rows); break;
  }
  const uint32_t largest = max_magnitude(tile, rows);
  if (norm == Norm::kInf || largest >= 0x7F800000u || largest == 0) return bits_to_float(largest);

  // Values become smaller than 4 in magnitude; the largest exponent's inverse would be a denormal, hence 253.
  const int64_t exponent = (largest >> 23) < 253u ? (largest >> 23) : 253u;
  const float scale = bits_to_float(static_cast<uint32_t>(254 - exponent) << 23);
  alignas(64) float sums[kNormLanes];
  alignas(64) float errors[kNormLanes];
  if (norm == Norm::kTwo) {
    sum_lanes<true>(tile, rows, scale, sums, errors);
  } else {
    sum_lanes<false>(tile, rows, scale, sums, errors);
  }
  sum_tree(sums, errors);
  const double total = static_cast<double>(sums[0]) + static_cast<double>(errors[0]);
  return total * power_of_two((norm == Norm::kTwo ? 2 : 1) * (exponent - 127));
}

}  // namespace SHARDOPS_ISA
}  // namespace shardops
