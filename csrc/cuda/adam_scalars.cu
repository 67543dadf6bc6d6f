// The scalars of tensors' steps, made on the device where their counters or the learning rate are: a small launch
// before the update, since float64 and a loop in each of its blocks would cost more than the update's own arithmetic.
#include "adam_kinds.cuh"
#include "launch.cuh"

namespace shardops {
namespace {

struct ScalarsHeader {
  AdamOptions options;
  const float* lr_float;
  const double* lr_double;
  float* counters;
  const float* found_inf;
  StepScalars* scalars;
  uint32_t count;
};

struct ScalarsLaunch : ScalarsHeader {
  uint32_t numbers[(kParameterBytes - sizeof(ScalarsHeader)) / sizeof(uint32_t)];
};
static_assert(sizeof(ScalarsLaunch) <= kParameterBytes);

constexpr int64_t kTensorsInLaunch = sizeof(ScalarsLaunch::numbers) / sizeof(uint32_t);
constexpr int kScalarThreads = 64;

__global__ void __launch_bounds__(kScalarThreads) make_scalars(SHARDOPS_PARAMETERS(ScalarsLaunch) launch) {
  const uint32_t index = blockIdx.x * kScalarThreads + threadIdx.x;
  if (index >= launch.count) return;
  AdamOptions options = launch.options;
  if (launch.lr_float != nullptr) options.lr = *launch.lr_float;
  if (launch.lr_double != nullptr) options.lr = *launch.lr_double;
  const uint32_t number = launch.numbers[index];
  // Counters are floats, as torch's are; each has one thread.
  const int64_t step = launch.counters == nullptr ? number : static_cast<int64_t>(launch.counters[number]) + 1;
  launch.scalars[index] = StepScalars{adam_scalars(options, step, 1.0f), static_cast<uint32_t>(step)};
  const bool is_skipped = launch.found_inf != nullptr && *launch.found_inf != 0.0f;
  if (launch.counters != nullptr && !is_skipped) launch.counters[number] = static_cast<float>(step);
}

}  // namespace

const char* launch_adam_scalars(const ScalarsRequest& request, void* stream) {
  ScalarsLaunch launch{};
  launch.options = request.options;
  launch.lr_float = request.lr_float;
  launch.lr_double = request.lr_double;
  launch.counters = request.counters;
  launch.found_inf = request.found_inf;
  for (int64_t first = 0; first < request.count; first += kTensorsInLaunch) {
    launch.count = static_cast<uint32_t>(std::min(kTensorsInLaunch, request.count - first));
    launch.scalars = request.scalars + first;
    std::copy_n(request.numbers + first, launch.count, launch.numbers);
    const int64_t blocks = (launch.count + kScalarThreads - 1) / kScalarThreads;
    const char* error = shardops::launch<false>(make_scalars, blocks, kScalarThreads, stream, launch);
    if (error != nullptr) return error;
  }
  return nullptr;
}

// ---- the update's kernels, by the storage of the moments ----

const char* launch_sharded_adam(const AdamKernelKind& kind, const AdamLaunch& launch, int64_t blocks, void* stream) {
  switch (kind.moments) {
    case Moments::kFloat32: return launch_adam<Moments::kFloat32>(kind, launch, blocks, stream);
    case Moments::kBFloat16: return launch_adam<Moments::kBFloat16>(kind, launch, blocks, stream);
    case Moments::kBlocks: return launch_adam<Moments::kBlocks>(kind, launch, blocks, stream);
  }
  return kNoSuchKernel;
}

int64_t adam_chunk_items(const AdamKernelKind& kind, int64_t items) {
  if (kind.moments == Moments::kBlocks) return kQuantisedPerRound * rounds_for(items, kQuantisedPerRound, 16);
  const bool is_wide =
      kind.moments == Moments::kFloat32 || kind.master == Master::kParam || kind.master == Master::kFloat32;
  const int64_t round = kThreads * (is_wide ? 4 : 8);
  return round * rounds_for(items, round, 16);
}

}  // namespace shardops
