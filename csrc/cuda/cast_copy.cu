// Copy with cast and scale: the one CUDA kernel under flatten_shard, unflatten_shard and cast_gather.
// A segment is cut into chunks at positions where its target is aligned, so that a source which is misaligned in the
// same way is copied by wide accesses too; the elements before the first and after the last go one by one.
#include <type_traits>
#include <vector>

#include "../common/low_precision.h"
#include "access.cuh"
#include "kernels.h"
#include "segment_table.cuh"

namespace shardops {
namespace {

// Accesses of one thread on their way at a time.
constexpr uint32_t kWideInFlight = 4;
constexpr uint32_t kScalarInFlight = 8;
// Leaves a thread 48 registers. Without it ptxas aims at 40, and spills on sm_100.
constexpr int kBlocksPerMultiprocessor = 5;
// Rounds of one block; a longer loop would only make the last blocks end later.
constexpr int64_t kMostRounds = 64;

// Elements of a wide access: 16 bytes of the wider type, and as many of the narrower.
template <typename To, typename From>
constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));

template <typename To, typename From>
constexpr int64_t kRound = int64_t{kThreads} * kWide<To, From> * kWideInFlight;

template <int kParameters>
struct CopyLaunch {
  SegmentTable<CopySegment, kParameters> table;
  uint32_t chunk_numel;
  float scale;
};
static_assert(sizeof(CopyLaunch<kLargeParameters>) <= kLargeParameters);
static_assert(sizeof(CopyLaunch<kSmallParameters>) <= kSmallParameters);

// Bits of one width are kept, and a NaN's payload with them.
template <bool kScale, typename To, typename From>
__device__ __forceinline__ To convert(From value, float scale) {
  if constexpr (std::is_integral_v<From>) {
    return value;
  } else {
    const float number = to_float(value);
    To result;
    from_float(kScale ? SHARDOPS_MUL(number, scale) : number, result);
    return result;
  }
}

// Loads first, then stores: the compiler may not move a load past a store that could be to the same address.
template <int kCount, uint32_t kInFlight, bool kScale, typename To, typename From>
__device__ __forceinline__ void copy_batch(To* target, const From* source, uint32_t first, float scale) {
  Vector<From, kCount> values[kInFlight];
#pragma unroll
  for (uint32_t i = 0; i < kInFlight; ++i) values[i] = load<kCount>(source + (first + i * kThreads) * kCount);
#pragma unroll
  for (uint32_t i = 0; i < kInFlight; ++i) {
    Vector<To, kCount> results;
#pragma unroll
    for (int j = 0; j < kCount; ++j) results[j] = convert<kScale, To>(values[i][j], scale);
    store(target + (first + i * kThreads) * kCount, results);
  }
}

// All threads of a block, over count vectors of kCount elements.
template <int kCount, uint32_t kInFlight, bool kScale, typename To, typename From>
__device__ __forceinline__ void copy_vectors(To* target, const From* source, uint32_t count, float scale) {
  uint32_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * kThreads < count; i += kInFlight * kThreads) {
    copy_batch<kCount, kInFlight, kScale>(target, source, i, scale);
  }
#pragma unroll 1
  for (; i < count; i += kThreads) copy_batch<kCount, 1, kScale>(target, source, i, scale);
}

// Fewer elements than a block has threads.
template <bool kScale, typename To, typename From>
__device__ __forceinline__ void copy_few(To* target, const From* source, uint32_t count, float scale) {
  if (threadIdx.x < count) copy_batch<1, 1, kScale>(target, source, threadIdx.x, scale);
}

template <int kCount, typename To>
__device__ __forceinline__ void zero_vectors(To* target, uint32_t count) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) store(target + i * kCount, Vector<To, kCount>{});
}

// target[i] = cast(source[i] * scale), or zero where there is no source: also under an infinite scale.
template <typename To, typename From, bool kScale, typename Launch>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    copy_kernel(const __grid_constant__ Launch launch) {
  constexpr uint32_t kCount = kWide<To, From>;
  const Place place = launch.table.find(blockIdx.x);
  const CopySegment& segment = launch.table.rows[place.row];

  // Chunks are counted from the aligned address at or before the target, so that only the first one is ragged there.
  const uint32_t before = misaligned<kCount>(static_cast<To*>(segment.target)) / sizeof(To);
  const int64_t start = int64_t{place.chunk} * launch.chunk_numel - before;
  const int64_t begin = start < 0 ? 0 : start;
  const int64_t end = start + launch.chunk_numel < segment.numel ? start + launch.chunk_numel : segment.numel;
  const uint32_t numel = static_cast<uint32_t>(end - begin);
  const uint32_t ragged = static_cast<uint32_t>(start < 0 ? kCount - before : 0);
  const uint32_t head = ragged < numel ? ragged : numel;
  const uint32_t vectors = (numel - head) / kCount;
  const uint32_t tail = head + vectors * kCount;

  To* target = static_cast<To*>(segment.target) + begin;
  const bool is_target_aligned = misaligned<kCount>(target + head) == 0;
  if (segment.source == nullptr) {
    zero_vectors<1>(target, is_target_aligned ? head : numel);
    if (is_target_aligned) {
      zero_vectors<kCount>(target + head, vectors);
      zero_vectors<1>(target + tail, numel - tail);
    }
    return;
  }
  const From* source = static_cast<const From*>(segment.source) + begin;
  if (is_target_aligned && misaligned<kCount>(source + head) == 0) {
    copy_few<kScale>(target, source, head, launch.scale);
    copy_vectors<kCount, kWideInFlight, kScale>(target + head, source + head, vectors, launch.scale);
    copy_few<kScale>(target + tail, source + tail, numel - tail, launch.scale);
  } else {
    copy_vectors<1, kScalarInFlight, kScale>(target, source, numel, launch.scale);
  }
}

// Segments without those of nothing, each run of neighbours in both memories as one.
std::vector<CopySegment> merged(const CopySegment* segments, int64_t count, int64_t from_nbytes, int64_t to_nbytes) {
  std::vector<CopySegment> result;
  result.reserve(count);
  for (const CopySegment* segment = segments; segment != segments + count; ++segment) {
    if (segment->numel == 0) continue;
    if (!result.empty()) {
      CopySegment& last = result.back();
      const char* target_end = static_cast<const char*>(last.target) + last.numel * to_nbytes;
      const char* source_end =
          last.source == nullptr ? nullptr : static_cast<const char*>(last.source) + last.numel * from_nbytes;
      if (segment->target == target_end && segment->source == source_end) {
        last.numel += segment->numel;
        continue;
      }
    }
    result.push_back(*segment);
  }
  return result;
}

template <typename To, typename From, bool kScale, int kParameters>
const char* launch_batch(const CopySegment* segments, int64_t count, float scale, void* stream) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += segments[i].numel;
  const int64_t chunk = kRound<To, From> * rounds_for(total, kRound<To, From>, kMostRounds);
  CopyLaunch<kParameters> arguments;
  arguments.table.count = 0;
  arguments.chunk_numel = static_cast<uint32_t>(chunk);
  arguments.scale = scale;
  uint32_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t before = misaligned<kWide<To, From>>(static_cast<To*>(segments[i].target)) / sizeof(To);
    arguments.table.add(segments[i], chunks, (segments[i].numel + before + chunk - 1) / chunk);
  }
  return launch<false>(copy_kernel<To, From, kScale, CopyLaunch<kParameters>>, chunks, kThreads, stream, arguments);
}

template <typename To, typename From, bool kScale>
const char* launch_all(const std::vector<CopySegment>& segments, float scale, void* stream) {
  return in_batches<CopySegment>(segments, [&]<int kParameters>(const CopySegment* first, int64_t count) {
    return launch_batch<To, From, kScale, kParameters>(first, count, scale, stream);
  });
}

template <typename To, typename From>
const char* launch_pair(const std::vector<CopySegment>& segments, const float* scale, void* stream) {
  if (scale != nullptr) return launch_all<To, From, true>(segments, *scale, stream);
  if constexpr (std::is_same_v<To, From>) {
    using Bits = std::conditional_t<sizeof(To) == 4, uint32_t, uint16_t>;
    return launch_all<Bits, Bits, false>(segments, 1.0f, stream);
  } else {
    return launch_all<To, From, false>(segments, 1.0f, stream);
  }
}

template <typename To>
const char* launch_from(const std::vector<CopySegment>& segments, Dtype from, const float* scale, void* stream) {
  switch (from) {
    case Dtype::kFloat32: return launch_pair<To, float>(segments, scale, stream);
    case Dtype::kBFloat16: return launch_pair<To, Bf16>(segments, scale, stream);
    case Dtype::kFloat16: return launch_pair<To, Fp16>(segments, scale, stream);
  }
  return nullptr;
}

}  // namespace

const char* launch_cast_copy(const CopySegment* segments, int64_t count, Dtype from, Dtype to, const float* scale,
                             void* stream) {
  const std::vector<CopySegment> runs = merged(segments, count, dtype_nbytes(from), dtype_nbytes(to));
  switch (to) {
    case Dtype::kFloat32: return launch_from<float>(runs, from, scale, stream);
    case Dtype::kBFloat16: return launch_from<Bf16>(runs, from, scale, stream);
    case Dtype::kFloat16: return launch_from<Fp16>(runs, from, scale, stream);
  }
  return nullptr;
}

}  // namespace shardops
