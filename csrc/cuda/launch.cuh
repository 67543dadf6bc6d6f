// What every kernel file needs of CUDA: the launch, its error, and the size of the chip.
// Compiled as C++ beside tests/cuda_twin/cuda_on_host.h, the same files run on a CPU: their twins.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "cuda_on_host.h"
#endif

#include <algorithm>
#include <cstdint>

#include "../common/platform.h"

namespace shardops {

// How a kernel takes its one struct: in place in the kernel's parameters, which a twin need not copy for each thread.
#if defined(__CUDACC__)
#define SHARDOPS_PARAMETERS(Arguments) const __grid_constant__ Arguments
#else
#define SHARDOPS_PARAMETERS(Arguments) const Arguments&
#endif

// What runs on the device alone: its threads may wait for each other.
#define SHARDOPS_DEVICE __device__ __forceinline__

// A condition that nearly always holds, and has a second way for when it does not. To count what is executed, the
// second way can be left out (SHARDOPS_HOT_PATH_ONLY): nothing that is shipped.
SHARDOPS_HD bool usually(bool condition) {
#if defined(SHARDOPS_HOT_PATH_ONLY) && defined(__CUDA_ARCH__)
  if (!condition) asm volatile("trap;");
  return true;
#else
  return condition;
#endif
}

// Threads of a block, unless a kernel has a reason for another number.
constexpr int kThreads = 256;

// Starts blocks of a kernel that takes one struct. Returns null, or what CUDA says went wrong. kTalks: whether threads
// of a block wait for each other, by __syncthreads or by shuffles; only the twin has a use for it.
template <bool kTalks, typename Kernel, typename Arguments>
const char* launch(Kernel* kernel, int64_t blocks, int threads, void* stream, const Arguments& arguments) {
  if (blocks == 0) return nullptr;
#if defined(__CUDACC__)
  kernel<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  (void)stream;
  return cuda_on_host::run<kTalks>(kernel, blocks, threads, arguments);
#endif
}

// Of the current device; 0 without one, after which a launch says what is wrong.
inline int multiprocessors() {
#if defined(__CUDACC__)
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return count;
#else
  return cuda_on_host::multiprocessors();
#endif
}

// How often a block goes round its loop, of `round` items a time: so often that starting it costs little beside its
// work, and so rarely that there are blocks for the whole chip, several for each place in it.
inline int64_t rounds_for(int64_t items, int64_t round, int64_t most) {
  const int64_t places = int64_t{std::max(multiprocessors(), 1)} * (2048 / kThreads) * 4;
  return std::clamp<int64_t>(items / (places * round), 1, most);
}

}  // namespace shardops
