// The copies' arguments, checked and made plain: what flatten_shard, unflatten_shard and cast_gather share on all
// devices.
#pragma once

#include <cstdint>
#include <vector>

#include "common/checks.h"
#include "common/formats.h"

namespace shardops {

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

  char* at(int64_t offset) const { return static_cast<char*>(start) + offset * dtype_nbytes(dtype); }
};

// A copy between a flat buffer and the arrays that segments name, in either direction. Buffer and arrays share no
// memory, and each segment lies inside of both.
struct CopyPlan {
  Array buffer;
  std::vector<Array> arrays;
  std::vector<Segment> segments;
};

// The names are those of the op's arguments, for errors.
CopyPlan plan_copy(const Device& device, const Tensor& buffer, const char* buffer_name, const TensorList& tensors,
                   const char* tensors_name, const Tensor& segments);

// Shards back to back.
CopyPlan plan_gather(const Device& device, const Tensor& out, const TensorList& shards);

// The hash that geometry_hash returns.
int64_t geometry_of(const std::vector<TensorView>& tensors);

// Of a buffer and its tensors.
int64_t geometry_of(const Tensor& buffer, const TensorList& tensors);

}  // namespace shardops
