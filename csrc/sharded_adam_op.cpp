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
  const TensorList& block_words;
};

// The data of one tensor of a list, checked against its parameter; null for an absent list.
void* checked_data(const TensorList& list, size_t index, const char* name, const Geometry& param, int32_t dtype) {
  if (list.empty()) return nullptr;
  const TensorView& tensor = list[index];
  check_cpu(tensor, name, index);
  STD_TORCH_CHECK(tensor.dtype_code() == dtype, name, "[", index, "] has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()),
                  "; each list has one dtype throughout, and max_exp_avg_sqs are float32");
  STD_TORCH_CHECK(is_same_order(tensor, param), name, "[", index, "] differs from params[", index,
                  "] in shape or memory order");
  return tensor.data_ptr();
}

Moments moments_of(const AdamLists& lists) {
  const ScalarType exp_avg = lists.exp_avgs[0].scalar_type(), exp_avg_sq = lists.exp_avg_sqs[0].scalar_type();
  const bool is_quantised = exp_avg == ScalarType::Char && exp_avg_sq == ScalarType::Byte;
  STD_TORCH_CHECK(
      is_quantised || (exp_avg == exp_avg_sq && (exp_avg == ScalarType::Float || exp_avg == ScalarType::BFloat16)),
      "exp_avgs have dtype ", torch::headeronly::toString(exp_avg), ", exp_avg_sqs ",
      torch::headeronly::toString(exp_avg_sq), "; moments are both float32, both bfloat16, or int8 and uint8 codes");
  STD_TORCH_CHECK(is_quantised == !lists.block_words.empty(), "block_words has ", lists.block_words.size(),
                  " tensors; quantised moments have one for each of params, others none");
  if (is_quantised) return Moments::kBlocks;
  return exp_avg == ScalarType::Float ? Moments::kFloat32 : Moments::kBFloat16;
}

Master master_of(const AdamLists& lists, Dtype param, int64_t rounding, bool has_dither) {
  STD_TORCH_CHECK(rounding >= 0 && rounding <= 2, "rounding is ", rounding,
                  "; 0 (none), 1 (to nearest) and 2 (stochastic) are supported");
  if (rounding != 0) {
    STD_TORCH_CHECK(lists.masters.empty() && param != Dtype::kFloat32, "rounding is ", rounding,
                    "; it is for params of a low-precision dtype without masters");
    if (rounding == 1) return Master::kNearest;
    STD_TORCH_CHECK(param == Dtype::kBFloat16 && has_dither,
                    "rounding is 2, stochastic; it needs bfloat16 params and dither");
    return Master::kStochastic;
  }
  if (lists.masters.empty()) {
    STD_TORCH_CHECK(param == Dtype::kFloat32, "params of a low-precision dtype need masters, or a rounding");
    return Master::kParam;
  }
  const ScalarType master = lists.masters[0].scalar_type();
  if (master == ScalarType::Float) return Master::kFloat32;
  STD_TORCH_CHECK(param == Dtype::kBFloat16 && (master == ScalarType::BFloat16 || master == ScalarType::Char),
                  "masters must be float32, or remainders (typed bfloat16 or int8) of bfloat16 params");
  return master == ScalarType::Char ? Master::kSplit24 : Master::kSplit;
}

AdamFormat adam_format(const AdamLists& lists, int64_t rounding, bool has_dither) {
  AdamFormat format{};
  format.param = to_dtype(lists.params[0], "params");
  format.grad = to_dtype(lists.grads[0], "grads");
  format.moments = moments_of(lists);
  format.master = master_of(lists, format.param, rounding, has_dither);
  format.has_shadow = !lists.shadows.empty();
  if (format.has_shadow) format.shadow = to_dtype(lists.shadows[0], "shadows");
  format.amsgrad = !lists.max_exp_avg_sqs.empty();
  return format;
}

int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// Sets a tensor's words and the length of its rows; its codes are row-major.
void add_blocks(AdamTensor& tensor, const TensorList& block_words, size_t index) {
  const TensorView& words = block_words[index];
  check_cpu(words, "block_words", index);
  STD_TORCH_CHECK(words.scalar_type() == ScalarType::Int && words.is_contiguous() && words.dim() == 3, "block_words[",
                  index, "] must be contiguous int32 of shape [rows, blocks, 2]");
  const int64_t rows = words.sizes()[0];
  tensor.block_words = data<BlockWords>(words);
  tensor.block_columns = rows > 0 ? tensor.numel / rows : 0;
  STD_TORCH_CHECK(
      tensor.block_columns * rows == tensor.numel &&
          (tensor.numel == 0 || (words.sizes()[1] == blocks_of(tensor.block_columns) && words.sizes()[2] == 2)),
      "block_words[", index, "] has ", rows, " rows of ", words.sizes()[1], " blocks of ", words.sizes()[2],
      " words for ", tensor.numel, " elements; it has two words for every ", kBlock, " elements of a row");
}

// One tensor's row of the table `dither`.
struct DitherRow {
  int64_t salt;
  int64_t first;
  int64_t columns;
  int64_t stride;
};

// The table's rows, checked; null without a table.
const DitherRow* dither_rows(const std::optional<Tensor>& dither, const std::vector<AdamTensor>& tensors) {
  if (!dither) return nullptr;
  const TensorView view = *dither;
  STD_TORCH_CHECK(view.is_cpu() && view.is_contiguous() && view.scalar_type() == ScalarType::Long && view.dim() == 2 &&
                      view.sizes()[0] == static_cast<int64_t>(tensors.size()) && view.sizes()[1] == 4,
                  "dither must be a contiguous int64 tensor of shape [", tensors.size(), ", 4] on the CPU");
  const auto* rows = data<const DitherRow>(view);
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(rows[i].salt >= 0 && rows[i].salt <= UINT32_MAX, "dither[", i, "] has the salt ", rows[i].salt,
                    "; it lies in [0, 2^32)");
    STD_TORCH_CHECK(rows[i].columns >= 1 || tensors[i].numel == 0, "dither[", i, "] has rows of ", rows[i].columns,
                    " elements; they have at least one");
  }
  return rows;
}

// is_ordered: blocks, or the elements' indices, are counted in row-major order.
std::vector<AdamTensor> adam_tensors(const AdamLists& lists, bool is_ordered) {
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
  check_length(lists.block_words, "block_words", true);
  const int32_t fp32 = aoti_torch_dtype_float32();
  const auto dtype_of = [fp32](const TensorList& list) { return list.empty() ? fp32 : list[0].dtype_code(); };
  const int32_t param_dtype = dtype_of(lists.params), grad_dtype = dtype_of(lists.grads);
  const int32_t exp_avg_dtype = dtype_of(lists.exp_avgs), exp_avg_sq_dtype = dtype_of(lists.exp_avg_sqs);
  const int32_t master_dtype = dtype_of(lists.masters), shadow_dtype = dtype_of(lists.shadows);
  std::vector<AdamTensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Geometry param(lists.params[i]);
    STD_TORCH_CHECK(param.is_contiguous || is_dense(lists.params[i]), "params[", i, "] has gaps or overlaps in memory");
    STD_TORCH_CHECK(param.is_contiguous || !is_ordered, "params[", i,
                    "] is not row-major, which dither and quantised moments need");
    AdamTensor tensor{};
    tensor.param = checked_data(lists.params, i, "params", param, param_dtype);
    tensor.grad = checked_data(lists.grads, i, "grads", param, grad_dtype);
    tensor.exp_avg = checked_data(lists.exp_avgs, i, "exp_avgs", param, exp_avg_dtype);
    tensor.exp_avg_sq = checked_data(lists.exp_avg_sqs, i, "exp_avg_sqs", param, exp_avg_sq_dtype);
    tensor.max_exp_avg_sq = static_cast<float*>(checked_data(lists.max_exp_avg_sqs, i, "max_exp_avg_sqs", param, fp32));
    tensor.master = checked_data(lists.masters, i, "masters", param, master_dtype);
    tensor.shadow = checked_data(lists.shadows, i, "shadows", param, shadow_dtype);
    tensor.numel = param.numel;
    tensor.index = GlobalIndex{0, 0, param.numel};
    if (!lists.block_words.empty()) add_blocks(tensor, lists.block_words, i);
    tensors.push_back(tensor);
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
  std::vector<AdamTensor> tensors = adam_tensors(lists, is_quantised || dither.has_value());
  const DitherRow* rows = dither_rows(dither, tensors);
  for (size_t i = 0; rows != nullptr && i < tensors.size(); ++i) {
    tensors[i].index =
        GlobalIndex{static_cast<uint32_t>(rows[i].first), static_cast<uint32_t>(rows[i].stride), rows[i].columns};
  }
  AdamFormat format = adam_format(lists, rounding, rows != nullptr);
  format.coupled_decay = !decoupled_weight_decay && weight_decay != 0.0;
  format.unscale = grad_scale.has_value();
  format.grad_scale = scalar_value(grad_scale, "grad_scale", 1.0f);
  const AdamOptions options{lr_value(lr, lr_tensor), beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize};
  const float coef = scalar_value(clip_coef, "clip_coef", 1.0f);
  const std::vector<int64_t> positions = step_positions(steps, step_index, params.size());
  if (scalar_value(found_inf, "found_inf", 0.0f) != 0.0f) return;

  std::vector<int64_t> sizes;
  sizes.reserve(params.size());
  for (const AdamTensor& tensor : tensors) {
    const bool has_blocks = is_quantised && tensor.numel > 0;
    sizes.push_back(has_blocks ? tensor.numel / tensor.block_columns * blocks_of(tensor.block_columns) : tensor.numel);
  }
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
