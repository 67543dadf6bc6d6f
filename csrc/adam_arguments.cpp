// The checks of sharded_adam's arguments.
#include "adam_arguments.h"

#include <numeric>

#include "op_helpers.h"

namespace shardops {
namespace {

// The data of one tensor of a list, checked against its parameter; null for an absent list.
void* checked_data(const Device& device, const TensorList& list, size_t index, const char* name, const Geometry& param,
                   int32_t dtype) {
  if (list.empty()) return nullptr;
  const TensorView& tensor = list[index];
  check_device(device, tensor, name, index);
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

// Sets a tensor's words and the length of its rows; its codes are row-major.
void add_blocks(const Device& device, AdamTensor& tensor, const TensorList& block_words, size_t index) {
  const TensorView& words = block_words[index];
  check_device(device, words, "block_words", index);
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

}  // namespace

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

const DitherRow* add_dither(const std::optional<Tensor>& dither, std::vector<AdamTensor>& tensors) {
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
    tensors[i].index =
        GlobalIndex{static_cast<uint32_t>(rows[i].first), static_cast<uint32_t>(rows[i].stride), rows[i].columns};
  }
  return rows;
}

std::vector<AdamTensor> adam_tensors(const Device& device, const AdamLists& lists, bool is_ordered) {
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
    tensor.param = checked_data(device, lists.params, i, "params", param, param_dtype);
    tensor.grad = checked_data(device, lists.grads, i, "grads", param, grad_dtype);
    tensor.exp_avg = checked_data(device, lists.exp_avgs, i, "exp_avgs", param, exp_avg_dtype);
    tensor.exp_avg_sq = checked_data(device, lists.exp_avg_sqs, i, "exp_avg_sqs", param, exp_avg_sq_dtype);
    tensor.max_exp_avg_sq =
        static_cast<float*>(checked_data(device, lists.max_exp_avg_sqs, i, "max_exp_avg_sqs", param, fp32));
    tensor.master = checked_data(device, lists.masters, i, "masters", param, master_dtype);
    tensor.shadow = checked_data(device, lists.shadows, i, "shadows", param, shadow_dtype);
    tensor.numel = param.numel;
    tensor.index = GlobalIndex{0, 0, param.numel};
    if (!lists.block_words.empty()) add_blocks(device, tensor, lists.block_words, i);
    tensors.push_back(tensor);
  }
  return tensors;
}

std::vector<int64_t> step_positions(const TensorView& steps, const std::optional<Tensor>& step_index, size_t count) {
  STD_TORCH_CHECK(steps.is_contiguous() && steps.scalar_type() == ScalarType::Float,
                  "steps must be a contiguous float32 tensor");
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

}  // namespace shardops
