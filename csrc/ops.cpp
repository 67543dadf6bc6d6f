// Registers the CPU implementations of the ops whose schemas shardops/ops defines, on torch's stable ABI, so that one
// library serves torch 2.11 and later. Each function checks, lays the tensors out as one range of work, and threads it.
// sharded_adam_op.cpp holds the one with the many lists.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/chunk_table.h"
#include "copy_arguments.h"
#include "cpu/kernels.h"
#include "norm_arguments.h"
#include "op_helpers.h"

namespace shardops {
namespace {

// Bytes of a result from which on it is written past the caches: it would not stay in them to be read again.
constexpr int64_t kStreamNbytes = int64_t{16} << 20;
// A copy moves a quarter of an update's bytes.
constexpr int64_t kCopyGrain = 4 * kGrain;

int64_t geometry_hash(StableListHandle tensor_list) { return geometry_of(TensorList(tensor_list).views()); }

// ---- flatten_shard, unflatten_shard, cast_gather ----

// Bytes of all that a copy writes, padding apart.
int64_t written_nbytes(const CopyPlan& plan, bool into_buffer) {
  const auto nbytes = [](const Array& array) { return array.numel * dtype_nbytes(array.dtype); };
  if (into_buffer) return nbytes(plan.buffer);
  int64_t total = 0;
  for (const Array& array : plan.arrays) total += nbytes(array);
  return total;
}

void copy_segments(const CopyPlan& plan, std::optional<double> scale, bool into_buffer) {
  const CpuKernels& kernels = cpu_kernels();
  const float factor = static_cast<float>(scale.value_or(1.0));
  const float* factor_or_null = scale ? &factor : nullptr;
  const bool stream = written_nbytes(plan, into_buffer) >= kStreamNbytes;
  std::vector<int64_t> sizes;
  sizes.reserve(plan.segments.size());
  for (const Segment& segment : plan.segments) sizes.push_back(segment.numel);
  const ChunkTable table(sizes);
  torch::stable::parallel_for(0, table.total(), kCopyGrain, [&](int64_t begin, int64_t end) {
    table.for_each(begin, end, [&](const Chunk& chunk) {
      const Segment& segment = plan.segments[chunk.tensor];
      const int64_t numel = chunk.end - chunk.begin;
      const Dtype flat_dtype = plan.buffer.dtype;
      char* flat = plan.buffer.at(segment.buffer_offset + chunk.begin);
      if (segment.tensor < 0) {
        if (into_buffer) std::memset(flat, 0, numel * dtype_nbytes(flat_dtype));
        return;
      }
      const Array& array = plan.arrays[segment.tensor];
      char* part = array.at(segment.tensor_offset + chunk.begin);
      if (into_buffer) {
        kernels.cast_copy(flat, flat_dtype, part, array.dtype, numel, factor_or_null, stream);
      } else {
        kernels.cast_copy(part, array.dtype, flat, flat_dtype, numel, factor_or_null, stream);
      }
    });
  });
}

void flatten_shard(Tensor out, StableListHandle tensor_list, Tensor segments, std::optional<double> scale) {
  const TensorList tensors(tensor_list);
  copy_segments(plan_copy(cpu_device(), out, "out", tensors, "tensors", segments), scale, true);
}

void unflatten_shard(Tensor buffer, StableListHandle out_list, Tensor segments, std::optional<double> scale) {
  const TensorList out_tensors(out_list);
  copy_segments(plan_copy(cpu_device(), buffer, "buffer", out_tensors, "out_tensors", segments), scale, false);
}

bool copy_as_planned(Tensor buffer, StableListHandle tensor_list, Tensor segments, int64_t geometry, bool into_buffer) {
  const TensorList tensors(tensor_list);
  if (geometry_of(buffer, tensors) != geometry) return false;
  const CopyPlan plan = plan_copy(cpu_device(), buffer, "buffer", tensors, "tensors", segments);
  copy_segments(plan, std::nullopt, into_buffer);
  return true;
}

void cast_gather(Tensor out, StableListHandle shard_list) {
  const TensorList shards(shard_list);
  copy_segments(plan_gather(cpu_device(), out, shards), std::nullopt, true);
}

// ---- grad_norm ----

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
  const NormPlan plan = plan_norm(cpu_device(), grads, norm_type);
  std::vector<int64_t> block_counts;
  for (const NormArray& array : plan.arrays) block_counts.push_back(array.blocks());
  const CpuKernels& kernels = cpu_kernels();
  const ChunkTable table(block_counts);
  std::vector<double> blocks(table.total());
  torch::stable::parallel_for(0, table.total(), kGrain / kNormBlock, [&](int64_t begin, int64_t end) {
    table.for_each(begin, end, [&](const Chunk& chunk) {
      const NormArray& array = plan.arrays[chunk.tensor];
      for (int64_t block = chunk.begin; block < chunk.end; ++block) {
        const int64_t offset = block * kNormBlock;
        blocks[table.start(chunk.tensor) + block] =
            kernels.norm_block(static_cast<const char*>(array.start) + offset * dtype_nbytes(array.dtype), array.dtype,
                               std::min(kNormBlock, array.numel - offset), plan.norm);
      }
    });
  });
  const double total = combine_blocks(blocks, plan.norm);
  bool finite = true;
  for (double block : blocks) finite = finite && std::isfinite(block);
  Tensor total_tensor = torch::stable::empty({}, ScalarType::Double);
  Tensor nonfinite = torch::stable::empty({}, ScalarType::Float);
  *data<double>(total_tensor) = total;
  *data<float>(nonfinite) = finite ? 0.0f : 1.0f;
  return {total_tensor, nonfinite};
}

}  // namespace
}  // namespace shardops

STABLE_TORCH_LIBRARY_IMPL(shardops, CompositeExplicitAutograd, library) {
  library.impl("geometry_hash", TORCH_BOX(&shardops::geometry_hash));
}

STABLE_TORCH_LIBRARY_IMPL(shardops, CPU, library) {
  library.impl("flatten_shard", TORCH_BOX(&shardops::flatten_shard));
  library.impl("unflatten_shard", TORCH_BOX(&shardops::unflatten_shard));
  library.impl("copy_as_planned", TORCH_BOX(&shardops::copy_as_planned));
  library.impl("cast_gather", TORCH_BOX(&shardops::cast_gather));
  library.impl("grad_norm", TORCH_BOX(&shardops::grad_norm));
}
