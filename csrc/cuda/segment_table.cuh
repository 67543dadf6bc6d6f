// The work of one launch, carried in the kernel's own parameters: rows, and for each the first block of the grid that
// works on it. So a launch needs no table in device memory, no copy and nothing to keep alive, also within a graph.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "launch.cuh"

namespace shardops {

// Sizes of a launch's parameters: what CUDA allows since 12.1, from sm_70 on, and what it always did. Every launch
// carries its struct whole, so a call of a few tensors takes the small one.
constexpr int kLargeParameters = static_cast<int>(kParameterBytes);
constexpr int kSmallParameters = 4096;
// Of those, for what a launch says beside its table.
constexpr int kParametersBesideTable = 32;

// What a block of the grid works on: chunk 0, 1, .. of a row.
struct Place {
  uint32_t row;
  uint32_t chunk;
};

template <typename Row, int kParameters>
struct SegmentTable {
  static constexpr int64_t kRows = (kParameters - kParametersBesideTable - 8) / (sizeof(Row) + sizeof(uint32_t));

  Row rows[kRows];
  uint32_t first_chunk[kRows];
  uint32_t count;

  // Chunks so far; a row of none must not be added.
  __host__ void add(const Row& row, uint32_t& chunks, int64_t chunks_of_row) {
    rows[count] = row;
    first_chunk[count++] = chunks;
    chunks += static_cast<uint32_t>(chunks_of_row);
  }

  // By halving: the rows' first chunks rise.
  __device__ __forceinline__ Place find(uint32_t block) const {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (first_chunk[middle] <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return Place{low, block - first_chunk[low]};
  }
};

// Calls launch_batch<parameters>(rows, count) as often as needed; returns null, or the first error.
template <typename Row, typename Launch>
const char* in_batches(const std::vector<Row>& rows, Launch&& launch_batch) {
  constexpr int64_t kFew = SegmentTable<Row, kSmallParameters>::kRows;
  constexpr int64_t kMany = SegmentTable<Row, kLargeParameters>::kRows;
  const int64_t total = static_cast<int64_t>(rows.size());
  for (int64_t first = 0; first < total; first += kMany) {
    const int64_t count = std::min(kMany, total - first);
    const char* error = count <= kFew ? launch_batch.template operator()<kSmallParameters>(&rows[first], count)
                                      : launch_batch.template operator()<kLargeParameters>(&rows[first], count);
    if (error != nullptr) return error;
  }
  return nullptr;
}

}  // namespace shardops
