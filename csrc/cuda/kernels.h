// The CUDA kernels' launchers, for the glue above them: no CUDA and no torch here. All return null, or CUDA's text of
// what went wrong; work is put on the current device's stream and nobody waits for it.
#pragma once

#include <cstdint>

#include "../common/formats.h"

namespace shardops {

// Of a kernel, in whole words: 32,764 are allowed since CUDA 12.1, from sm_70 on.
constexpr int64_t kParameterBytes = 32760;

// Makes a device current for the launches that follow on this thread.
const char* use_device(int32_t index);

// ---- cast_copy.cu: flatten_shard, unflatten_shard, cast_gather ----

// target[i] = cast(source[i] * scale); source null: zeros.
struct CopySegment {
  const void* source;
  void* target;
  int64_t numel;
};

// All segments, of one dtype on each side, in as few launches as kernel parameters allow. scale null: no
// multiplication, and bits are kept where the dtypes are the same.
const char* launch_cast_copy(const CopySegment* segments, int64_t count, Dtype from, Dtype to, const float* scale,
                             void* stream);

// ---- grad_norm.cu ----

struct NormTensor {
  const void* values;
  int64_t numel;
  int64_t first_block;  // where its blocks' values go
};

// The blocks' values of tensors of one dtype (reference/grad_norm.py).
const char* launch_norm_blocks(const NormTensor* tensors, int64_t count, Dtype dtype, Norm norm, double* blocks,
                               void* stream);

// Their sum, or the largest; nonfinite: 1 if any is not finite, else 0.
const char* launch_norm_combine(const double* blocks, int64_t count, Norm norm, double* total, float* nonfinite,
                                void* stream);

// ---- sharded_adam.cu, sharded_adam_blocks.cu, adam_scalars.cu: see adam_launch.h ----

}  // namespace shardops
