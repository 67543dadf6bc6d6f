// The current device of the CUDA runtime in this library, which is a copy of its own beside torch's.
#include "kernels.h"
#include "launch.cuh"

namespace shardops {

const char* use_device([[maybe_unused]] int32_t index) {
#if defined(__CUDACC__)
  const cudaError_t error = cudaSetDevice(index);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  return nullptr;
#endif
}

}  // namespace shardops
