// Where an op's CUDA kernels run: the tensors' device made current, torch's current stream on it, and a launch's error.
// Under SHARDOPS_TWIN the same glue runs kernels compiled for the CPU, on CPU tensors (tests/cuda_twin).
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#if !defined(SHARDOPS_TWIN)
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include "common/checks.h"
#include "cuda/kernels.h"

namespace shardops {

// Of a call's first tensor, which all others must share.
inline Device kernel_device(const TensorView& first) {
#if defined(SHARDOPS_TWIN)
  STD_TORCH_CHECK(first.is_cpu(), "the first tensor is not on the CPU, where the CUDA kernels' twins run");
  return cpu_device();
#else
  static const int32_t cuda = aoti_torch_device_type_cuda();
  STD_TORCH_CHECK(first.device_type() == cuda, "the first tensor is not on a CUDA device, where these kernels run; ",
                  "all tensors of one call must be on one device");
  return device_of(first);
#endif
}

#if defined(SHARDOPS_TWIN)

class DeviceScope {
 public:
  explicit DeviceScope(const Device&) {}
};

inline void* current_stream(const Device&) { return nullptr; }

#else

// Makes the device current until the scope ends.
class DeviceScope {
 public:
  explicit DeviceScope(const Device& device) : guard_(device.index) {
    const char* error = use_device(device.index);
    STD_TORCH_CHECK(error == nullptr, "CUDA device ", device.index, " cannot be used: ", error);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// torch's current stream on the device. Looked up in what torch has loaded, so that one library serves a torch with
// CUDA and one without: it links with neither.
inline void* current_stream(const Device& device) {
  using Function = AOTITorchError (*)(int32_t device_index, void** stream);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(symbol);
  }();
  STD_TORCH_CHECK(function != nullptr, "libtorch_cuda.so, which knows the current stream, is not loaded; ",
                  "this torch has no CUDA: install one that has, or name another backend");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(function(device.index, &stream));
  return stream;
}

#endif

// A CPU reads at any address, a GPU gives up the whole process's context. nbytes: of an element, a power of two.
inline void check_aligned(const void* start, int64_t nbytes, const char* name, size_t index) {
  STD_TORCH_CHECK((reinterpret_cast<uintptr_t>(start) & (nbytes - 1)) == 0, name, "[", index,
                  "] starts at an address that is no multiple of its elements' ", nbytes,
                  " bytes, which a GPU cannot read; clone it");
}

// error: what a launcher returned.
inline void check_launch(const char* error, const char* primitive) {
  STD_TORCH_CHECK(error == nullptr, "CUDA could not launch ", primitive, ": ", error,
                  "; an earlier kernel's error shows here too (CUDA_LAUNCH_BLOCKING=1 tells), and this library runs ",
                  "only on the GPUs that it was built for");
}

}  // namespace shardops
