// How kernels find their work and their dither, and combine the norm's blocks, for sizes that no test has the memory or
// the time for: called by the tests, which compute the same in Python. Also how many tensors a launch has room for.
#include <memory>

#include "../../csrc/cuda/adam_step.cuh"
#include "../../csrc/cuda/kernels.h"
#include "../../csrc/cuda/segment_table.cuh"

#define SHARDOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace shardops;

// The shared fields, then those named.
std::unique_ptr<AdamLaunch> launch_with(std::initializer_list<AdamField> fields) {
  auto launch = std::make_unique<AdamLaunch>();
  for (int8_t& column : launch->column) column = -1;
  for (uint32_t field = 0; field < kAlwaysThere; ++field) launch->column[field] = static_cast<int8_t>(field);
  launch->fields = kAlwaysThere;
  for (const AdamField field : fields) launch->column[field] = static_cast<int8_t>(launch->fields++);
  return launch;
}

struct Row {
  int64_t unused[3];
};
using Table = SegmentTable<Row, kLargeParameters>;

}  // namespace

// capacities: of one launch. Words for sharded_adam's tensors, steps whose scalars it carries, segments of a copy,
// tensors of the norm.
SHARDOPS_EXPORT void shardops_twin_capacities(int64_t* capacities) {
  capacities[0] = sizeof(AdamLaunch::words) / sizeof(uint64_t);
  capacities[1] = kScalarsInLaunch;
  capacities[2] = SegmentTable<CopySegment, kLargeParameters>::kRows;
  capacities[3] = SegmentTable<NormTensor, kLargeParameters>::kRows;
}

// found: tensor, first item and items of each block.
SHARDOPS_EXPORT void shardops_twin_find_work(const uint32_t* first_chunks, const int64_t* items, uint32_t tensors,
                                             uint32_t chunk_items, const uint32_t* blocks, int64_t count,
                                             int64_t* found) {
  const auto launch = launch_with({});
  launch->tensors = tensors;
  launch->chunk_items = chunk_items;
  for (uint32_t i = 0; i < tensors; ++i) {
    uint64_t* words = launch->words + i * launch->fields;
    words[kWork] = first_chunks[i] | uint64_t{i % 16} << 32;  // beside the number of its scalars
    words[kItemsField] = static_cast<uint64_t>(items[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const AdamWork work = find_work(*launch, blocks[i]);
    found[3 * i] = (work.words - launch->words) / launch->fields;
    found[3 * i + 1] = work.first;
    found[3 * i + 2] = work.items;
  }
}

// found: row and chunk of each block, where the copies and the norm look them
// up.
SHARDOPS_EXPORT void shardops_twin_find_place(const uint32_t* first_chunks, uint32_t rows, const uint32_t* blocks,
                                              int64_t count, int64_t* found) {
  const auto table = std::make_unique<Table>();
  table->count = rows;
  for (uint32_t i = 0; i < rows; ++i) table->first_chunk[i] = first_chunks[i];
  for (int64_t i = 0; i < count; ++i) {
    const Place place = table->find(blocks[i]);
    found[2 * i] = place.row;
    found[2 * i + 1] = place.chunk;
  }
}

// words: of the elements at offsets in a tensor that lies in rows.
SHARDOPS_EXPORT void shardops_twin_dither_words(uint32_t salt, uint32_t step, uint32_t first, uint32_t stride,
                                                int64_t columns, bool is_strided, const int64_t* offsets, int64_t count,
                                                uint32_t* words) {
  const auto launch = launch_with({kSaltField, kIndexField, kIndexColumnsField});
  launch->dithered = true;
  launch->words[launch->column[kSaltField]] = salt;
  launch->words[launch->column[kIndexField]] = first | uint64_t{stride} << 32;
  launch->words[launch->column[kIndexColumnsField]] = static_cast<uint64_t>(columns);
  const ElementDither dither(*launch, AdamWork{launch->words, 0, 0}, step);
  for (int64_t i = 0; i < count; ++i) {
    words[i] = is_strided ? dither.word<true>(offsets[i]) : dither.word<false>(offsets[i]);
  }
}

// The total of the norm's blocks, as its last kernel has it; nonfinite: 0 or 1.
SHARDOPS_EXPORT void shardops_twin_norm_combine(const double* blocks, int64_t count, bool is_inf, double* total,
                                                float* nonfinite) {
  launch_norm_combine(blocks, count, is_inf ? Norm::kInf : Norm::kTwo, total, nonfinite, nullptr);
}
