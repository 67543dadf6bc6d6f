// The gradient norm on a GPU: a thread block for each block of the fixed tree, then one that combines the blocks.
// The tree is that of backends/reference/grad_norm.py. No atomics: an order of arrival would change the last bits.
#include <algorithm>
#include <cfloat>
#include <cstring>
#include <iterator>
#include <vector>

#include "../common/low_precision.h"
#include "../common/norm_math.h"
#include "access.cuh"
#include "kernels.h"
#include "segment_table.cuh"

namespace shardops {
namespace {

constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
// Neighbouring lanes of one thread, which is one access of 16 bytes in fp32.
constexpr int kLanesOfThread = 4;
constexpr int kNormThreads = kNormLanes / kLanesOfThread;
constexpr int kRowsOfBlock = kNormBlock / kNormLanes;
static_assert(kNormThreads == 2 * kWarpSize, "the tree's first step is from the second warp to the first one");
// Blocks' values of one lane that are on their way to it at a time.
constexpr int kCombineInFlight = 16;

// Blocks on a multiprocessor at a time. A thread keeps its 64 elements in registers: 16-bit ones, packed, leave room
// for half of the threads that a multiprocessor holds, fp32 for three eighths, with 192 KB of loads on their way.
template <typename T>
constexpr int kResident = sizeof(T) == 2 ? 16 : 12;

template <int kParameters>
struct NormLaunch {
  SegmentTable<NormTensor, kParameters> table;
  double* blocks;
};
static_assert(sizeof(NormLaunch<kLargeParameters>) <= kLargeParameters);
static_assert(sizeof(NormLaunch<kSmallParameters>) <= kSmallParameters);

struct CombineLaunch {
  const double* blocks;
  int64_t count;
  double* total;
  float* nonfinite;
};

// The four lanes of a thread, each with the rounding errors of its sum.
struct Lanes {
  Vector<float, kLanesOfThread> sums;
  Vector<float, kLanesOfThread> errors;
};

template <typename T>
using Row = Vector<T, kLanesOfThread>;

// A thread's part of a row whose elements end at `numel`; behind them are zeros.
template <bool kIsWhole, typename T>
__device__ __forceinline__ Row<T> load_row(const T* values, int row, int numel) {
  const int first = row * static_cast<int>(kNormLanes) + static_cast<int>(threadIdx.x) * kLanesOfThread;
  Row<T> elements;
#pragma unroll
  for (int i = 0; i < kLanesOfThread; ++i) {
    elements[i] = kIsWhole || first + i < numel ? load<1>(values + first + i)[0] : T{};
  }
  return elements;
}

// Bits of magnitudes have the magnitudes' order, with NaN on top: the largest is the same in any order.
template <typename T>
__device__ __forceinline__ void raise_to(uint32_t& largest, const Row<T>& elements) {
#pragma unroll
  for (int i = 0; i < kLanesOfThread; ++i) {
    const uint32_t magnitude = float_to_bits(to_float(elements[i])) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
}

// Of all threads of a block of two warps.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t largest) {
  __shared__ uint32_t of_warps[2];
  largest = __reduce_max_sync(kWholeWarp, largest);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
  return of_warps[0] > of_warps[1] ? of_warps[0] : of_warps[1];
}

// Kahan: errors hold, negated, what the additions so far have added too much.
template <Norm kNorm, typename T>
__device__ __forceinline__ void add_row(Lanes& lanes, const Row<T>& elements, float scale) {
#pragma unroll
  for (int i = 0; i < kLanesOfThread; ++i) {
    const float value = SHARDOPS_MUL(to_float(elements[i]), scale);
    const float term =
        kNorm == Norm::kTwo ? SHARDOPS_MUL(value, value) : bits_to_float(float_to_bits(value) & 0x7FFFFFFFu);
    const float corrected = SHARDOPS_ADD(term, lanes.errors[i]);
    const float raised = SHARDOPS_ADD(lanes.sums[i], corrected);
    lanes.errors[i] = SHARDOPS_SUB(corrected, SHARDOPS_SUB(raised, lanes.sums[i]));
    lanes.sums[i] = raised;
  }
}

// Makes a row of 16-bit numbers the two registers that hold them, of which the compiler then knows nothing. It would
// otherwise keep a register for each number, from its load or from the search for the largest to the sum.
template <typename T>
__device__ __forceinline__ void keep_packed([[maybe_unused]] Row<T>& elements) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    uint32_t words[2];
    std::memcpy(words, &elements, sizeof(words));
    asm volatile("" : "+r"(words[0]), "+r"(words[1]));
    std::memcpy(&elements, words, sizeof(words));
  }
#endif
}

// The sums of a whole block, which is read once: its 16 rows stay in registers.
template <Norm kNorm, typename T>
__device__ __forceinline__ uint32_t sum_whole(Lanes& lanes, const T* values) {
  Row<T> rows[kRowsOfBlock];
  if (misaligned<kLanesOfThread>(values) == 0) {
    const T* first = values + threadIdx.x * kLanesOfThread;
#pragma unroll
    for (int row = 0; row < kRowsOfBlock; ++row) rows[row] = load<kLanesOfThread>(first + row * kNormLanes);
  } else {
#pragma unroll
    for (int row = 0; row < kRowsOfBlock; ++row) {
      rows[row] = load_row<true>(values, row, kNormBlock);
      keep_packed(rows[row]);
    }
  }
  uint32_t largest = 0;
#pragma unroll
  for (int row = 0; row < kRowsOfBlock; ++row) raise_to(largest, rows[row]);
  largest = largest_of_block(largest);
  if (kNorm == Norm::kInf || is_norm_value(largest)) return largest;
  const float scale = norm_scale(norm_exponent(largest));
#pragma unroll
  for (int row = 0; row < kRowsOfBlock; ++row) {
    keep_packed(rows[row]);
    add_row<kNorm>(lanes, rows[row], scale);
  }
  return largest;
}

// Of a tensor's last block, which is read twice, the second time from the cache: it is rare, and in registers it would
// double the kernel. Rows without elements are not added, as the specification has it.
template <Norm kNorm, typename T>
__device__ __forceinline__ uint32_t sum_short(Lanes& lanes, const T* values, int numel) {
  const int rows = (numel + static_cast<int>(kNormLanes) - 1) / static_cast<int>(kNormLanes);
  uint32_t largest = 0;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) raise_to(largest, load_row<false>(values, row, numel));
  largest = largest_of_block(largest);
  if (kNorm == Norm::kInf || is_norm_value(largest)) return largest;
  const float scale = norm_scale(norm_exponent(largest));
#pragma unroll 1
  for (int row = 0; row < rows; ++row) add_row<kNorm>(lanes, load_row<false>(values, row, numel), scale);
  return largest;
}

// Lane l takes lane l + width, for width = 128, 64, .. 1; lane 0, of thread 0, has the result.
__device__ __forceinline__ void sum_tree(Lanes& lanes) {
  __shared__ Lanes upper[kWarpSize];
  if (threadIdx.x >= kWarpSize) upper[threadIdx.x - kWarpSize] = lanes;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
#pragma unroll
  for (int i = 0; i < kLanesOfThread; ++i) {
    take_lane(lanes.sums[i], lanes.errors[i], upper[threadIdx.x].sums[i], upper[threadIdx.x].errors[i]);
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kLanesOfThread; ++i) {
      const float sum = __shfl_down_sync(kWholeWarp, lanes.sums[i], distance);
      const float errors = __shfl_down_sync(kWholeWarp, lanes.errors[i], distance);
      take_lane(lanes.sums[i], lanes.errors[i], sum, errors);
    }
  }
#pragma unroll
  for (int width = kLanesOfThread / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      take_lane(lanes.sums[i], lanes.errors[i], lanes.sums[i + width], lanes.errors[i + width]);
    }
  }
}

// blocks[first + chunk] = sum(|x| ^ norm) of the chunk's elements, or the largest of their magnitudes.
template <typename T, Norm kNorm, typename Launch>
__global__ void __launch_bounds__(kNormThreads, kResident<T>)
    norm_blocks_kernel(const __grid_constant__ Launch launch) {
  const Place place = launch.table.find(blockIdx.x);
  const NormTensor& tensor = launch.table.rows[place.row];
  const int64_t offset = place.chunk * kNormBlock;
  const T* values = static_cast<const T*>(tensor.values) + offset;

  Lanes lanes = {};
  uint32_t largest;
  if (tensor.numel - offset >= kNormBlock) {
    largest = sum_whole<kNorm>(lanes, values);
  } else {
    largest = sum_short<kNorm>(lanes, values, static_cast<int>(tensor.numel - offset));
  }
  double value = bits_to_float(largest);
  if (kNorm != Norm::kInf && !is_norm_value(largest)) {  // all threads of a block agree
    sum_tree(lanes);
    value = norm_value(lanes.sums[0], lanes.errors[0], norm_exponent(largest), kNorm == Norm::kTwo ? 2 : 1);
  }
  if (threadIdx.x == 0) store(launch.blocks + tensor.first_block + place.chunk, Vector<double, 1>{{value}});
}

// The sum, or the larger one with NaN winning.
template <Norm kNorm>
__device__ __forceinline__ double combine(double a, double b) {
  if constexpr (kNorm != Norm::kInf) return a + b;
  return b > a || b != b ? b : a;
}

// Blocks l, l + 256, .. to lane l, then lane l takes lane l + width as above. One block of a thread for each lane.
template <Norm kNorm>
__global__ void __launch_bounds__(kNormLanes) combine_kernel(const __grid_constant__ CombineLaunch launch) {
  __shared__ double of_threads[kNormLanes];
  __shared__ uint32_t nonfinite_of_warps[kNormLanes / kWarpSize];
  const int lane = static_cast<int>(threadIdx.x);
  double value = 0.0;
  uint32_t nonfinite = 0;
  for (int64_t first = lane; first < launch.count; first += kCombineInFlight * kNormLanes) {
    double values[kCombineInFlight];
#pragma unroll
    for (int i = 0; i < kCombineInFlight; ++i) {
      const int64_t index = first + i * kNormLanes;
      values[i] = index < launch.count ? load<1>(launch.blocks + index)[0] : 0.0;
    }
#pragma unroll
    for (int i = 0; i < kCombineInFlight; ++i) {
      value = combine<kNorm>(value, values[i]);
      nonfinite |= values[i] <= DBL_MAX ? 0u : 1u;  // no block's value is negative
    }
  }
  of_threads[lane] = value;
  nonfinite = __reduce_max_sync(kWholeWarp, nonfinite);
  if (lane % kWarpSize == 0) nonfinite_of_warps[lane / kWarpSize] = nonfinite;
#pragma unroll
  for (int width = static_cast<int>(kNormLanes) / 2; width >= kWarpSize; width /= 2) {
    __syncthreads();
    if (lane < width) of_threads[lane] = combine<kNorm>(of_threads[lane], of_threads[lane + width]);
  }
  if (lane >= kWarpSize) return;
  value = of_threads[lane];  // written by this thread itself
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = combine<kNorm>(value, __shfl_down_sync(kWholeWarp, value, distance));
  }
  if (lane != 0) return;
#pragma unroll
  for (int warp = 1; warp < static_cast<int>(kNormLanes) / kWarpSize; ++warp) nonfinite |= nonfinite_of_warps[warp];
  store(launch.total, Vector<double, 1>{{value}});
  store(launch.nonfinite, Vector<float, 1>{{nonfinite != 0 ? 1.0f : 0.0f}});
}

template <typename T, Norm kNorm, int kParameters>
const char* launch_batch(const NormTensor* tensors, int64_t count, double* blocks, void* stream) {
  NormLaunch<kParameters> arguments;
  arguments.table.count = 0;
  arguments.blocks = blocks;
  uint32_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    arguments.table.add(tensors[i], chunks, (tensors[i].numel + kNormBlock - 1) / kNormBlock);
  }
  return launch<true>(norm_blocks_kernel<T, kNorm, NormLaunch<kParameters>>, chunks, kNormThreads, stream, arguments);
}

template <typename T, Norm kNorm>
const char* launch_all(const std::vector<NormTensor>& tensors, double* blocks, void* stream) {
  return in_batches<NormTensor>(tensors, [&]<int kParameters>(const NormTensor* first, int64_t count) {
    return launch_batch<T, kNorm, kParameters>(first, count, blocks, stream);
  });
}

template <typename T>
const char* launch_norm(const std::vector<NormTensor>& tensors, Norm norm, double* blocks, void* stream) {
  switch (norm) {
    case Norm::kOne: return launch_all<T, Norm::kOne>(tensors, blocks, stream);
    case Norm::kTwo: return launch_all<T, Norm::kTwo>(tensors, blocks, stream);
    case Norm::kInf: return launch_all<T, Norm::kInf>(tensors, blocks, stream);
  }
  return nullptr;
}

}  // namespace

const char* launch_norm_blocks(const NormTensor* tensors, int64_t count, Dtype dtype, Norm norm, double* blocks,
                               void* stream) {
  std::vector<NormTensor> filled;
  filled.reserve(count);
  std::copy_if(tensors, tensors + count, std::back_inserter(filled), [](const NormTensor& t) { return t.numel > 0; });
  switch (dtype) {
    case Dtype::kFloat32: return launch_norm<float>(filled, norm, blocks, stream);
    case Dtype::kBFloat16: return launch_norm<Bf16>(filled, norm, blocks, stream);
    case Dtype::kFloat16: return launch_norm<Fp16>(filled, norm, blocks, stream);
  }
  return nullptr;
}

const char* launch_norm_combine(const double* blocks, int64_t count, Norm norm, double* total, float* nonfinite,
                                void* stream) {
  const CombineLaunch arguments{blocks, count, total, nonfinite};
  const int threads = static_cast<int>(kNormLanes);
  if (norm == Norm::kInf) return launch<true>(combine_kernel<Norm::kInf>, 1, threads, stream, arguments);
  return launch<true>(combine_kernel<Norm::kTwo>, 1, threads, stream, arguments);
}

}  // namespace shardops
