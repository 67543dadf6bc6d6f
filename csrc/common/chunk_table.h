// Many tensors as one range of work: the only place where offsets into them are formed.
// Positions count work items (elements, or blocks of elements) over all tensors back to back, in 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardops {

// [begin, end): a range of one tensor's work items.
struct Chunk {
  int64_t tensor;
  int64_t begin;
  int64_t end;
};

class ChunkTable {
 public:
  // sizes: work items of each tensor; 0 is allowed.
  explicit ChunkTable(const std::vector<int64_t>& sizes) : starts_(sizes.size() + 1, 0) {
    for (size_t i = 0; i < sizes.size(); ++i) starts_[i + 1] = starts_[i] + sizes[i];
  }

  int64_t total() const { return starts_.back(); }

  // The first work item of a tensor.
  int64_t start(int64_t tensor) const { return starts_[tensor]; }

  // Calls visit(chunk) for each tensor that [begin, end) touches, in order; tensors without work are passed over.
  template <typename Visit>
  void for_each(int64_t begin, int64_t end, Visit&& visit) const {
    if (begin >= end) return;
    auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
    for (int64_t tensor = after - starts_.begin() - 1; begin < end; ++tensor) {
      const int64_t stop = std::min(end, starts_[tensor + 1]);
      if (stop > begin) visit(Chunk{tensor, begin - starts_[tensor], stop - starts_[tensor]});
      begin = std::max(begin, stop);
    }
  }

 private:
  std::vector<int64_t> starts_;
};

}  // namespace shardops
