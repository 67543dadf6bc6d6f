// A step over full blocks of 8-bit moments, a register of elements at a time, for the formats that are trained with.
// The arithmetic is common/block_quant.h's and split_fp32.h's, in the instructions that give it at the least cost.
#pragma once

#include "block_loops.h"
#include "lanes.h"

#include "../common/split_fp32.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

// Blocks that a loop goes over before the next loop: their tiles stay in the L1 cache.
constexpr int64_t kRunBlocks = 8;

// Some full blocks: elements [offset, offset + count * kBlock) of a tensor, of one row.
struct FullBlocks {
  const AdamTensor& tensor;
  const AdamScalars& scalars;
  const Dither& dither;
  int64_t offset;
  int64_t count;  // at most kRunBlocks
  BlockWords* words;
  const uint32_t* code_dither;  // 16 bits for each place in a block

  int64_t numel() const { return count * kBlock; }

  template <typename T>
  T* array(void* values) const {
    return static_cast<T*>(values) + offset;
  }

  template <typename T>
  const T* array(const void* values) const {
    return static_cast<const T*>(values) + offset;
  }
};

using StepBlocks = void (*)(const FullBlocks&);

#if defined(SHARDOPS_LANES)

// Registers between two stores of bytes, which fill one.
constexpr int64_t kGroup = 4;
constexpr int64_t kGroupLanes = kGroup * kLanes;
static_assert(kBlock % kGroupLanes == 0, "a full block has no tail");

constexpr int64_t kRun = kRunBlocks * kBlock;

// What will be read two runs later comes to the second cache: a loop that reads and then leaves the memory to the loops
// after it does not keep it busy.
constexpr int64_t kAhead = 2 * kRun;
constexpr int64_t kLine = 64;  // of a cache

template <typename T>
SHARDOPS_INLINE void prefetch_block(const T* values) {
  for (int64_t i = 0; i < kBlock; i += kLine / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(values + i, 0, 2);
}

// ---- the masters: load() for the loop that updates them, and store_masters() from the tile that it fills ----

struct FloatMasters {
  float* __restrict values;

  explicit FloatMasters(const FullBlocks& blocks) : values(blocks.array<float>(blocks.tensor.param)) {}

  float* destination(float*) const { return values; }  // of the updated masters: no tile

  SHARDOPS_INLINE Floats load(int64_t i) const { return load_floats(values + i); }

  SHARDOPS_INLINE void prefetch(int64_t i) const { prefetch_block(values + i); }
};

SHARDOPS_INLINE void store_masters(const FullBlocks&, const FloatMasters&, const float*) {}

struct Split32Masters {
  Bf16* __restrict high;
  int16_t* __restrict remainder;

  explicit Split32Masters(const FullBlocks& blocks)
      : high(blocks.array<Bf16>(blocks.tensor.param)), remainder(blocks.array<int16_t>(blocks.tensor.master)) {}

  float* destination(float* tile) const { return tile; }

  SHARDOPS_INLINE void prefetch(int64_t i) const {
    prefetch_block(high + i);
    prefetch_block(remainder + i);
  }

  SHARDOPS_INLINE Floats load(int64_t i) const { return as_floats(load_upper(high + i) + load_halves(remainder + i)); }
};

SHARDOPS_LOOP void store_masters(const FullBlocks& blocks, const Split32Masters masters, const float* __restrict tile) {
  const int64_t numel = blocks.numel();
  for (int64_t i = 0; i < numel; i += 2 * kLanes) {
    Words bits[2];
#pragma GCC unroll 2
    for (int64_t k = 0; k < 2; ++k) {
      const Floats value = load_floats(tile + i + k * kLanes);
      bits[k] = as_words(value != value ? as_floats(Words{} + kCanonicalNan) : value);
    }
    store_upper(masters.high + i, bits[0] + 0x8000u, bits[1] + 0x8000u);
    store_lower(masters.remainder + i, bits[0], bits[1]);  // high << 16 has nothing in these bits
  }
}

struct Split24Masters {
  Bf16* __restrict high;
  int8_t* __restrict remainder;

  explicit Split24Masters(const FullBlocks& blocks)
      : high(blocks.array<Bf16>(blocks.tensor.param)), remainder(blocks.array<int8_t>(blocks.tensor.master)) {}

  float* destination(float* tile) const { return tile; }

  SHARDOPS_INLINE void prefetch(int64_t i) const {
    prefetch_block(high + i);
    prefetch_block(remainder + i);
  }

  SHARDOPS_INLINE Floats load(int64_t i) const {
    // The remainder's sign is flipped and 2^7 taken off again, so that it need not be extended.
    return as_floats(((load_upper(high + i) | load_second_bytes(remainder + i)) ^ 0x8000u) - 0x8000u);
  }
};

SHARDOPS_LOOP void store_masters(const FullBlocks& blocks, const Split24Masters masters, const float* __restrict tile) {
  const GlobalIndex& index = blocks.tensor.index;
  const int64_t row = blocks.offset / index.columns;
  const uint32_t multiplier = blocks.dither.multiplier;
  uint32_t first_word = dither_word(blocks.dither, global_index(index, row, blocks.offset - row * index.columns));
  const int64_t numel = blocks.numel();
  const Words step = Words{} + static_cast<uint32_t>(kLanes) * multiplier;
  Words word = lane_numbers() * multiplier + first_word;
  Words largest = {};
  for (int64_t i = 0; i < numel; i += kGroupLanes) {
    Words bits[kGroup];
#pragma GCC unroll 4
    for (int64_t k = 0; k < kGroup; ++k, word += step) {
      const Words value = as_words(load_floats(tile + i + k * kLanes));
      largest = larger(largest, value & 0x7FFFFFFFu);
      bits[k] = value + (word >> 24);
    }
    store_upper(masters.high + i, bits[0] + 0x8000u, bits[1] + 0x8000u);
    store_upper(masters.high + i + 2 * kLanes, bits[2] + 0x8000u, bits[3] + 0x8000u);
    store_second_bytes(masters.remainder + i, bits[0], bits[1], bits[2], bits[3]);
  }
  if (largest_of(largest) <= kLargestPlain) return;
  // Some are infinite, NaN, or about to become infinite: all over again.
  for (int64_t i = 0; i < numel; ++i, first_word += multiplier) {
    split_24<false>(tile[i], first_word >> 24, masters.high[i], masters.remainder[i]);
  }
}

// ---- the moments ----

// The tiles of a step.
struct Tiles {
  alignas(64) float master[kRun];
  alignas(64) float exp_avg[kRun];
  alignas(64) uint32_t patterns[kRun];  // of exp_avg_sq
};

// For a block with a NaN: brings its patterns to what second_bits() gives.
SHARDOPS_LOOP BitsRange canonical_range(uint32_t* patterns) {
  BitsRange range = {0u, 0xFFFFFFFFu};
  for (int64_t i = 0; i < kBlock; ++i) {
    patterns[i] = second_bits(bits_to_float(patterns[i]));
    range.highest = patterns[i] > range.highest ? patterns[i] : range.highest;
    range.lowest = shardops::smaller(range.lowest, patterns[i] - kSmallestSecond);
  }
  return range;
}

// Decodes and updates; the results go to tiles, and what exp_avg_sq is encoded with to grids. An element waits long for
// its root and its quotient: the moments of one register are computed ahead of the masters of the one before.
template <bool kFromGrad, typename Grad, typename Masters>
SHARDOPS_LOOP void update_masters(const FullBlocks& blocks, const Masters masters, Tiles& tiles, SecondGrid* grids) {
  AdamScalars scalars = blocks.scalars;
  scalars.from_grad = kFromGrad;  // known to the compiler
  const auto* first_codes = blocks.array<int8_t>(blocks.tensor.exp_avg);
  const auto* second_codes = blocks.array<uint8_t>(blocks.tensor.exp_avg_sq);
  const auto* grad = blocks.array<Grad>(blocks.tensor.grad);
  float* destination = masters.destination(tiles.master);
  const auto update = [&](int64_t at, Floats first, Floats root) SHARDOPS_LAMBDA {
    const Floats decayed = masters.load(at) * scalars.decay;
    store_floats(destination + at, updated_master(scalars, decayed, first, root));
  };
  Floats first = {};
  Floats root = {};
  int64_t at = 0;
  for (int64_t block = 0; block < blocks.count; ++block) {
    const BlockDecoder decoder = block_decoder(blocks.words[block]);
    prefetch_block(first_codes + at + kAhead);
    prefetch_block(second_codes + at + kAhead);
    prefetch_block(grad + at + kAhead);
    masters.prefetch(at + kAhead);
    Words highest = {};
    Words lowest = ~highest;
    for (int64_t i = 0; i < kBlock; i += kLanes, at += kLanes) {
      const Floats first_before = first;
      const Floats root_before = root;
      const Words code = load_codes(second_codes + at);
      const Words raw = decoder.highest - code * decoder.step;
      const Floats reference = as_floats(mean_halves(raw & 0x7F000000u, Words{} + 0x3FFF0000u));
      first = to_floats(load_codes(first_codes + at)) * reference * decoder.scale;
      Floats second = as_floats(zero_where(code, kZeroCode, raw));
      update_moments(scalars, load_floats(grad + at) * scalars.grad_coef, first, second);
      root = square_root(second);
      store_floats(tiles.exp_avg + at, first);
      const Words pattern = as_words(second);  // a NaN's is seen to below
      store_words(tiles.patterns + at, pattern);
      highest = larger(highest, pattern);
      lowest = smaller(lowest, pattern - kSmallestSecond);
      if (at > 0) update(at - kLanes, first_before, root_before);
    }
    BitsRange range = {largest_of(highest), ~largest_of(~lowest)};
    if (range.highest > kCanonicalNan) range = canonical_range(tiles.patterns + block * kBlock);
    grids[block] = second_grid(range.highest, range.lowest);
  }
  update(at - kLanes, first, root);
}

// Codes of exp_avg_sq; exp_avg becomes its ratios, whose scales are found.
SHARDOPS_LOOP void encode_second(const FullBlocks& blocks, const SecondGrid* grids, Tiles& tiles, FirstScale* scales) {
  auto* codes = blocks.array<uint8_t>(blocks.tensor.exp_avg_sq);
  int64_t at = 0;
  for (int64_t block = 0; block < blocks.count; ++block) {
    const SecondGrid grid = grids[block];
    Words largest = {};
#pragma GCC unroll 2
    for (int64_t i = 0; i < kBlock; i += kGroupLanes, at += kGroupLanes) {
      Words group[kGroup];
#pragma GCC unroll 4
      for (int64_t k = 0; k < kGroup; ++k) {
        const int64_t lane = k * kLanes;
        const Words distance = grid.highest - load_words(tiles.patterns + at + lane);
        const Words quotient = multiply_high(distance, Words{} + grid.inverse);
        group[k] = smaller(quotient + load_words(blocks.code_dither + i + lane), Words{} + 0xFFFFFFu) >> 16;
        const Words inverted = group[k] * grid.step + ~grid.highest;  // the pattern's bits
        const Floats factor = as_floats(mean_halves(inverted & 0x7F000000u, Words{} + 0x3EFF0000u));
        const Floats ratio = load_floats(tiles.exp_avg + at + lane) * factor;
        store_floats(tiles.exp_avg + at + lane, ratio);
        largest = larger(largest, as_words(ratio) & 0x7FFFFFFFu);
      }
      store_codes(codes + at, group[0], group[1], group[2], group[3]);
    }
    scales[block] = first_scale(largest_of(largest));
  }
}

SHARDOPS_LOOP void encode_first(const FullBlocks& blocks, const FirstScale* scales, const Tiles& tiles) {
  auto* codes = blocks.array<int8_t>(blocks.tensor.exp_avg);
  for (int64_t block = 0; block < blocks.count; ++block) {
    const float factor = scales[block].factor;
    const float* ratios = tiles.exp_avg + block * kBlock;
    for (int64_t i = 0; i < kBlock; i += kGroupLanes) {
      Words group[kGroup];
#pragma GCC unroll 4
      for (int64_t k = 0; k < kGroup; ++k) {
        // Under a factor of 0 a ratio may be NaN; its code is 0.
        const Words code = nearest(load_floats(ratios + i + k * kLanes) * factor);
        group[k] = factor == 0.0f ? Words{} : code;
      }
      store_codes(codes + block * kBlock + i, group[0], group[1], group[2], group[3]);
    }
  }
}

template <bool kFromGrad, typename Grad, typename Masters>
void step_blocks(const FullBlocks& blocks) {
  Tiles tiles;
  SecondGrid grids[kRunBlocks];
  FirstScale scales[kRunBlocks];
  const Masters masters(blocks);
  update_masters<kFromGrad, Grad>(blocks, masters, tiles, grids);
  store_masters(blocks, masters, tiles.master);
  encode_second(blocks, grids, tiles, scales);
  encode_first(blocks, scales, tiles);
  for (int64_t i = 0; i < blocks.count; ++i) blocks.words[i] = block_words(grids[i], scales[i]);
}

template <typename Grad, typename Master>
StepBlocks choose_step(const AdamScalars& scalars) {
  return scalars.from_grad ? step_blocks<true, Grad, Master> : step_blocks<false, Grad, Master>;
}

// Null where the loops over tiles are to be taken.
StepBlocks choose_step(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars) {
  if (format.unscale || format.amsgrad || format.coupled_decay || format.has_shadow) return nullptr;
  const bool is_float = format.grad == Dtype::kFloat32;
  if (!is_float && format.grad != Dtype::kBFloat16) return nullptr;
  switch (format.master) {
    case Master::kParam:
      return is_float ? choose_step<float, FloatMasters>(scalars) : choose_step<Bf16, FloatMasters>(scalars);
    case Master::kSplit:
      return is_float ? choose_step<float, Split32Masters>(scalars) : choose_step<Bf16, Split32Masters>(scalars);
    case Master::kSplit24:
      // A block's indices are consecutive unless a row of them ends within it.
      if (tensor.index.columns % tensor.block_columns != 0) return nullptr;
      return is_float ? choose_step<float, Split24Masters>(scalars) : choose_step<Bf16, Split24Masters>(scalars);
    default: return nullptr;
  }
}

#else

StepBlocks choose_step(const AdamFormat&, const AdamTensor&, const AdamScalars&) { return nullptr; }

#endif

}  // namespace
}  // namespace SHARDOPS_ISA
}  // namespace shardops
