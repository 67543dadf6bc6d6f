// Argument checks and dtype dispatch shared by the ops: what the kernels rely on, verified before a byte is written.
// The typed Python functions check the same and explain more; these guard calls that reach the op directly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "formats.h"
#include "tensor_list.h"

namespace shardops {

inline Dtype to_dtype(const TensorView& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                      "; float32, bfloat16 and float16 are supported");
  }
}

// Where a call's tensors must be. index: -1 where a device type has one device.
struct Device {
  int32_t type;
  int32_t index;

  bool has(const TensorView& tensor) const {
    return tensor.device_type() == type && (index < 0 || tensor.device_index() == index);
  }
};

inline Device cpu_device() { return Device{aoti_torch_device_type_cpu(), -1}; }

inline Device device_of(const TensorView& tensor) {
  return tensor.is_cpu() ? cpu_device() : Device{tensor.device_type(), tensor.device_index()};
}

inline void check_device(const Device& device, const TensorView& tensor, const char* name, int64_t index) {
  STD_TORCH_CHECK(device.has(tensor), name, "[", index, "] is on another device than the call's first tensor, or than ",
                  "this kernel runs on; all tensors of one call must be on one device");
}

// Every element once, without gaps, in some order of dimensions: a flat walk over memory visits exactly the tensor.
inline bool is_dense(const TensorView& tensor) {
  if (tensor.is_contiguous()) return true;
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (sizes[d] != 1) dims.emplace_back(strides[d], sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// What other tensors of an update are compared with, read once.
struct Geometry {
  explicit Geometry(const TensorView& tensor)
      : numel(tensor.numel()),
        dim(tensor.dim()),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        is_contiguous(tensor.is_contiguous()) {}

  int64_t numel;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;
  bool is_contiguous;
};

// Same shape, and every element at the same distance from the start in both.
inline bool is_same_order(const TensorView& tensor, const Geometry& other) {
  if (tensor.dim() != other.dim || !std::equal(other.sizes, other.sizes + other.dim, tensor.sizes())) return false;
  if (other.is_contiguous && tensor.is_contiguous()) return true;
  const int64_t* strides = tensor.strides();
  for (int64_t d = 0; d < other.dim; ++d) {
    if (other.sizes[d] != 1 && strides[d] != other.strides[d]) return false;
  }
  return true;
}

}  // namespace shardops
