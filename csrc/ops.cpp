// Registers the CPU implementations of the ops whose schemas shardops/ops defines, on torch's stable ABI, so that one
// library serves torch 2.11 and later. Each function checks, lays the tensors out as one range of work, and threads it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/chunk_table.h"
#include "cpu/kernels.h"

namespace shardops {
namespace {

// Elements that are worth a thread of their own: below, waking one costs more than it saves.
constexpr int64_t kGrain = 32768;

template <typename T>
T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

const char* at(const void* start, int64_t offset, Dtype dtype) {
  return static_cast<const char*>(start) + offset * dtype_nbytes(dtype);
}

float scalar_value(const std::optional<Tensor>& tensor, const char* name, float absent) {
  if (!tensor) return absent;
  const TensorView view = *tensor;
  STD_TORCH_CHECK(view.is_cpu() && view.numel() == 1 && view.scalar_type() == ScalarType::Float, name,
                  " must be one float32 on the CPU, beside the parameters");
  return *data<float>(view);
}

// ---- flatten_shard, unflatten_shard, cast_gather
// ---------------------------------------------------------------------

// Rows of the segment table (shardops/layout.py).
struct Segment {
  int64_t tensor;  // -1: padding
  int64_t tensor_offset;
  int64_t buffer_offset;
  int64_t numel;
};

struct Array {
  void* start;
  int64_t numel;
  Dtype dtype;
};

std::vector<Array> arrays_of(const std::vector<TensorView>& tensors, const char* name) {
  std::vector<Array> arrays;
  arrays.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_cpu(tensors[i], name, i);
    STD_TORCH_CHECK(tensors[i].is_contiguous(), name, "[", i, "] is not contiguous");
    arrays.push_back(Array{tensors[i].data_ptr(), tensors[i].numel(), to_dtype(tensors[i], name)});
  }
  return arrays;
}

std::vector<Segment> read_segments(const Tensor& table, const std::vector<Array>& arrays, int64_t buffer_numel) {
  STD_TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.scalar_type() == ScalarType::Long &&
                      table.dim() == 2 && table.size(1) == 4,
                  "segments must be a contiguous int64 tensor of shape [n, 4] on the CPU");
  const auto* rows = data<const Segment>(table);
  std::vector<Segment> segments(rows, rows + table.size(0));
  for (const Segment& s : segments) {
    // Differences, since a sum of two numbers near 2^63 would pass as a negative one.
    STD_TORCH_CHECK(s.tensor >= -1 && s.tensor < static_cast<int64_t>(arrays.size()) && s.numel >= 0 &&
                        s.buffer_offset >= 0 && s.numel <= buffer_numel - s.buffer_offset && s.tensor_offset >= 0 &&
                        (s.tensor < 0 || s.numel <= arrays[s.tensor].numel - s.tensor_offset),
                    "a segment reaches outside its tensor or the buffer: tensor ", s.tensor, ", offset ",
                    s.tensor_offset, ", buffer offset ", s.buffer_offset, ", numel ", s.numel);
  }
  return segments;
}

std::vector<int64_t> sizes_of(const std::vector<Segment>& segments) {
  std::vector<int64_t> sizes;
  sizes.reserve(segments.size());
  for (const Segment& segment : segments) sizes.push_back(segment.numel);
  return sizes;
}

// Copies between a flat buffer and the tensors that its segments name, in the direction given.
void copy_segments(const Array& buffer, const std::vector<Array>& arrays, const std::vector<Segment>& segments,
                   std::optional<double> scale, bool into_buffer) {
  const CpuKernels& kernels = cpu_kernels();
  const float factor = static_cast<float>(scale.value_or(1.0));
  const float* factor_or_null = scale ? &factor : nullptr;
  const ChunkTable table(sizes_of(segments));
  torch::stable::parallel_for(0, table.total(), kGrain, [&](int64_t begin, int64_t end) {
    table.for_each(begin, end, [&](const Chunk& chunk) {
      const Segment& segment = segments[chunk.tensor];
      const int64_t numel = chunk.end - chunk.begin;
      char* flat = const_cast<char*>(at(buffer.start, segment.buffer_offset + chunk.begin, buffer.dtype));
      if (segment.tensor < 0) {
        if (into_buffer) std::memset(flat, 0, numel * dtype_nbytes(buffer.dtype));
        return;
      }
      const Array& array = arrays[segment.tensor];
      char* part = const_cast<char*>(at(array.start, segment.tensor_offset + chunk.begin, array.dtype));
      if (into_buffer) {
        kernels.cast_copy(flat, buffer.dtype, part, array.dtype, numel, factor_or_null);
      } else {
        kernels.cast_copy(part, array.dtype, flat, buffer.dtype, numel, factor_or_null);
      }
    });
  });
}

void flatten_shard(Tensor out, StableListHandle tensor_list, Tensor segments, std::optional<double> scale) {
  const TensorList tensors(tensor_list);
  const Array buffer = arrays_of({out}, "out")[0];
  const std::vector<Array> arrays = arrays_of(tensors.views(), "tensors");
  copy_segments(buffer, arrays, read_segments(segments, arrays, buffer.numel), scale, true);
}

void unflatten_shard(Tensor buffer, StableListHandle out_list, Tensor segments, std::optional<double> scale) {
  const TensorList out_tensors(out_list);
  const Array flat = arrays_of({buffer}, "buffer")[0];
  const std::vector<Array> arrays = arrays_of(out_tensors.views(), "out_tensors");
  copy_segments(flat, arrays, read_segments(segments, arrays, flat.numel), scale, false);
}

void cast_gather(Tensor out, StableListHandle shard_list) {
  const TensorList shards(shard_list);
  const Array buffer = arrays_of({out}, "out")[0];
  const std::vector<Array> arrays = arrays_of(shards.views(), "shards");
  std::vector<Segment> segments;
  int64_t offset = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    segments.push_back(Segment{static_cast<int64_t>(i), 0, offset, arrays[i].numel});
    offset += arrays[i].numel;
  }
  STD_TORCH_CHECK(offset == buffer.numel, "out has ", buffer.numel, " elements, the shards have ", offset);
  copy_segments(buffer, arrays, segments, std::nullopt, true);
}

// ---- grad_norm
// -------------------------------------------------------------------------------------------------------

// Sum, or the largest with NaN winning, in the fixed order that reference/grad_norm.py states.
double combine_blocks(const std::vector<double>& blocks, Norm norm) {
  std::vector<double> lanes(kNormLanes, 0.0);
  const auto combine = [norm](double a, double b) {
    if (norm != Norm::kInf) return a + b;
    return (b > a || b != b) ? b : a;
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    double& lane = lanes[i % kNormLanes];
    lane = combine(lane, blocks[i]);
  }
  for (int64_t width = kNormLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + width]);
  }
  return lanes[0];
}

std::tuple<Tensor, Tensor> grad_norm(StableListHandle grad_list, double norm_type) {
  const TensorList grads(grad_list);
  STD_TORCH_CHECK(!grads.empty(), "grads is empty");
  STD_TORCH_CHECK(norm_type == 1.0 || norm_type == 2.0 || norm_type == INFINITY, "norm_type is ", norm_type,
                  "; 1, 2 and inf are supported");
  const Norm norm = norm_type == 1.0 ? Norm::kOne : norm_type == 2.0 ? Norm::kTwo : Norm::kInf;
  std::vector<Array> arrays;
  std::vector<int64_t> block_counts;
  for (size_t i = 0; i < grads.size(); ++i) {
    check_cpu(grads[i], "grads", i);
    STD_TORCH_CHECK(is_dense(grads[i]), "grads[", i, "] has gaps or overlaps in memory");
    arrays.push_back(Array{grads[i].data_ptr(), grads[i].numel(), to_dtype(grads[i], "grads")});
    block_counts.push_back((arrays.back().numel + kNormBlock - 1) / kNormBlock);
  }
  const CpuKernels& kernels = cpu_kernels();
  const ChunkTable table(block_counts);
  std::vector<double> blocks(table.total());
  torch::stable::parallel_for(0, table.total(), kGrain / kNormBlock, [&](int64_t begin, int64_t end) {
    table.for_each(begin, end, [&](const Chunk& chunk) {
      const Array& array = arrays[chunk.tensor];
      for (int64_t block = chunk.begin; block < chunk.end; ++block) {
        const int64_t offset = block * kNormBlock;
        blocks[table.start(chunk.tensor) + block] = kernels.norm_block(
            at(array.start, offset, array.dtype), array.dtype, std::min(kNormBlock, array.numel - offset), norm);
      }
    });
  });
  const double total = combine_blocks(blocks, norm);
  bool finite = true;
  for (double block : blocks) finite = finite && std::isfinite(block);
  Tensor total_tensor = torch::stable::empty({}, ScalarType::Double);
  Tensor nonfinite = torch::stable::empty({}, ScalarType::Float);
  *data<double>(total_tensor) = total;
  *data<float>(nonfinite) = finite ? 0.0f : 1.0f;
  return {total_tensor, nonfinite};
}

// ---- sharded_adam
// ----------------------------------------------------------------------------------------------------

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

// ---- geometry_hash
// ---------------------------------------------------------------------------------------------------

// FNV-1a over 64-bit words.
class Hash {
 public:
  void add(int64_t word) { value_ = (value_ ^ static_cast<uint64_t>(word)) * 0x100000001B3u; }
  int64_t value() const { return static_cast<int64_t>(value_ ^ (value_ >> 32)); }

 private:
  uint64_t value_ = 0xCBF29CE484222325u;
};

int64_t geometry_hash(StableListHandle tensor_list) {
  const TensorList tensors(tensor_list);
  Hash hash;
  for (const TensorView& tensor : tensors.views()) {
    const int64_t dim = tensor.dim();
    const bool is_strided = tensor.is_strided();
    hash.add(dim * 2 + is_strided);
    hash.add((int64_t{tensor.device_type()} << 40) ^ (int64_t{tensor.device_index()} << 8) ^ tensor.dtype_code());
    for (int64_t d = 0; d < dim; ++d) hash.add(tensor.sizes()[d]);
    for (int64_t d = 0; d < dim && is_strided; ++d) hash.add(tensor.strides()[d]);
  }
  return hash.value();
}

}  // namespace
}  // namespace shardops

STABLE_TORCH_LIBRARY_IMPL(shardops, CompositeExplicitAutograd, library) {
  library.impl("geometry_hash", TORCH_BOX(&shardops::geometry_hash));
}

STABLE_TORCH_LIBRARY_IMPL(shardops, CPU, library) {
  library.impl("flatten_shard", TORCH_BOX(&shardops::flatten_shard));
  library.impl("unflatten_shard", TORCH_BOX(&shardops::unflatten_shard));
  library.impl("cast_gather", TORCH_BOX(&shardops::cast_gather));
  library.impl("grad_norm", TORCH_BOX(&shardops::grad_norm));
  library.impl("sharded_adam", TORCH_BOX(&shardops::sharded_adam));
}
