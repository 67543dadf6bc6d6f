// The sharded Adam step on a GPU for moments that are stored element by element, fp32 or bf16: one pass over memory and
// one launch for all tensors that kernel parameters can name. Compiled once for each of the two (setup.py).
#include "adam_kinds.cuh"
#include "adam_step.cuh"

#ifndef SHARDOPS_MOMENT
#error "compile with -DSHARDOPS_MOMENT=float or Bf16 as setup.py does"
#endif

namespace shardops {
namespace {

template <typename Type>
constexpr Moments kMomentsOf = std::is_same_v<Type, Bf16> ? Moments::kBFloat16 : Moments::kFloat32;
using Moment = SHARDOPS_MOMENT;

template <Master kMaster, typename Param, typename Grad, bool kGeneral, typename Access>
SHARDOPS_HD void step_elements(const AdamStep<kMaster, Param, Grad, kGeneral>& step, Moment* exp_avg,
                               Moment* exp_avg_sq, const Access& access) {
  constexpr int kCount = Access::kCount;
  Elements<Moment, kCount> stored_avg = access.load(exp_avg);
  Elements<Moment, kCount> stored_avg_sq = access.load(exp_avg_sq);
  Vector<float, kCount> avg, avg_sq;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    avg[j] = stored_avg.value(j);
    avg_sq[j] = stored_avg_sq.value(j);
  }
  step.update(access, avg, avg_sq);
  if constexpr (std::is_same_v<Moment, Bf16>) {
    Vector<uint32_t, kCount> avg_bits, avg_sq_bits;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32_t dither = step.word(access.offset(j)) >> 16;
      avg_bits[j] = raised_bits<false>(avg[j], dither);
      avg_sq_bits[j] = raised_bits<false>(avg_sq[j], dither);
    }
    stored_avg.template pack<2>(avg_bits);
    stored_avg_sq.template pack<2>(avg_sq_bits);
  } else {
    stored_avg.values = avg;
    stored_avg_sq.values = avg_sq;
  }
  access.store(exp_avg, stored_avg);
  access.store(exp_avg_sq, stored_avg_sq);
}

// Blocks of a multiprocessor whose registers the assembler has to count on; 0: it decides. By itself it spills where
// eight elements and options meet, since it aims at more blocks.
template <Master kMaster, bool kGeneral>
constexpr int kMinBlocks = kGeneral && kElementsPerThread<kMaster, Moment> == 8 ? 3 : 0;

template <Master kMaster, typename Param, typename Grad, bool kGeneral>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kMaster, kGeneral>)
    update_elements(SHARDOPS_PARAMETERS(AdamLaunch) launch) {
  if (is_skipped(launch)) return;
  constexpr int kCount = kElementsPerThread<kMaster, Moment>;
  const AdamWork work = find_work(launch, blockIdx.x);
  const StepScalars scalars = step_scalars(launch, work);
  const AdamStep<kMaster, Param, Grad, kGeneral> step(launch, work, scalars);
  auto* exp_avg = array<Moment>(work.words[kExpAvgField]);
  auto* exp_avg_sq = array<Moment>(work.words[kExpAvgSqField]);

  uint32_t done = 0;
  const uint32_t unaligned = misaligned<kCount>(exp_avg) | misaligned<kCount>(exp_avg_sq);
  if ((unaligned | step.template misaligned_arrays<kCount>()) == 0) {
    done = work.items / kCount * kCount;
#pragma unroll 1
    for (uint32_t i = threadIdx.x * kCount; i < done; i += kThreads * kCount) {
      step_elements(step, exp_avg, exp_avg_sq, Run<kCount>{work.first + i});
    }
  }
  // One element a thread: neighbours in a warp are neighbours in memory whatever the alignment.
#pragma unroll 1
  for (uint32_t i = done + threadIdx.x; i < work.items; i += kThreads) {
    step_elements(step, exp_avg, exp_avg_sq, Run<1>{work.first + i});
  }
}

struct Launcher {
  const AdamLaunch& launch;
  int64_t blocks;
  void* stream;

  template <Master kMaster, typename Param, typename Grad, bool kGeneral>
  const char* run() const {
    return shardops::launch<false>(update_elements<kMaster, Param, Grad, kGeneral>, blocks, kThreads, stream, launch);
  }
};

}  // namespace

template <>
const char* launch_adam<kMomentsOf<Moment>>(const AdamKernelKind& kind, const AdamLaunch& launch, int64_t blocks,
                                            void* stream) {
  return choose_kernel(kind, Launcher{launch, blocks, stream});
}

}  // namespace shardops
