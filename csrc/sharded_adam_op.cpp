// sharded_adam on the CPU: checks its lists against each other, lays them out as one range of work, and threads it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <numeric>
#include <optional>
#include <vector>

#include "common/checks.h"
#include "common/chunk_table.h"
#include "cpu/kernels.h"
#include "op_helpers.h"

namespace shardops {
namespace {

// The lists of one call, checked against each other.
struct AdamLists {
  const TensorList& params;
  const TensorList& grads;
  const TensorList& exp_avgs;
  const TensorList& exp_avg_sqs;
  const TensorList& max_exp_avg_sqs;
  const TensorList& masters;
  const TensorList& shadows;
};

// The data of one tensor of a list, checked against its parameter; null for an absent list.
void* checked_data(const TensorList& list, size_t index, const char* name, const Geometry& param, int32_t dtype) {
  if (list.empty()) return nullptr;
  const TensorView& tensor = list[index];
  check_cpu(tensor, name, index);
  STD_TORCH_CHECK(tensor.dtype_code() == dtype, name, "[", index, "] has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()),
                  "; moments are float32, and each other list has one dtype throughout");
  STD_TORCH_CHECK(is_same_order(tensor, param), name, "[", index, "] differs from params[", index,
                  "] in shape or memory order");
  return tensor.data_ptr();
}

AdamFormat adam_format(const AdamLists& lists) {
  AdamFormat format{};
  format.param = to_dtype(lists.params[0], "params");
  format.grad = to_dtype(lists.grads[0], "grads");
  if (lists.masters.empty()) {
    STD_TORCH_CHECK(format.param == Dtype::kFloat32, "params of a low-precision dtype need masters");
    format.master = Master::kParam;
  } else if (lists.masters[0].scalar_type() == ScalarType::Float) {
    format.master = Master::kFloat32;
  } else {
    STD_TORCH_CHECK(format.param == Dtype::kBFloat16 && lists.masters[0].scalar_type() == ScalarType::BFloat16,
                    "masters must be float32, or remainders (typed bfloat16) of bfloat16 params");
    format.master = Master::kSplit;
  }
  format.has_shadow = !lists.shadows.empty();
  if (format.has_shadow) format.shadow = to_dtype(lists.shadows[0], "shadows");
  format.amsgrad = !lists.max_exp_avg_sqs.empty();
  return format;
}

std::vector<AdamTensor> adam_tensors(const AdamLists& lists) {
  const size_t count = lists.params.size();
  const auto check_length = [count](const TensorList& list, const char* name, bool optional) {
    STD_TORCH_CHECK(list.size() == count || (optional && list.empty()), name, " has ", list.size(),
                    " tensors, params has ", count);
  };
  check_length(lists.grads, "grads", false);
  check_length(lists.exp_avgs, "exp_avgs", false);
  check_length(lists.exp_avg_sqs, "exp_avg_sqs", false);
  check_length(lists.max_exp_avg_sqs, "max_exp_avg_sqs", true);
  check_length(lists.masters, "masters", true);
  check_length(lists.shadows, "shadows", true);
  const int32_t fp32 = aoti_torch_dtype_float32();
  const auto dtype_of = [fp32](const TensorList& list) { return list.empty() ? fp32 : list[0].dtype_code(); };
  const int32_t param_dtype = dtype_of(lists.params), grad_dtype = dtype_of(lists.grads);
  const int32_t master_dtype = dtype_of(lists.masters), shadow_dtype = dtype_of(lists.shadows);
  std::vector<AdamTensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Geometry param(lists.params[i]);
    STD_TORCH_CHECK(param.is_contiguous || is_dense(lists.params[i]), "params[", i, "] has gaps or overlaps in memory");
    const auto moment = [&](const TensorList& list, const char* name) {
      return static_cast<float*>(checked_data(list, i, name, param, fp32));
    };
    tensors.push_back(AdamTensor{
        checked_data(lists.params, i, "params", param, param_dtype),
        checked_data(lists.grads, i, "grads", param, grad_dtype),
        moment(lists.exp_avgs, "exp_avgs"),
        moment(lists.exp_avg_sqs, "exp_avg_sqs"),
        moment(lists.max_exp_avg_sqs, "max_exp_avg_sqs"),
        checked_data(lists.masters, i, "masters", param, master_dtype),
        checked_data(lists.shadows, i, "shadows", param, shadow_dtype),
        param.numel,
    });
  }
  return tensors;
}

// The positions in `steps` of the tensors' counters.
std::vector<int64_t> step_positions(const TensorView& steps, const std::optional<Tensor>& step_index, size_t count) {
  STD_TORCH_CHECK(steps.is_cpu() && steps.is_contiguous() && steps.scalar_type() == ScalarType::Float,
                  "steps must be a contiguous float32 tensor on the CPU");
  std::vector<int64_t> positions(count);
  if (step_index) {
    const TensorView index = *step_index;
    STD_TORCH_CHECK(index.is_cpu() && index.is_contiguous() && index.scalar_type() == ScalarType::Long &&
                        index.numel() == static_cast<int64_t>(count),
                    "step_index must be a contiguous int64 tensor on the CPU with one element for each of the ", count,
                    " params");
    const int64_t* given = data<const int64_t>(index);
    positions.assign(given, given + count);
  } else {
    std::iota(positions.begin(), positions.end(), 0);
  }
  const int64_t counters = steps.numel();
  std::vector<bool> used(counters);
  for (int64_t position : positions) {
    STD_TORCH_CHECK(position >= 0 && position < counters, "step_index holds ", position, ", steps has ", counters,
                    " elements");
    STD_TORCH_CHECK(!used[position], "step_index holds ", position, " twice; each of params has a counter of its own");
    used[position] = true;
  }
  return positions;
}

double lr_value(double lr, const std::optional<Tensor>& lr_tensor) {
  if (!lr_tensor) return lr;
  const TensorView view = *lr_tensor;
  STD_TORCH_CHECK(view.is_cpu() && view.numel() == 1, "lr must be one element on the CPU");
  if (view.scalar_type() == ScalarType::Double) return *data<double>(view);
  STD_TORCH_CHECK(view.scalar_type() == ScalarType::Float, "lr must be float32 or float64");
  return *data<float>(view);
}

void sharded_adam(StableListHandle param_list, StableListHandle grad_list, StableListHandle exp_avg_list,
                  StableListHandle exp_avg_sq_list, StableListHandle max_exp_avg_sq_list, StableListHandle master_list,
                  StableListHandle shadow_list, Tensor steps, std::optional<Tensor> step_index, double lr, double beta1,
                  double beta2, double eps, double weight_decay, bool decoupled_weight_decay, bool maximize,
                  std::optional<Tensor> lr_tensor, std::optional<Tensor> clip_coef, std::optional<Tensor> grad_scale,
                  std::optional<Tensor> found_inf) {
  const TensorList params(param_list), grads(grad_list), exp_avgs(exp_avg_list), exp_avg_sqs(exp_avg_sq_list);
  const TensorList max_exp_avg_sqs(max_exp_avg_sq_list), masters(master_list), shadows(shadow_list);
  if (params.empty()) return;
  const AdamLists lists{params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, shadows};
  const std::vector<AdamTensor> tensors = adam_tensors(lists);
  AdamFormat format = adam_format(lists);
  format.coupled_decay = !decoupled_weight_decay && weight_decay != 0.0;
  format.unscale = grad_scale.has_value();
  format.grad_scale = scalar_value(grad_scale, "grad_scale", 1.0f);
  const AdamOptions options{lr_value(lr, lr_tensor), beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize};
  const float coef = scalar_value(clip_coef, "clip_coef", 1.0f);
  const std::vector<int64_t> positions = step_positions(steps, step_index, params.size());
  if (scalar_value(found_inf, "found_inf", 0.0f) != 0.0f) return;

  std::vector<int64_t> sizes;
  sizes.reserve(params.size());
  for (const AdamTensor& tensor : tensors) sizes.push_back(tensor.numel);
  const ChunkTable table(sizes);
  const CpuKernels& kernels = cpu_kernels();
  const float* counters = data<const float>(steps);
  torch::stable::parallel_for(0, table.total(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t scalars_step = -1;  // tensors mostly share their step: its scalars are computed once a thread
    AdamScalars scalars{};
    table.for_each(begin, end, [&](const Chunk& chunk) {
      const int64_t step = static_cast<int64_t>(counters[positions[chunk.tensor]]) + 1;
      if (step != scalars_step) scalars = adam_scalars(options, step, coef);
      scalars_step = step;
      kernels.sharded_adam(format, tensors[chunk.tensor], scalars, chunk.begin, chunk.end);
    });
  });
  float* updated = data<float>(steps);
  for (int64_t position : positions) updated[position] += 1.0f;
}

}  // namespace
}  // namespace shardops

STABLE_TORCH_LIBRARY_IMPL(shardops, CPU, library) { library.impl("sharded_adam", TORCH_BOX(&shardops::sharded_adam)); }
