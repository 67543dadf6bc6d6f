// Registers the CPU implementations of the ops whose schemas shardops/ops defines, on torch's stable ABI, so that one
// library serves torch 2.11 and later. Each function checks, lays the tensors out as one range of work, and threads it.
// sharded_adam_op.cpp holds the one with the many lists.
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
#include "op_helpers.h"

namespace shardops {
namespace {

// Bytes of a result from which on it is written past the caches: it would not stay in them to be read again.
constexpr int64_t kStreamNbytes = int64_t{16} << 20;
// A copy moves a quarter of an update's bytes.
constexpr int64_t kCopyGrain = 4 * kGrain;

const char* at(const void* start, int64_t offset, Dtype dtype) {
  return static_cast<const char*>(start) + offset * dtype_nbytes(dtype);
}

// ---- geometry_hash ----

// FNV-1a over 64-bit words.
class Hash {
 public:
  void add(int64_t word) { value_ = (value_ ^ static_cast<uint64_t>(word)) * 0x100000001B3u; }
  int64_t value() const { return static_cast<int64_t>(value_ ^ (value_ >> 32)); }

 private:
  uint64_t value_ = 0xCBF29CE484222325u;
};

int64_t geometry_of(const std::vector<TensorView>& tensors) {
  Hash hash;
  for (const TensorView& tensor : tensors) {
    const int64_t dim = tensor.dim();
    const bool is_strided = tensor.is_strided();
    hash.add(dim * 2 + is_strided);
    hash.add((int64_t{tensor.device_type()} << 40) ^ (int64_t{tensor.device_index()} << 8) ^ tensor.dtype_code());
    for (int64_t d = 0; d < dim; ++d) hash.add(tensor.sizes()[d]);
    for (int64_t d = 0; d < dim && is_strided; ++d) hash.add(tensor.strides()[d]);
  }
  return hash.value();
}

int64_t geometry_hash(StableListHandle tensor_list) { return geometry_of(TensorList(tensor_list).views()); }

// ---- flatten_shard, unflatten_shard, cast_gather ----

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

int64_t nbytes_of(const std::vector<Array>& arrays) {
  int64_t nbytes = 0;
  for (const Array& array : arrays) nbytes += array.numel * dtype_nbytes(array.dtype);
  return nbytes;
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

// What the kernels' __restrict promises; torch's own copies refuse the same.
void check_apart(const Array& buffer, const std::vector<Array>& arrays) {
  const char* begin = at(buffer.start, 0, buffer.dtype);
  const char* end = at(buffer.start, buffer.numel, buffer.dtype);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const bool apart = at(arrays[i].start, 0, arrays[i].dtype) >= end ||
                       at(arrays[i].start, arrays[i].numel, arrays[i].dtype) <= begin;
    STD_TORCH_CHECK(apart || arrays[i].numel == 0 || buffer.numel == 0, "tensor ", i,
                    " shares memory with the flat buffer; clone one of the two");
  }
}

// Copies between a flat buffer and the tensors that its segments name, in the direction given.
void copy_segments(const Array& buffer, const std::vector<Array>& arrays, const std::vector<Segment>& segments,
                   std::optional<double> scale, bool into_buffer) {
  check_apart(buffer, arrays);
  const CpuKernels& kernels = cpu_kernels();
  const float factor = static_cast<float>(scale.value_or(1.0));
  const float* factor_or_null = scale ? &factor : nullptr;
  const bool stream = (into_buffer ? nbytes_of({buffer}) : nbytes_of(arrays)) >= kStreamNbytes;
  const ChunkTable table(sizes_of(segments));
  torch::stable::parallel_for(0, table.total(), kCopyGrain, [&](int64_t begin, int64_t end) {
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
        kernels.cast_copy(flat, buffer.dtype, part, array.dtype, numel, factor_or_null, stream);
      } else {
        kernels.cast_copy(part, array.dtype, flat, buffer.dtype, numel, factor_or_null, stream);
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

bool copy_as_planned(Tensor buffer, StableListHandle tensor_list, Tensor segments, int64_t geometry, bool into_buffer) {
  const TensorList tensors(tensor_list);
  std::vector<TensorView> views{buffer};
  views.insert(views.end(), tensors.views().begin(), tensors.views().end());
  if (geometry_of(views) != geometry) return false;
  const Array flat = arrays_of({buffer}, "buffer")[0];
  const std::vector<Array> arrays = arrays_of(tensors.views(), "tensors");
  copy_segments(flat, arrays, read_segments(segments, arrays, flat.numel), std::nullopt, into_buffer);
  return true;
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
