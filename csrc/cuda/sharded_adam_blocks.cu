// The sharded Adam step on a GPU for moments in 8-bit codes: half a warp decodes, updates and encodes a block of 128
// elements, which its threads hold in registers from the first load to the last store.
#include "../common/block_quant.h"
#include "adam_kinds.cuh"
#include "adam_step.cuh"

namespace shardops {
namespace {

constexpr int kCountOfLane = kBlock / kLanes;

// ---- a thread's elements of a block ----

// Next to each other, in a full block that starts where wide accesses may. A block past the last one is given as the
// last one once more, of which nothing is stored: what is read of it may be half new, and nobody sees what comes of it.
struct WideLane {
  static constexpr int kCount = kCountOfLane;
  static constexpr bool kChecksRange = true;
  int64_t start;  // of the block
  uint32_t lane;
  bool present;

  SHARDOPS_MEMBER uint32_t place(int j) const { return lane * kCount + j; }
  SHARDOPS_MEMBER bool is_there() const { return true; }
  SHARDOPS_MEMBER bool has(int) const { return true; }
  SHARDOPS_MEMBER bool stores() const { return present; }
  SHARDOPS_MEMBER int64_t offset(int j) const { return start + place(j); }

  template <typename T>
  SHARDOPS_MEMBER Elements<T, kCount> load(const T* values) const {
    return load_elements<kCount>(values + start + lane * kCount);
  }
  template <typename T>
  SHARDOPS_MEMBER void store(T* values, const Elements<T, kCount>& stored) const {
    if (present) store_elements(values + start + lane * kCount, stored);
  }

  SHARDOPS_MEMBER BlockWords load_words(const BlockWords* words) const { return load_together<1>(words, lane == 0)[0]; }
  SHARDOPS_MEMBER void store_words(BlockWords* words, const BlockWords& stored) const {
    shardops::store(words, Vector<BlockWords, 1>{stored});
  }
};

// Of any block: neighbours in a warp are neighbours in memory.
struct SpreadLane {
  static constexpr int kCount = kCountOfLane;
  static constexpr bool kChecksRange = true;
  int64_t start;
  uint32_t lane;
  uint32_t length;  // of the block; 0 past the last one

  SHARDOPS_MEMBER uint32_t place(int j) const { return lane + j * kLanes; }
  SHARDOPS_MEMBER bool is_there() const { return length != 0; }
  SHARDOPS_MEMBER bool stores() const { return length != 0; }
  SHARDOPS_MEMBER bool has(int j) const { return place(j) < length; }
  SHARDOPS_MEMBER int64_t offset(int j) const { return start + place(j); }

  template <typename T>
  SHARDOPS_MEMBER Elements<T, kCount> load(const T* values) const {
    Elements<T, kCount> loaded{};
    for (int j = 0; j < kCount; ++j) {
      if (has(j)) loaded.add(j, shardops::load<1>(values + start + place(j))[0]);
    }
    return loaded;
  }
  template <typename T>
  SHARDOPS_MEMBER void store(T* values, const Elements<T, kCount>& stored) const {
    for (int j = 0; j < kCount; ++j) {
      if (has(j)) shardops::store(values + start + place(j), Vector<T, 1>{stored.get(j)});
    }
  }

  // One after the other: nothing says that the pair is aligned.
  SHARDOPS_MEMBER BlockWords load_words(const BlockWords* words) const {
    return BlockWords{load_together<1>(&words->highest, lane == 0)[0],
                      load_together<1>(&words->scale_and_step, lane == 0)[0]};
  }
  SHARDOPS_MEMBER void store_words(BlockWords* words, const BlockWords& stored) const {
    shardops::store(&words->highest, Vector<uint32_t, 1>{stored.highest});
    shardops::store(&words->scale_and_step, Vector<uint32_t, 1>{stored.scale_and_step});
  }
};

// ---- over a block's threads ----

SHARDOPS_DEVICE uint32_t largest_of(uint32_t value) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, width);
    value = other > value ? other : value;
  }
  return value;
}

SHARDOPS_DEVICE uint32_t smallest_of(uint32_t value) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    value = smaller(value, __shfl_xor_sync(0xFFFFFFFFu, value, width));
  }
  return value;
}

// ---- a block ----

template <typename Lane>
SHARDOPS_HD void decode(const Lane& lane, const BlockWords& words, const int8_t* first_codes,
                        const uint8_t* second_codes, Vector<float, Lane::kCount>& exp_avg,
                        Vector<float, Lane::kCount>& exp_avg_sq) {
  const BlockDecoder decoder = block_decoder(words);
  const Elements<int8_t, Lane::kCount> first = lane.load(first_codes);
  const Elements<uint8_t, Lane::kCount> second = lane.load(second_codes);
#pragma unroll
  for (int j = 0; j < Lane::kCount; ++j) {
    const uint32_t code = second.bits(j);
    const uint32_t raw = raw_second(decoder.highest, decoder.step, code);
    exp_avg_sq[j] = decode_second(raw, code);
    exp_avg[j] = decode_first(static_cast<int32_t>(first.signed_bits(j)), raw, decoder);
  }
}

template <typename Lane>
SHARDOPS_DEVICE BlockWords encode(const Lane& lane, const Dither& dither, const Vector<float, Lane::kCount>& exp_avg,
                                  const Vector<float, Lane::kCount>& exp_avg_sq, int8_t* first_codes,
                                  uint8_t* second_codes) {
  Vector<uint32_t, Lane::kCount> bits;
  uint32_t highest = 0, lowest = 0xFFFFFFFFu;
#pragma unroll
  for (int j = 0; j < Lane::kCount; ++j) {
    bits[j] = second_bits(exp_avg_sq[j]);
    if (!lane.has(j)) continue;
    highest = bits[j] > highest ? bits[j] : highest;
    lowest = smaller(lowest, bits[j] - kSmallestSecond);
  }
  const SecondGrid grid = second_grid(largest_of(highest), smallest_of(lowest));

  Vector<uint32_t, Lane::kCount> codes;  // in the third byte
  Vector<float, Lane::kCount> ratios;
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < Lane::kCount; ++j) {
    const uint32_t quotient = multiply_high(grid.highest - bits[j], grid.inverse);
    codes[j] = second_code_16(quotient, dither_word(dither, lane.place(j)) >> 16);
    ratios[j] = first_ratio(exp_avg[j], raw_second(grid.highest, grid.step, codes[j] >> 16));
    largest = larger_magnitude(largest, lane.has(j) ? ratios[j] : 0.0f);
  }
  Elements<uint8_t, Lane::kCount> second;
  second.template pack<2>(codes);
  lane.store(second_codes, second);
  const FirstScale scale = first_scale(largest_of(float_to_bits(largest)));

#pragma unroll
  for (int j = 0; j < Lane::kCount; ++j) codes[j] = first_code(ratios[j], scale.factor);
  Elements<int8_t, Lane::kCount> first;
  first.template pack<0>(codes);
  for (uint32_t& word : first.words.values) word = scale.factor == 0.0f ? 0u : word;
  lane.store(first_codes, first);
  return block_words(grid, scale);
}

// Every thread of a warp comes here, also those of blocks that are absent: the reductions are the whole warp's.
template <typename Lane, typename Step>
SHARDOPS_DEVICE void step_block(const Step& step, const Lane& lane, int8_t* first_codes, uint8_t* second_codes,
                                BlockWords* words) {
  BlockWords stored{};
  if (lane.is_there()) stored = lane.load_words(words);
  Vector<float, Lane::kCount> exp_avg, exp_avg_sq;
  decode(lane, stored, first_codes, second_codes, exp_avg, exp_avg_sq);
  step.update(lane, exp_avg, exp_avg_sq);
  stored = encode(lane, step.dither.dither, exp_avg, exp_avg_sq, first_codes, second_codes);
  if (lane.lane == 0 && lane.stores()) lane.store_words(words, stored);
}

// kWide: full blocks that start where wide accesses may. The others have kernels of their own, since both ways in one
// would hold more registers than either.
template <Master kMaster, typename Param, typename Grad, bool kGeneral, bool kWide>
__global__ void __launch_bounds__(kQuantisedThreads, !kWide     ? 4
                                                     : kGeneral ? 5
                                                                : 6)
    update_blocks(SHARDOPS_PARAMETERS(AdamLaunch) launch) {
  if (is_skipped(launch)) return;
  const AdamWork work = find_work(launch, blockIdx.x);
  const StepScalars scalars = step_scalars(launch, work);
  const AdamStep<kMaster, Param, Grad, kGeneral> step(launch, work, scalars);
  auto* first_codes = array<int8_t>(work.words[kExpAvgField]);
  auto* second_codes = array<uint8_t>(work.words[kExpAvgSqField]);
  auto* words = array<BlockWords>(field(launch, work, kBlockWordsField)) + work.first;
  const uint32_t lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (uint32_t i = 0; i < work.items; i += kQuantisedPerRound) {
    const uint32_t wanted = i + threadIdx.x / kLanes;
    if constexpr (kWide) {
      const uint32_t block = smaller(wanted, work.items - 1);
      const WideLane own{(work.first + block) * kBlock, lane, wanted == block};
      step_block(step, own, first_codes, second_codes, words + block);
    } else {
      const auto columns = static_cast<int64_t>(field(launch, work, kBlockColumnsField));
      const int64_t blocks_of_row = (columns + kBlock - 1) / kBlock;
      const int64_t row = (work.first + wanted) / blocks_of_row;
      const int64_t column = (work.first + wanted - row * blocks_of_row) * kBlock;
      const int64_t left = wanted < work.items ? columns - column : 0;
      const SpreadLane own{row * columns + column, lane, static_cast<uint32_t>(left < kBlock ? left : kBlock)};
      step_block(step, own, first_codes, second_codes, words + wanted);
    }
  }
}

struct Launcher {
  const AdamLaunch& launch;
  int64_t blocks;
  void* stream;
  bool wide;

  template <Master kMaster, typename Param, typename Grad, bool kGeneral>
  const char* run() const {
    if constexpr (!kGeneral) {
      return start(update_blocks<kMaster, Param, Grad, false, true>);
    } else {
      return wide ? start(update_blocks<kMaster, Param, Grad, true, true>)
                  : start(update_blocks<kMaster, Param, Grad, true, false>);
    }
  }

  template <typename Kernel>
  const char* start(Kernel* kernel) const {
    return shardops::launch<true>(kernel, blocks, kQuantisedThreads, stream, launch);
  }
};

}  // namespace

template <>
const char* launch_adam<Moments::kBlocks>(const AdamKernelKind& kind, const AdamLaunch& launch, int64_t blocks,
                                          void* stream) {
  return choose_kernel(kind, Launcher{launch, blocks, stream, kind.wide});
}

}  // namespace shardops
