// The copies and the norm on CUDA tensors: checks, one list of work for each dtype, and its launch; sharded_adam has a
// file of its own. Nothing waits for the device, and results and scratch come from torch's allocator.
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "copy_arguments.h"
#include "cuda/kernels.h"
#include "cuda_stream.h"
#include "norm_arguments.h"
#include "op_helpers.h"

namespace shardops {
namespace {

constexpr std::array<Dtype, 3> kDtypes = {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16};

// What a launch takes, by the dtype of the tensors in it.
template <typename Item>
using ByDtype = std::array<std::vector<Item>, kDtypes.size()>;

template <typename Item>
std::vector<Item>& of_dtype(ByDtype<Item>& items, Dtype dtype) {
  return items[static_cast<size_t>(dtype)];
}

// ---- flatten_shard, unflatten_shard, cast_gather ----

ByDtype<CopySegment> copies_of(const CopyPlan& plan, bool into_buffer) {
  ByDtype<CopySegment> copies;
  // Padding goes with the first tensor's launch, or is one where there are no tensors.
  const Dtype padding_dtype = plan.arrays.empty() ? plan.buffer.dtype : plan.arrays[0].dtype;
  for (const Segment& segment : plan.segments) {
    char* flat = plan.buffer.at(segment.buffer_offset);
    if (segment.tensor < 0) {
      if (into_buffer) of_dtype(copies, padding_dtype).push_back(CopySegment{nullptr, flat, segment.numel});
      continue;
    }
    const Array& array = plan.arrays[segment.tensor];
    char* part = array.at(segment.tensor_offset);
    of_dtype(copies, array.dtype)
        .push_back(into_buffer ? CopySegment{part, flat, segment.numel} : CopySegment{flat, part, segment.numel});
  }
  return copies;
}

void copy_segments(const Device& device, const CopyPlan& plan, std::optional<double> scale, bool into_buffer,
                   const char* primitive) {
  check_aligned(plan.buffer.start, dtype_nbytes(plan.buffer.dtype), "buffer", 0);
  for (size_t i = 0; i < plan.arrays.size(); ++i) {
    check_aligned(plan.arrays[i].start, dtype_nbytes(plan.arrays[i].dtype), "tensors", i);
  }
  const float factor = static_cast<float>(scale.value_or(1.0));
  const DeviceScope scope(device);
  void* stream = current_stream(device);
  ByDtype<CopySegment> copies = copies_of(plan, into_buffer);
  for (const Dtype dtype : kDtypes) {
    const std::vector<CopySegment>& chosen = of_dtype(copies, dtype);
    const Dtype from = into_buffer ? dtype : plan.buffer.dtype;
    const Dtype to = into_buffer ? plan.buffer.dtype : dtype;
    const char* error = launch_cast_copy(chosen.data(), static_cast<int64_t>(chosen.size()), from, to,
                                         scale ? &factor : nullptr, stream);
    check_launch(error, primitive);
  }
}

void flatten_shard(Tensor out, StableListHandle tensor_list, Tensor segments, std::optional<double> scale) {
  const TensorList tensors(tensor_list);
  const Device device = kernel_device(out);
  const CopyPlan plan = plan_copy(device, out, "out", tensors, "tensors", segments);
  copy_segments(device, plan, scale, true, "flatten_shard");
}

void unflatten_shard(Tensor buffer, StableListHandle out_list, Tensor segments, std::optional<double> scale) {
  const TensorList out_tensors(out_list);
  const Device device = kernel_device(buffer);
  const CopyPlan plan = plan_copy(device, buffer, "buffer", out_tensors, "out_tensors", segments);
  copy_segments(device, plan, scale, false, "unflatten_shard");
}

bool copy_as_planned(Tensor buffer, StableListHandle tensor_list, Tensor segments, int64_t geometry, bool into_buffer) {
  const TensorList tensors(tensor_list);
  if (geometry_of(buffer, tensors) != geometry) return false;
  const Device device = kernel_device(buffer);
  const CopyPlan plan = plan_copy(device, buffer, "buffer", tensors, "tensors", segments);
  copy_segments(device, plan, std::nullopt, into_buffer, "copy_as_planned");
  return true;
}

void cast_gather(Tensor out, StableListHandle shard_list) {
  const TensorList shards(shard_list);
  const Device device = kernel_device(out);
  copy_segments(device, plan_gather(device, out, shards), std::nullopt, true, "cast_gather");
}

// ---- grad_norm ----

Tensor empty_on(const TensorView& beside, std::vector<int64_t> sizes, ScalarType dtype) {
  const auto type =
      torch::stable::detail::to<torch::stable::DeviceType>(torch::stable::detail::from(beside.device_type()));
  return torch::stable::empty(sizes, dtype, std::nullopt, torch::stable::Device(type, beside.device_index()));
}

std::tuple<Tensor, Tensor> grad_norm(StableListHandle grad_list, double norm_type) {
  const TensorList grads(grad_list);
  STD_TORCH_CHECK(!grads.empty(), "grads is empty");
  const Device device = kernel_device(grads[0]);
  const NormPlan plan = plan_norm(device, grads, norm_type);
  ByDtype<NormTensor> tensors;
  int64_t total_blocks = 0;
  for (size_t i = 0; i < plan.arrays.size(); ++i) {
    const NormArray& array = plan.arrays[i];
    check_aligned(array.start, dtype_nbytes(array.dtype), "grads", i);
    of_dtype(tensors, array.dtype).push_back(NormTensor{array.start, array.numel, total_blocks});
    total_blocks += array.blocks();
  }
  const DeviceScope scope(device);
  void* stream = current_stream(device);
  // Freed before the kernels ran: torch gives it to nobody but this stream's later work.
  Tensor blocks = empty_on(grads[0], {total_blocks}, ScalarType::Double);
  Tensor total = empty_on(grads[0], {}, ScalarType::Double);
  Tensor nonfinite = empty_on(grads[0], {}, ScalarType::Float);
  for (const Dtype dtype : kDtypes) {
    const std::vector<NormTensor>& chosen = of_dtype(tensors, dtype);
    const char* error = launch_norm_blocks(chosen.data(), static_cast<int64_t>(chosen.size()), dtype, plan.norm,
                                           data<double>(blocks), stream);
    check_launch(error, "grad_norm");
  }
  const char* error = launch_norm_combine(data<double>(blocks), total_blocks, plan.norm, data<double>(total),
                                          data<float>(nonfinite), stream);
  check_launch(error, "grad_norm");
  return {total, nonfinite};
}

}  // namespace
}  // namespace shardops

#if defined(SHARDOPS_TWIN)
STABLE_TORCH_LIBRARY_IMPL(shardops_twin, CPU, library) {
#else
STABLE_TORCH_LIBRARY_IMPL(shardops, CUDA, library) {
#endif
  library.impl("flatten_shard", TORCH_BOX(&shardops::flatten_shard));
  library.impl("unflatten_shard", TORCH_BOX(&shardops::unflatten_shard));
  library.impl("copy_as_planned", TORCH_BOX(&shardops::copy_as_planned));
  library.impl("cast_gather", TORCH_BOX(&shardops::cast_gather));
  library.impl("grad_norm", TORCH_BOX(&shardops::grad_norm));
}
