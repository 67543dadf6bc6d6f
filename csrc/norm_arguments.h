// grad_norm's arguments, checked and made plain: what its implementations on all devices share.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "common/checks.h"
#include "common/formats.h"

namespace shardops {

// A tensor's elements in the order of memory.
struct NormArray {
  const void* start;
  int64_t numel;
  Dtype dtype;

  int64_t blocks() const { return (numel + kNormBlock - 1) / kNormBlock; }
};

struct NormPlan {
  Norm norm;
  std::vector<NormArray> arrays;
};

inline NormPlan plan_norm(const Device& device, const TensorList& grads, double norm_type) {
  STD_TORCH_CHECK(norm_type == 1.0 || norm_type == 2.0 || norm_type == INFINITY, "norm_type is ", norm_type,
                  "; 1, 2 and inf are supported");
  NormPlan plan{norm_type == 1.0 ? Norm::kOne : norm_type == 2.0 ? Norm::kTwo : Norm::kInf, {}};
  plan.arrays.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    check_device(device, grads[i], "grads", i);
    STD_TORCH_CHECK(is_dense(grads[i]), "grads[", i, "] has gaps or overlaps in memory");
    plan.arrays.push_back(NormArray{grads[i].data_ptr(), grads[i].numel(), to_dtype(grads[i], "grads")});
  }
  return plan;
}

}  // namespace shardops
