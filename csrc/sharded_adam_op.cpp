// sharded_adam on the CPU: checks its lists against each other, lays them out as one range of work, and threads it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "adam_arguments.h"
#include "common/chunk_table.h"
#include "cpu/kernels.h"
#include "op_helpers.h"

namespace shardops {
namespace {

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
                  StableListHandle shadow_list, StableListHandle block_words_list, Tensor steps,
                  std::optional<Tensor> step_index, std::optional<Tensor> dither, int64_t rounding, double lr,
                  double beta1, double beta2, double eps, double weight_decay, bool decoupled_weight_decay,
                  bool maximize, std::optional<Tensor> lr_tensor, std::optional<Tensor> clip_coef,
                  std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  const TensorList params(param_list), grads(grad_list), exp_avgs(exp_avg_list), exp_avg_sqs(exp_avg_sq_list);
  const TensorList max_exp_avg_sqs(max_exp_avg_sq_list), masters(master_list), shadows(shadow_list);
  const TensorList block_words(block_words_list);
  if (params.empty()) return;
  const AdamLists lists{params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, shadows, block_words};
  const bool is_quantised = !block_words.empty();
  std::vector<AdamTensor> tensors = adam_tensors(cpu_device(), lists, is_quantised || dither.has_value());
  const DitherRow* rows = add_dither(dither, tensors);
  AdamFormat format = adam_format(lists, rounding, rows != nullptr);
  format.coupled_decay = !decoupled_weight_decay && weight_decay != 0.0;
  format.unscale = grad_scale.has_value();
  format.grad_scale = scalar_value(grad_scale, "grad_scale", 1.0f);
  const AdamOptions options{lr_value(lr, lr_tensor), beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize};
  const float coef = scalar_value(clip_coef, "clip_coef", 1.0f);
  STD_TORCH_CHECK(TensorView(steps).is_cpu(), "steps must be on the CPU, beside the parameters");
  const std::vector<int64_t> positions = step_positions(steps, step_index, params.size());
  if (scalar_value(found_inf, "found_inf", 0.0f) != 0.0f) return;

  std::vector<int64_t> sizes;
  sizes.reserve(params.size());
  for (const AdamTensor& tensor : tensors) sizes.push_back(work_items(format, tensor));
  const ChunkTable table(sizes);
  const CpuKernels& kernels = cpu_kernels();
  const float* counters = data<const float>(steps);
  torch::stable::parallel_for(
      0, table.total(), is_quantised ? kGrain / kBlock : kGrain, [&](int64_t begin, int64_t end) {
        int64_t scalars_step = -1;  // tensors mostly share their step: its scalars are computed once a thread
        AdamScalars scalars{};
        table.for_each(begin, end, [&](const Chunk& chunk) {
          const int64_t step = static_cast<int64_t>(counters[positions[chunk.tensor]]) + 1;
          if (step != scalars_step) scalars = adam_scalars(options, step, coef);
          scalars_step = step;
          const Dither noise =
              rows == nullptr ? kNoDither : dither_of(static_cast<uint32_t>(rows[chunk.tensor].salt), step);
          kernels.sharded_adam(format, tensors[chunk.tensor], scalars, noise, chunk.begin, chunk.end);
        });
      });
  float* updated = data<float>(steps);
  for (int64_t position : positions) updated[position] += 1.0f;
}

}  // namespace
}  // namespace shardops

STABLE_TORCH_LIBRARY_IMPL(shardops, CPU, library) { library.impl("sharded_adam", TORCH_BOX(&shardops::sharded_adam)); }
