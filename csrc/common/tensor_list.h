// Tensor lists as the dispatcher hands them over, without a torch::stable::Tensor for each element: that class costs
// two allocations a tensor, and a step over a thousand small parameters would spend most of its time in them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace shardops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A borrowed tensor; the names are torch::stable::Tensor's.
class TensorView {
 public:
  explicit TensorView(AtenTensorHandle handle) : handle_(handle) {}
  TensorView(const Tensor& tensor) : handle_(tensor.get()) {}  // NOLINT: a tensor is a view of itself

  void* data_ptr() const { return get<void*>(aoti_torch_get_data_ptr); }
  int64_t numel() const { return get<int64_t>(aoti_torch_get_numel); }
  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides); }
  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  int32_t device_type() const { return get<int32_t>(aoti_torch_get_device_type); }
  int32_t device_index() const { return get<int32_t>(aoti_torch_get_device_index); }
  bool is_strided() const {
    static const int32_t strided = aoti_torch_layout_strided();
    return get<int32_t>(aoti_torch_get_layout) == strided;
  }
  bool is_cpu() const {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    return device_type() == cpu;
  }
  // The C interface's number of a dtype: equal numbers, equal dtypes.
  int32_t dtype_code() const { return get<int32_t>(aoti_torch_get_dtype); }
  ScalarType scalar_type() const {
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype_code()));
  }

 private:
  template <typename T, typename Getter>
  T get(Getter getter) const {
    T value;
    STABLE_TORCH_ERROR_CODE_CHECK(getter(handle_, &value));
    return value;
  }

  AtenTensorHandle handle_;
};

// Owns the elements of a list argument for the length of a call.
class TensorList {
 public:
  explicit TensorList(StableListHandle list) {
    size_t size = 0;
    int32_t error = torch_list_size(list, &size);
    handles_.reserve(size);
    views_.reserve(size);
    for (size_t i = 0; i < size && error == 0; ++i) {
      StableIValue element;
      error = torch_list_get_item(list, i, &element);
      if (error != 0) break;
      handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(element));
      views_.emplace_back(handles_.back());
    }
    torch_delete_list(list);
    if (error != 0) {
      release();
      STD_TORCH_CHECK(false, "a list of tensors could not be read");
    }
  }
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;
  ~TensorList() { release(); }

  size_t size() const { return views_.size(); }
  bool empty() const { return views_.empty(); }
  const TensorView& operator[](size_t index) const { return views_[index]; }
  const std::vector<TensorView>& views() const { return views_; }

 private:
  void release() {
    for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
    handles_.clear();
  }

  std::vector<AtenTensorHandle> handles_;
  std::vector<TensorView> views_;
};

}  // namespace shardops
