// What a call's tensors are stored in, for every backend in C++: dtypes, the formats of an update, one tensor's arrays.
// Nothing of torch here, so that kernels which see no torch header know the same names.
#pragma once

#include <cstdint>

#include "adam_math.h"
#include "block_quant.h"
#include "dither.h"

namespace shardops {

enum class Dtype : uint8_t { kFloat32, kBFloat16, kFloat16 };

// How exp_avg and exp_avg_sq are stored: as numbers, or in 8-bit codes by blocks.
enum class Moments : uint8_t { kFloat32, kBFloat16, kBlocks };

// Where the fp32 master weight lives: in an fp32 parameter itself, in the parameter and a remainder of 16 or 8 bits, or
// in a tensor; or nowhere: the parameter is rounded after each step, to nearest even or dithered.
enum class Master : uint8_t { kParam, kSplit, kSplit24, kFloat32, kNearest, kStochastic };

enum class Norm : uint8_t { kOne, kTwo, kInf };

// Elements of one block of the norm's fixed tree; part of the arithmetic, not a tuning knob.
constexpr int64_t kNormBlock = 4096;
// Terms of a block that are summed side by side.
constexpr int64_t kNormLanes = 256;

constexpr int64_t dtype_nbytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// What is common to all tensors of one call.
struct AdamFormat {
  Dtype param;
  Dtype grad;
  Moments moments;
  Master master;
  bool has_shadow;
  Dtype shadow;
  bool amsgrad;
  bool coupled_decay;  // an L2 penalty that is not zero
  bool unscale;        // gradients are divided by grad_scale
  float grad_scale;
};

// One tensor's arrays, each numel long and in the same memory order. Absent ones are null.
struct AdamTensor {
  void* param;
  const void* grad;
  void* exp_avg;     // float, bf16, or int8 codes
  void* exp_avg_sq;  // float, bf16, or uint8 codes
  float* max_exp_avg_sq;
  void* master;  // int16 or int8 remainder, or fp32
  void* shadow;  // a low-precision copy of the updated parameter: next all-gather's input
  int64_t numel;
  BlockWords* block_words;  // one for each block of each row
  int64_t block_columns;    // elements of a row, which blocks do not cross; at least 1 where there are elements
  GlobalIndex index;        // of the elements, for the dither
};

}  // namespace shardops
