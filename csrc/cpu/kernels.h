// The CPU kernels as a table of functions, one table for each instruction set, all with the same bits as a result.
// Each primitive's file is compiled once per instruction set (setup.py); cpu_kernels() chooses by CPUID at run time.
#pragma once

#include <cstdint>

#include "../common/formats.h"

namespace shardops {

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
