// The CPU kernels as a table of functions, one table for each instruction set, all with the same bits as a result.
// Each primitive's file is compiled once per instruction set (setup.py); cpu_kernels() chooses by CPUID at run time.
#pragma once

#include <cstdint>

#include "../common/adam_math.h"
#include "../common/block_quant.h"
#include "../common/dither.h"

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

struct CpuKernels {
  // Elements [begin, end) of one tensor; of one with Moments::kBlocks, blocks [begin, end).
  void (*sharded_adam)(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars,
                       const Dither& dither, int64_t begin, int64_t end);
  // destination[i] = cast(source[i] * scale); scale null: no multiplication. stream: write past the caches.
  void (*cast_copy)(void* destination, Dtype to, const void* source, Dtype from, int64_t numel, const float* scale,
                    bool stream);
  // The norm's contribution of one block of numel <= kNormBlock elements (reference/grad_norm.py).
  double (*norm_block)(const void* values, Dtype dtype, int64_t numel, Norm norm);
};

// The table for chosen_cpu_capability(), decided at the first call.
const CpuKernels& cpu_kernels();

}  // namespace shardops
