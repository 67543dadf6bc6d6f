// What the ops' CPU implementations share: reading tensors, and how work is cut for threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/checks.h"

namespace shardops {

// Elements that are worth a thread of their own: below, waking one costs more than it saves.
constexpr int64_t kGrain = 32768;

template <typename T>
inline T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// The value of a one-element float32 tensor on the CPU, or what its absence means.
inline float scalar_value(const std::optional<Tensor>& tensor, const char* name, float absent) {
  if (!tensor) return absent;
  const TensorView view = *tensor;
  STD_TORCH_CHECK(view.is_cpu() && view.numel() == 1 && view.scalar_type() == ScalarType::Float, name,
                  " must be one float32 on the CPU, beside the parameters");
  return *data<float>(view);
}

}  // namespace shardops
