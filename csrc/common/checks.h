// Argument checks and dtype dispatch shared by the ops: what the kernels rely on, verified before a byte is written.
// The typed Python functions check the same and explain more; these guard calls that reach the op directly.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "../cpu/kernels.h"

namespace shardops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_supported(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

inline Dtype to_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                      "; float32, bfloat16 and float16 are supported");
  }
}

inline void check_cpu(const Tensor& tensor, const char* name, int64_t index) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, "[", index, "] is not on the CPU, where this kernel runs; ",
                  "all tensors of one call must be on one device");
}

// Every element once, without gaps, in some order of dimensions: a flat walk over memory visits exactly the tensor.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Same elements at the same distance from the start of each.
inline bool is_same_order(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != b.size(d) || (a.size(d) != 1 && a.stride(d) != b.stride(d))) return false;
  }
  return true;
}

}  // namespace shardops
