// sharded_adam on CUDA tensors: the checked lists are put into kernel parameters, as many tensors as they carry, and
// launched. The device reads its scalars itself; the host waits for nothing.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "adam_arguments.h"
#include "cuda/adam_launch.h"
#include "cuda_stream.h"
#include "op_helpers.h"

namespace shardops {
namespace {

// The address of a scalar that the device reads; null if absent.
template <typename T = float>
const T* scalar_address(const Device& device, const std::optional<Tensor>& tensor, const char* name, ScalarType dtype) {
  if (!tensor || TensorView(*tensor).scalar_type() != dtype) return nullptr;
  const TensorView view = *tensor;
  STD_TORCH_CHECK(device.has(view) && view.numel() == 1, name, " must be one element beside the parameters");
  return data<const T>(view);
}

const float* float_address(const Device& device, const std::optional<Tensor>& tensor, const char* name) {
  const float* address = scalar_address(device, tensor, name, ScalarType::Float);
  STD_TORCH_CHECK(address != nullptr || !tensor, name, " must be float32");
  return address;
}

// ---- the scalars of the tensors' steps ----

// Either known on the host, then they travel with the launch, or made on the device.
struct Scalars {
  std::optional<Tensor> on_device;  // keeps the memory until the launches are queued
  std::vector<StepScalars> values;  // different ones
  std::vector<uint32_t> numbers;    // of each tensor's
};

Scalars host_scalars(const AdamOptions& options, const float* counters, const std::vector<int64_t>& positions) {
  Scalars scalars;
  for (int64_t position : positions) {
    const auto step = static_cast<uint32_t>(static_cast<int64_t>(counters[position]) + 1);
    // From the end: tensors mostly share their step with the one before.
    const auto known = std::find_if(scalars.values.rbegin(), scalars.values.rend(),
                                    [step](const StepScalars& value) { return value.step == step; });
    if (known == scalars.values.rend()) {
      scalars.numbers.push_back(static_cast<uint32_t>(scalars.values.size()));
      scalars.values.push_back(StepScalars{adam_scalars(options, step, 1.0f), step});
    } else {
      scalars.numbers.push_back(static_cast<uint32_t>(scalars.values.rend() - known - 1));
    }
  }
  return scalars;
}

Scalars device_scalars(ScalarsRequest request, const TensorView& steps, bool counters_on_host,
                       const std::vector<int64_t>& positions, const Tensor& like, void* stream) {
  constexpr auto kWords = static_cast<int64_t>(sizeof(StepScalars) / sizeof(float));
  Scalars scalars;
  scalars.on_device = torch::stable::new_empty(like, {static_cast<int64_t>(positions.size()) * kWords},
                                               std::make_optional(ScalarType::Float));
  std::vector<uint32_t> numbers;
  for (size_t i = 0; i < positions.size(); ++i) {
    scalars.numbers.push_back(static_cast<uint32_t>(i));
    const int64_t step = counters_on_host ? static_cast<int64_t>(data<float>(steps)[positions[i]]) + 1 : positions[i];
    numbers.push_back(static_cast<uint32_t>(step));
  }
  request.counters = counters_on_host ? nullptr : data<float>(steps);
  request.numbers = numbers.data();
  request.count = static_cast<int64_t>(numbers.size());
  request.scalars = data<StepScalars>(TensorView(*scalars.on_device));
  check_launch(launch_adam_scalars(request, stream), "sharded_adam's scalars");
  return scalars;
}

// ---- launches ----

// Collects tensors until the parameters of a launch are full.
class Launcher {
 public:
  Launcher(const AdamKernelKind& kind, const AdamLaunch& empty, const Scalars& scalars, int64_t items, void* stream)
      : kind_(kind), scalars_(scalars), stream_(stream), launch_(std::make_unique<AdamLaunch>(empty)) {
    launch_->chunk_items = static_cast<uint32_t>(adam_chunk_items(kind, items));
    if (scalars.on_device) launch_->device_scalars = data<const StepScalars>(TensorView(*scalars.on_device));
  }

  void add(const AdamTensor& tensor, const DitherRow* row, int64_t items, uint32_t number) {
    if (items == 0) return;
    const int64_t chunks = (items + launch_->chunk_items - 1) / launch_->chunk_items;
    const bool is_full = (launch_->tensors + 1) * int64_t{launch_->fields} > kWordsInLaunch;
    if (is_full || chunks_ + chunks > INT32_MAX || !has_room_for(number)) flush();
    uint64_t* words = launch_->words + launch_->tensors * launch_->fields;
    words[kWork] = static_cast<uint64_t>(chunks_) | static_cast<uint64_t>(slot_of(number)) << 32;
    words[kParamField] = address(tensor.param);
    words[kGradField] = address(tensor.grad);
    words[kExpAvgField] = address(tensor.exp_avg);
    words[kExpAvgSqField] = address(tensor.exp_avg_sq);
    words[kItemsField] = static_cast<uint64_t>(items);
    set(words, kMasterField, address(tensor.master));
    set(words, kMaxExpAvgSqField, address(tensor.max_exp_avg_sq));
    set(words, kShadowField, address(tensor.shadow));
    set(words, kSaltField, row == nullptr ? 0 : static_cast<uint64_t>(row->salt));
    set(words, kIndexField, tensor.index.first | static_cast<uint64_t>(tensor.index.stride) << 32);
    set(words, kIndexColumnsField, static_cast<uint64_t>(tensor.index.columns));
    set(words, kBlockWordsField, address(tensor.block_words));
    set(words, kBlockColumnsField, static_cast<uint64_t>(tensor.block_columns));
    ++launch_->tensors;
    chunks_ += chunks;
  }

  void flush() {
    if (launch_->tensors > 0) check_launch(launch_sharded_adam(kind_, *launch_, chunks_, stream_), "sharded_adam");
    launch_->tensors = 0;
    chunks_ = 0;
    slots_ = 0;
  }

 private:
  // Whether this tensor's scalars have a place in the launch that is being filled.
  bool has_room_for(uint32_t number) const {
    if (scalars_.on_device || slots_ < kScalarsInLaunch) return true;
    return std::any_of(launch_->scalars, launch_->scalars + slots_,
                       [&](const StepScalars& known) { return known.step == scalars_.values[number].step; });
  }

  static constexpr int64_t kWordsInLaunch = sizeof(AdamLaunch::words) / sizeof(uint64_t);

  static uint64_t address(const void* start) { return reinterpret_cast<uintptr_t>(start); }

  void set(uint64_t* words, AdamField field, uint64_t value) const {
    if (launch_->has(field)) words[launch_->column[field]] = value;
  }

  // Where the kernel finds a tensor's scalars. On the host's side, those that tensors of this launch have are put in.
  uint32_t slot_of(uint32_t number) {
    if (scalars_.on_device) return number;
    for (uint32_t slot = slots_; slot-- > 0;) {
      if (launch_->scalars[slot].step == scalars_.values[number].step) return slot;
    }
    launch_->scalars[slots_] = scalars_.values[number];
    return slots_++;
  }

  const AdamKernelKind& kind_;
  const Scalars& scalars_;
  void* stream_;
  std::unique_ptr<AdamLaunch> launch_;
  int64_t chunks_ = 0;
  uint32_t slots_ = 0;
};

int64_t moment_nbytes(const AdamFormat& format) {
  return format.moments == Moments::kFloat32 ? 4 : format.moments == Moments::kBFloat16 ? 2 : 1;
}

int64_t master_nbytes(const AdamFormat& format) {
  return format.master == Master::kSplit24 ? 1 : format.master == Master::kSplit ? 2 : 4;
}

void check_tensor_aligned(const AdamFormat& format, const AdamTensor& tensor, size_t index) {
  check_aligned(tensor.param, dtype_nbytes(format.param), "params", index);
  check_aligned(tensor.grad, dtype_nbytes(format.grad), "grads", index);
  check_aligned(tensor.exp_avg, moment_nbytes(format), "exp_avgs", index);
  check_aligned(tensor.exp_avg_sq, moment_nbytes(format), "exp_avg_sqs", index);
  check_aligned(tensor.max_exp_avg_sq, 4, "max_exp_avg_sqs", index);
  check_aligned(tensor.master, master_nbytes(format), "masters", index);
  check_aligned(tensor.shadow, dtype_nbytes(format.shadow), "shadows", index);
  check_aligned(tensor.block_words, 4, "block_words", index);
}

// Whether `next` begins where `tensor` ends, in all its arrays.
bool follows(const AdamFormat& format, const AdamTensor& tensor, const AdamTensor& next) {
  const auto ends_at = [&tensor](const void* start, int64_t nbytes, const void* other) {
    if (start == nullptr) return other == nullptr;  // an absent list
    return static_cast<const char*>(start) + tensor.numel * nbytes == other;
  };
  if (tensor.numel == 0 || next.numel == 0) return false;
  return ends_at(tensor.param, dtype_nbytes(format.param), next.param) &&
         ends_at(tensor.grad, dtype_nbytes(format.grad), next.grad) &&
         ends_at(tensor.exp_avg, moment_nbytes(format), next.exp_avg) &&
         ends_at(tensor.exp_avg_sq, moment_nbytes(format), next.exp_avg_sq) &&
         ends_at(tensor.max_exp_avg_sq, 4, next.max_exp_avg_sq) &&
         ends_at(tensor.master, master_nbytes(format), next.master) &&
         ends_at(tensor.shadow, dtype_nbytes(format.shadow), next.shadow);
}

// Whether a tensor has full blocks only, that begin where eight elements may be accessed at once. True without blocks:
// kernels for elements see for themselves.
bool takes_wide_blocks(const AdamFormat& format, const AdamTensor& tensor) {
  if (format.moments != Moments::kBlocks) return true;
  const auto fits = [](const void* address, int64_t nbytes) {
    return reinterpret_cast<uintptr_t>(address) % std::min<int64_t>(8 * nbytes, 16) == 0;  // null fits
  };
  return tensor.block_columns % kBlock == 0 && fits(tensor.block_words, 1) &&
         fits(tensor.param, dtype_nbytes(format.param)) && fits(tensor.grad, dtype_nbytes(format.grad)) &&
         fits(tensor.exp_avg, 1) && fits(tensor.exp_avg_sq, 1) && fits(tensor.max_exp_avg_sq, 4) &&
         fits(tensor.master, master_nbytes(format)) && fits(tensor.shadow, dtype_nbytes(format.shadow));
}

AdamLaunch empty_launch(const AdamFormat& format, bool dithered, bool maximize) {
  AdamLaunch launch{};
  launch.maximize = maximize;
  launch.coupled_decay = format.coupled_decay;
  launch.dithered = dithered;
  launch.copies_param = format.master == Master::kFloat32;
  launch.param = format.param;
  launch.shadow = format.shadow;
  const bool is_quantised = format.moments == Moments::kBlocks;
  // By dither and by index: what a block's own dither does not cover.
  const bool is_indexed = dithered && (format.moments == Moments::kBFloat16 || format.master == Master::kSplit24 ||
                                       format.master == Master::kStochastic);
  const bool wanted[kFieldCount] = {
      true,
      true,
      true,
      true,
      true,
      true,
      /*kMasterField*/ format.master != Master::kParam && format.master != Master::kNearest &&
          format.master != Master::kStochastic,
      /*kMaxExpAvgSqField*/ format.amsgrad,
      /*kShadowField*/ format.has_shadow,
      /*kSaltField*/ dithered && (is_indexed || is_quantised),
      /*kIndexField*/ is_indexed,
      /*kIndexColumnsField*/ is_indexed,
      /*kBlockWordsField*/ is_quantised,
      /*kBlockColumnsField*/ is_quantised,
  };
  for (uint32_t field = 0; field < kFieldCount; ++field) {
    launch.column[field] = wanted[field] ? static_cast<int8_t>(launch.fields++) : int8_t{-1};
  }
  return launch;
}

bool is_strided(const AdamLaunch& launch, const std::vector<AdamTensor>& tensors) {
  return launch.has(kIndexField) && std::any_of(tensors.begin(), tensors.end(), [](const AdamTensor& tensor) {
           return tensor.index.columns < tensor.numel &&
                  tensor.index.stride != static_cast<uint32_t>(tensor.index.columns);
         });
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
  const Device device = kernel_device(params[0]);
  const AdamLists lists{params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, shadows, block_words};
  std::vector<AdamTensor> tensors = adam_tensors(device, lists, !block_words.empty() || dither.has_value());
  const DitherRow* rows = add_dither(dither, tensors);
  AdamFormat format = adam_format(lists, rounding, rows != nullptr);
  format.coupled_decay = !decoupled_weight_decay && weight_decay != 0.0;
  format.unscale = grad_scale.has_value();
  for (size_t i = 0; i < tensors.size(); ++i) check_tensor_aligned(format, tensors[i], i);

  AdamLaunch empty = empty_launch(format, rows != nullptr, maximize);
  empty.strided = is_strided(empty, tensors);
  empty.clip_coef = float_address(device, clip_coef, "clip_coef");
  empty.grad_scale = float_address(device, grad_scale, "grad_scale");
  empty.found_inf = float_address(device, found_inf, "found_inf");
  ScalarsRequest request{};
  request.options = AdamOptions{lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize};
  request.found_inf = empty.found_inf;
  request.lr_float = scalar_address<float>(device, lr_tensor, "lr", ScalarType::Float);
  request.lr_double = scalar_address<double>(device, lr_tensor, "lr", ScalarType::Double);
  STD_TORCH_CHECK(!lr_tensor || request.lr_float != nullptr || request.lr_double != nullptr,
                  "lr must be float32 or float64");

  const std::vector<int64_t> positions = step_positions(steps, step_index, params.size());
#if defined(SHARDOPS_TWIN)
  const bool counters_on_host = !found_inf;  // all is on the CPU: both ways are gone
#else
  const bool counters_on_host = TensorView(steps).is_cpu();
#endif
  STD_TORCH_CHECK(counters_on_host || device.has(steps), "steps must be beside the parameters, or on the CPU");
  STD_TORCH_CHECK(!counters_on_host || !found_inf,
                  "steps are on the CPU, but found_inf on the device decides whether they count; move steps there");

  const DeviceScope scope(device);
  void* stream = current_stream(device);
  const Scalars scalars =
      counters_on_host && !lr_tensor
          ? host_scalars(request.options, data<const float>(steps), positions)
          : device_scalars(request, steps, counters_on_host, positions, counters_on_host ? *lr_tensor : steps, stream);

  int64_t items = 0;
  for (const AdamTensor& tensor : tensors) items += work_items(format, tensor);
  const bool general = format.amsgrad || format.coupled_decay || format.unscale || format.has_shadow ||
                       empty.copies_param || empty.strided || !(1.0 - beta1 < 0.5);
  const AdamKernelKind kind{format.master, format.param, format.grad, format.moments, general, true};
  const AdamKernelKind narrow{format.master, format.param, format.grad, format.moments, true, false};
  Launcher launcher(kind, empty, scalars, items, stream), narrow_launcher(narrow, empty, scalars, items, stream);
  // Neighbours in memory whose elements are all updated alike become one. Scalars that the device makes may differ.
  const bool may_merge = !scalars.on_device && format.moments != Moments::kBlocks && !empty.has(kIndexField);
  for (size_t i = 0; i < tensors.size();) {
    AdamTensor merged = tensors[i];
    const uint32_t number = scalars.numbers[i];
    const DitherRow* row = rows == nullptr ? nullptr : rows + i;
    for (++i; may_merge && i < tensors.size() && scalars.numbers[i] == number && follows(format, merged, tensors[i]);
         ++i) {
      merged.numel += tensors[i].numel;
    }
    (takes_wide_blocks(format, merged) ? launcher : narrow_launcher)
        .add(merged, row, work_items(format, merged), number);
  }
  launcher.flush();
  narrow_launcher.flush();
  if (!counters_on_host) return;
  float* counters = data<float>(steps);
  for (int64_t position : positions) counters[position] += 1.0f;
}

}  // namespace
}  // namespace shardops

#if defined(SHARDOPS_TWIN)
STABLE_TORCH_LIBRARY_IMPL(shardops_twin, CPU, library) {
  library.impl("sharded_adam", TORCH_BOX(&shardops::sharded_adam));
}
#else
STABLE_TORCH_LIBRARY_IMPL(shardops, CUDA, library) { library.impl("sharded_adam", TORCH_BOX(&shardops::sharded_adam)); }
#endif
