// The sharded Adam step on a CPU: a range of one tensor, tile by tile, in one pass over memory.
// What is not stored in fp32 is decoded into tiles that stay in the L1 cache, updated there, and encoded from them.
#include "isa.h"

#include "../common/split_fp32.h"
#include "block_lanes.h"
#include "block_loops.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

// ---- loops over a tile ----

template <typename T>
SHARDOPS_LOOP void decode(float* __restrict tile, const T* __restrict source, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) tile[i] = to_float(source[i]);
}

template <typename T>
SHARDOPS_LOOP void encode(T* __restrict destination, const float* __restrict tile, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) from_float(tile[i], destination[i]);
}

SHARDOPS_LOOP void encode_split(Bf16* __restrict high, int16_t* __restrict remainder, const float* __restrict tile,
                                int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) split_fp32(tile[i], high[i], remainder[i]);
}

// The largest pattern of the magnitudes.
SHARDOPS_LOOP uint32_t largest_magnitude(const float* __restrict tile, int64_t numel) {
  int32_t largest = 0;  // signed, which all instruction sets compare
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(tile[i]) & 0x7FFFFFFFu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

// The dither's words run from `word` on, by additions: a 64-bit index would take the vectoriser twice the registers.
// kPlain: no magnitude is above kLargestPlain.
template <bool kPlain>
SHARDOPS_LOOP void encode_split(Bf16* __restrict high, int8_t* __restrict remainder, const float* __restrict tile,
                                uint32_t word, uint32_t multiplier, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i, word += multiplier) split_24<kPlain>(tile[i], word >> 24, high[i], remainder[i]);
}

template <bool kPlain>
SHARDOPS_LOOP void encode_dithered(Bf16* __restrict destination, const float* __restrict tile, uint32_t word,
                                   uint32_t multiplier, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i, word += multiplier) destination[i] = round_dithered<kPlain>(tile[i], word >> 16);
}

template <typename Grad>
SHARDOPS_LOOP void unscale(float* __restrict tile, const Grad* __restrict grad, float grad_scale, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) tile[i] = SHARDOPS_DIV(to_float(grad[i]), grad_scale);
}

template <bool kCoupled, bool kAmsgrad, typename Grad>
SHARDOPS_LOOP void update(const AdamScalars scalars, const Grad* __restrict grad, float* __restrict master,
                          float* __restrict exp_avg, float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq,
                          int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    float largest = kAmsgrad ? max_exp_avg_sq[i] : 0.0f;
    adam_update<kCoupled, kAmsgrad>(scalars, to_float(grad[i]), master[i], exp_avg[i], exp_avg_sq[i], largest);
    if (kAmsgrad) max_exp_avg_sq[i] = largest;
  }
}

SHARDOPS_HD float join(Bf16 high, int16_t remainder) { return join_fp32(high, remainder); }

SHARDOPS_HD float join(Bf16 high, int8_t remainder) { return join_24(high, remainder); }

// The masters are joined here, where the divider has the vector units wait, and go to a tile; splitting them in this
// loop, too, costs more than the tile does.
template <bool kCoupled, bool kAmsgrad, typename Grad, typename Remainder>
SHARDOPS_LOOP void update_split(const AdamScalars scalars, const Grad* __restrict grad, const Bf16* __restrict high,
                                const Remainder* __restrict remainder, float* __restrict master,
                                float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                float* __restrict max_exp_avg_sq, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    float value = join(high[i], remainder[i]);
    float largest = kAmsgrad ? max_exp_avg_sq[i] : 0.0f;
    adam_update<kCoupled, kAmsgrad>(scalars, to_float(grad[i]), value, exp_avg[i], exp_avg_sq[i], largest);
    if (kAmsgrad) max_exp_avg_sq[i] = largest;
    master[i] = value;
  }
}

// ---- one tile: the choice of loops ----

// Elements [offset, offset + numel) of a tensor, and where their fp32 moments are: in memory or in a tile.
struct Range {
  const AdamFormat& format;
  const AdamTensor& tensor;
  const AdamScalars& scalars;
  const Dither& dither;
  int64_t offset;
  int64_t numel;
  float* exp_avg;
  float* exp_avg_sq;

  float* max_exp_avg_sq() const { return format.amsgrad ? tensor.max_exp_avg_sq + offset : nullptr; }
};

template <typename T>
T* at(void* array, int64_t offset) {
  return static_cast<T*>(array) + offset;
}

template <typename T>
const T* at(const void* array, int64_t offset) {
  return static_cast<const T*>(array) + offset;
}

// Calls visit(offset, numel, dither word of its first element) for each part of a range whose indices are consecutive.
template <typename Visit>
void for_each_run(const Range& range, Visit&& visit) {
  const GlobalIndex& index = range.tensor.index;
  int64_t row = range.offset / index.columns;
  int64_t column = range.offset - row * index.columns;
  for (int64_t done = 0; done < range.numel; ++row, column = 0) {
    const int64_t left = range.numel - done;
    const int64_t numel = index.columns - column < left ? index.columns - column : left;
    visit(done, numel, dither_word(range.dither, global_index(index, row, column)));
    done += numel;
  }
}

void encode_as(Dtype dtype, void* destination, int64_t offset, const float* tile, int64_t numel) {
  switch (dtype) {
    case Dtype::kFloat32: return encode(at<float>(destination, offset), tile, numel);
    case Dtype::kBFloat16: return encode(at<Bf16>(destination, offset), tile, numel);
    case Dtype::kFloat16: return encode(at<Fp16>(destination, offset), tile, numel);
  }
}

void store_dithered(const Range& range, Bf16* destination, const float* tile) {
  const bool is_plain = largest_magnitude(tile, range.numel) <= kLargestPlain;
  const auto encode = is_plain ? encode_dithered<true> : encode_dithered<false>;
  for_each_run(range, [&](int64_t start, int64_t numel, uint32_t word) {
    encode(destination + start, tile + start, word, range.dither.multiplier, numel);
  });
}

void store_split24(const Range& range, Bf16* high, const float* master) {
  auto* remainder = at<int8_t>(range.tensor.master, range.offset);
  const bool is_plain = largest_magnitude(master, range.numel) <= kLargestPlain;
  const auto encode = is_plain ? encode_split<true> : encode_split<false>;
  for_each_run(range, [&](int64_t start, int64_t numel, uint32_t word) {
    encode(high + start, remainder + start, master + start, word, range.dither.multiplier, numel);
  });
}

void store_master(const Range& range, const float* master) {
  const AdamTensor& tensor = range.tensor;
  auto* high = at<Bf16>(tensor.param, range.offset);
  switch (range.format.master) {
    case Master::kParam: break;
    case Master::kFloat32:
    case Master::kNearest: encode_as(range.format.param, tensor.param, range.offset, master, range.numel); break;
    case Master::kSplit: encode_split(high, at<int16_t>(tensor.master, range.offset), master, range.numel); break;
    case Master::kSplit24: store_split24(range, high, master); break;
    case Master::kStochastic: store_dithered(range, high, master);
  }
  if (range.format.has_shadow) encode_as(range.format.shadow, tensor.shadow, range.offset, master, range.numel);
}

// Updates masters that are fp32, where they are.
template <typename Grad>
float* update_in_place(const Range& range, const Grad* grad, float* master) {
  const auto loop = range.format.coupled_decay
                        ? (range.format.amsgrad ? update<true, true, Grad> : update<true, false, Grad>)
                        : (range.format.amsgrad ? update<false, true, Grad> : update<false, false, Grad>);
  loop(range.scalars, grad, master, range.exp_avg, range.exp_avg_sq, range.max_exp_avg_sq(), range.numel);
  return master;
}

template <typename Remainder, typename Grad>
float* update_split(const Range& range, const Grad* grad, float* tile) {
  const auto loop = range.format.coupled_decay ? (range.format.amsgrad ? update_split<true, true, Grad, Remainder>
                                                                       : update_split<true, false, Grad, Remainder>)
                                               : (range.format.amsgrad ? update_split<false, true, Grad, Remainder>
                                                                       : update_split<false, false, Grad, Remainder>);
  loop(range.scalars, grad, at<Bf16>(range.tensor.param, range.offset),
       at<Remainder>(range.tensor.master, range.offset), tile, range.exp_avg, range.exp_avg_sq, range.max_exp_avg_sq(),
       range.numel);
  return tile;
}

// Returns the updated masters, in memory where they are fp32 there, else in the tile.
template <typename Grad>
float* update_masters(const Range& range, const Grad* grad, float* tile) {
  const AdamTensor& tensor = range.tensor;
  switch (range.format.master) {
    case Master::kParam: return update_in_place(range, grad, at<float>(tensor.param, range.offset));
    case Master::kFloat32: return update_in_place(range, grad, at<float>(tensor.master, range.offset));
    case Master::kSplit: return update_split<int16_t>(range, grad, tile);
    case Master::kSplit24: return update_split<int8_t>(range, grad, tile);
    case Master::kNearest:
    case Master::kStochastic: break;
  }
  if (range.format.param == Dtype::kBFloat16) {
    decode(tile, at<Bf16>(tensor.param, range.offset), range.numel);
  } else {
    decode(tile, at<Fp16>(tensor.param, range.offset), range.numel);
  }
  return update_in_place(range, grad, tile);
}

template <typename Grad>
float* unscale_and_update(const Range& range, float* tile) {
  const Grad* grad = at<Grad>(range.tensor.grad, range.offset);
  if (!range.format.unscale) return update_masters(range, grad, tile);
  alignas(64) float unscaled[kTile];
  unscale(unscaled, grad, range.format.grad_scale, range.numel);
  return update_masters(range, static_cast<const float*>(unscaled), tile);
}

// Everything but the moments' storage.
void update_range(const Range& range) {
  alignas(64) float tile[kTile];
  switch (range.format.grad) {
    case Dtype::kFloat32: return store_master(range, unscale_and_update<float>(range, tile));
    case Dtype::kBFloat16: return store_master(range, unscale_and_update<Bf16>(range, tile));
    case Dtype::kFloat16: return store_master(range, unscale_and_update<Fp16>(range, tile));
  }
}

// ---- a tensor's range, by the storage of its moments ----

void update_float32(Range range, int64_t begin, int64_t end) {
  const AdamFormat& format = range.format;
  // A step that ends where it began has nothing to write out: one long loop over memory prefetches best.
  const bool in_place = !format.unscale && format.master == Master::kParam && !format.has_shadow;
  const int64_t tile = in_place ? end - begin : kTile;
  for (range.offset = begin; range.offset < end; range.offset += tile) {
    range.numel = end - range.offset < tile ? end - range.offset : tile;
    range.exp_avg = at<float>(range.tensor.exp_avg, range.offset);
    range.exp_avg_sq = at<float>(range.tensor.exp_avg_sq, range.offset);
    update_range(range);
  }
}

void update_bfloat16(Range range, int64_t begin, int64_t end) {
  alignas(64) float exp_avg[kTile], exp_avg_sq[kTile];
  range.exp_avg = exp_avg;
  range.exp_avg_sq = exp_avg_sq;
  for (range.offset = begin; range.offset < end; range.offset += kTile) {
    range.numel = end - range.offset < kTile ? end - range.offset : kTile;
    auto* stored_avg = at<Bf16>(range.tensor.exp_avg, range.offset);
    auto* stored_avg_sq = at<Bf16>(range.tensor.exp_avg_sq, range.offset);
    decode(exp_avg, stored_avg, range.numel);
    decode(exp_avg_sq, stored_avg_sq, range.numel);
    update_range(range);
    store_dithered(range, stored_avg, exp_avg);
    store_dithered(range, stored_avg_sq, exp_avg_sq);
  }
}

// begin, end: blocks, which lie one after another in memory, also where a row ends.
void update_blocks(Range range, int64_t begin, int64_t end) {
  alignas(64) float exp_avg[kTile], exp_avg_sq[kTile];
  alignas(64) uint32_t dither[kBlock];
  range.exp_avg = exp_avg;
  range.exp_avg_sq = exp_avg_sq;
  for (int64_t i = 0; i < kBlock; ++i) dither[i] = dither_word(range.dither, static_cast<uint32_t>(i)) >> 16;
  const int64_t columns = range.tensor.block_columns;
  const int64_t row = begin / ((columns + kBlock - 1) / kBlock);
  int64_t column = (begin - row * ((columns + kBlock - 1) / kBlock)) * kBlock;
  range.offset = row * columns + column;
  const StepBlocks step_full = choose_step(range.format, range.tensor, range.scalars);
  const int64_t run_blocks = step_full == nullptr ? kTileBlocks : 1;  // 1: a row's last block, which is short
  for (int64_t block = begin; block < end; range.offset += range.numel) {
    auto* first_codes = at<int8_t>(range.tensor.exp_avg, range.offset);
    auto* second_codes = at<uint8_t>(range.tensor.exp_avg_sq, range.offset);
    BlockWords* words = range.tensor.block_words + block;
    BlockRun run{};
    const int64_t full_blocks = (columns - column) / kBlock;
    if (step_full != nullptr && full_blocks > 0) {
      int64_t count = end - block < kRunBlocks ? end - block : kRunBlocks;
      count = full_blocks < count ? full_blocks : count;
      step_full(FullBlocks{range.tensor, range.scalars, range.dither, range.offset, count, words, dither});
      block += count;
      range.numel = count * kBlock;
      column = column + range.numel < columns ? column + range.numel : 0;
      continue;
    }
    for (; run.count < run_blocks && block < end; ++run.count, ++block) {
      const int64_t numel = columns - column < kBlock ? columns - column : kBlock;
      run.starts[run.count + 1] = run.starts[run.count] + numel;
      column = column + numel < columns ? column + numel : 0;
    }
    range.numel = run.starts[run.count];
    decode_blocks(run, first_codes, second_codes, words, exp_avg, exp_avg_sq);
    update_range(range);
    encode_blocks(run, exp_avg, exp_avg_sq, dither, first_codes, second_codes, words);
  }
}

}  // namespace

void sharded_adam(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, const Dither& dither,
                  int64_t begin, int64_t end) {
  const Range range{format, tensor, scalars, dither, 0, 0, nullptr, nullptr};
  switch (format.moments) {
    case Moments::kFloat32: return update_float32(range, begin, end);
    case Moments::kBFloat16: return update_bfloat16(range, begin, end);
    case Moments::kBlocks: return update_blocks(range, begin, end);
  }
}

}  // namespace SHARDOPS_ISA
}  // namespace shardops
