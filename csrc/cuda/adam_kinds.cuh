// Which kernels of sharded_adam there are, and which one a call takes: the storages are compiled in, options beyond the
// plainest update come with the general kernels, which look at them.
#pragma once

#include <type_traits>

#include "../common/low_precision.h"
#include "adam_launch.h"

namespace shardops {

// Elements of a thread at a time: 128 bits of the widest storage; 8 where nothing wider than 16 bits is stored.
template <Master kMaster, typename Moment>
constexpr int kElementsPerThread = std::is_same_v<Moment, float> || kMaster == Master::kParam ? 4 : 8;

// Blocks of 128 elements that a block of the grid, which is smaller than elsewhere, works on at a time: half a warp has
// one. A thread holds eight elements in all their forms; the fewer threads, the less of the registers is left over.
constexpr int kQuantisedThreads = 128;
constexpr int kLanes = 16;
constexpr int kQuantisedPerRound = kQuantisedThreads / kLanes;

// One for each storage of the moments, in the translation unit of its kernels.
template <Moments kMoments>
const char* launch_adam(const AdamKernelKind& kind, const AdamLaunch& launch, int64_t blocks, void* stream);

constexpr const char* kNoSuchKernel = "there is no kernel for these storages";

template <Master kMaster, typename Param, typename Launcher>
const char* choose_by_grad(const AdamKernelKind& kind, const Launcher& launcher) {
  switch (kind.grad) {
    case Dtype::kFloat32:
      return kind.general ? launcher.template run<kMaster, Param, float, true>()
                          : launcher.template run<kMaster, Param, float, false>();
    case Dtype::kBFloat16:
      return kind.general ? launcher.template run<kMaster, Param, Bf16, true>()
                          : launcher.template run<kMaster, Param, Bf16, false>();
    case Dtype::kFloat16:  // comes with a loss scale, so with unscaling
      return launcher.template run<kMaster, Param, Fp16, true>();
  }
  return kNoSuchKernel;
}

template <typename Launcher>
const char* choose_kernel(const AdamKernelKind& kind, const Launcher& launcher) {
  switch (kind.master) {
    case Master::kParam:
    case Master::kFloat32: return choose_by_grad<Master::kParam, float>(kind, launcher);
    case Master::kSplit: return choose_by_grad<Master::kSplit, Bf16>(kind, launcher);
    case Master::kSplit24: return choose_by_grad<Master::kSplit24, Bf16>(kind, launcher);
    case Master::kStochastic: return choose_by_grad<Master::kStochastic, Bf16>(kind, launcher);
    case Master::kNearest:
      return kind.param == Dtype::kBFloat16 ? choose_by_grad<Master::kNearest, Bf16>(kind, launcher)
                                            : choose_by_grad<Master::kNearest, Fp16>(kind, launcher);
  }
  return kNoSuchKernel;
}

}  // namespace shardops
