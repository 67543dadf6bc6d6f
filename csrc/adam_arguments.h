// sharded_adam's arguments, checked against each other and made plain: what its implementations on all devices share.
#pragma once

#include <optional>
#include <vector>

#include "common/checks.h"
#include "common/formats.h"

namespace shardops {

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

// One tensor's row of the table `dither`.
struct DitherRow {
  int64_t salt;
  int64_t first;
  int64_t columns;
  int64_t stride;
};

// Everything about a call's storages; grad_scale and what depends on the decay are left to the caller.
AdamFormat adam_format(const AdamLists& lists, int64_t rounding, bool has_dither);

// is_ordered: blocks, or the elements' indices, are counted in row-major order.
std::vector<AdamTensor> adam_tensors(const Device& device, const AdamLists& lists, bool is_ordered);

// The table's rows, checked and set in the tensors; null without a table.
const DitherRow* add_dither(const std::optional<Tensor>& dither, std::vector<AdamTensor>& tensors);

// The positions in `steps` of the tensors' counters. steps is on any device, step_index on the CPU.
std::vector<int64_t> step_positions(const TensorView& steps, const std::optional<Tensor>& step_index, size_t count);

// Blocks of a row.
inline int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// What a tensor's work is counted in: blocks, or elements.
inline int64_t work_items(const AdamFormat& format, const AdamTensor& tensor) {
  if (format.moments != Moments::kBlocks || tensor.numel == 0) return tensor.numel;
  return tensor.numel / tensor.block_columns * blocks_of(tensor.block_columns);
}

}  // namespace shardops
