// What a launch of sharded_adam carries in its kernel parameters: the tensors' addresses, the scalars of their steps,
// and where each block of the grid finds its work. No CUDA and no torch here: the glue fills it, the kernels read it.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace shardops {

// One step's scalars, with what its dither is made from.
struct StepScalars {
  AdamScalars adam;
  uint32_t step;  // the number of this update
};

// What a launch knows of a tensor. The first ones are always there, the others in calls that need them, so that
// parameters of a fixed size carry as many tensors as they can: 667 of the plainest kind, 333 in 8-bit codes with
// split24.
enum AdamField : uint32_t {
  kWork,  // lower half: the first chunk of work; upper half: the number of its scalars
  kParamField,
  kGradField,
  kExpAvgField,
  kExpAvgSqField,
  kItemsField,  // elements, or blocks
  kAlwaysThere,
  kMasterField = kAlwaysThere,
  kMaxExpAvgSqField,
  kShadowField,
  kSaltField,
  kIndexField,  // lower half: first; upper half: stride
  kIndexColumnsField,
  kBlockWordsField,
  kBlockColumnsField,
  kFieldCount,
};

constexpr int64_t kScalarsInLaunch = 16;

struct AdamHeader {
  const StepScalars* device_scalars;  // in device memory; null: `scalars`
  const float* clip_coef;             // these three: null if absent
  const float* grad_scale;
  const float* found_inf;
  uint32_t tensors;
  uint32_t chunk_items;  // work of one block of the grid: elements, or blocks of elements
  bool maximize;
  bool coupled_decay;
  bool dithered;      // else all is rounded to nearest
  bool strided;       // some tensor's indices are not consecutive
  bool copies_param;  // the parameter is a rounded copy of a master that is elsewhere
  Dtype param;
  Dtype shadow;
  uint8_t fields;              // of a tensor: the stride of `words`
  int8_t column[kFieldCount];  // of a field in a tensor's words; -1: absent
  StepScalars scalars[kScalarsInLaunch];

  bool has(AdamField field) const { return column[field] >= 0; }
};

struct AdamLaunch : AdamHeader {
  uint64_t words[(kParameterBytes - sizeof(AdamHeader)) / sizeof(uint64_t)];
};
static_assert(sizeof(AdamLaunch) <= kParameterBytes);

// ---- launchers; as in kernels.h ----

// What chooses a kernel: storages that its code is made for. The rest are options that it looks at.
struct AdamKernelKind {
  Master master;  // kParam stands for kFloat32, too: the master is fp32 in memory
  Dtype param;    // where the parameter is rounded from the master: bf16 or fp16
  Dtype grad;
  Moments moments;
  bool general;  // amsgrad, coupled decay, unscaling, shadows, copies, indices in strides, beta1 up to 0.5
  bool wide;     // of blocks: full ones that start where wide accesses may; others are general
};

// blocks: of the grid.
const char* launch_sharded_adam(const AdamKernelKind& kind, const AdamLaunch& launch, int64_t blocks, void* stream);

// Items of one block of the grid when there are so many in a call.
int64_t adam_chunk_items(const AdamKernelKind& kind, int64_t items);

// Steps' scalars made on the device, where counters or the learning rate are; the counters are raised then, unless
// found_inf is there and not 0.
struct ScalarsRequest {
  AdamOptions options;      // lr: unless one of the two below is there
  const float* lr_float;    // on the device, or null
  const double* lr_double;  // likewise
  float* counters;          // on the device; null: `numbers` are the steps themselves
  const float* found_inf;   // null if absent
  const uint32_t* numbers;  // on the host, of each tensor: the place of its counter, or its step
  int64_t count;
  StepScalars* scalars;  // on the device, count of them
};
const char* launch_adam_scalars(const ScalarsRequest& request, void* stream);

}  // namespace shardops
