// The loops over one block of 8-bit moments, for the instruction set of the translation unit that includes this.
// The arithmetic is common/block_quant.h's; a loop is cut wherever the compiler would otherwise not vectorise it.
#pragma once

#include "isa.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstring>

#include "../common/block_quant.h"
#include "../common/dither.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

// Elements of a tile: what is decoded, updated and encoded at a time stays in the L1 cache.
constexpr int64_t kTile = 512;
constexpr int64_t kTileBlocks = kTile / kBlock;

// Not inlined, as all loops here: __restrict holds for the parameters of a function.
#define SHARDOPS_LOOP __attribute__((noinline))

// kFull: a block of kBlock elements, whose loops have no tails.
template <bool kFull>
SHARDOPS_LOOP void decode_block(const int8_t* __restrict first_codes, const uint8_t* __restrict second_codes,
                                BlockWords words, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                int64_t count) {
  const int64_t numel = kFull ? kBlock : count;
  const BlockDecoder decoder = block_decoder(words);
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t code = second_codes[i];
    const uint32_t raw = raw_second(decoder.highest, decoder.step, code);
    exp_avg_sq[i] = decode_second(raw, code);
    exp_avg[i] = decode_first(first_codes[i], raw, decoder);
  }
}

struct BitsRange {
  uint32_t highest;
  uint32_t lowest;
};

// The patterns of exp_avg_sq, and what second_grid() takes.
template <bool kFull>
SHARDOPS_LOOP BitsRange second_range(const float* __restrict exp_avg_sq, uint32_t* __restrict patterns, int64_t count) {
  const int64_t numel = kFull ? kBlock : count;
  // Signed, which all instruction sets compare: patterns are positive, and 2^31 is taken off the differences.
  int32_t highest = 0;
  int32_t lowest = INT32_MAX;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = second_bits(exp_avg_sq[i]);
    patterns[i] = bits;
    const int32_t pattern = static_cast<int32_t>(bits);
    const int32_t above = static_cast<int32_t>(bits - kSmallestSecond - 0x80000000u);
    highest = pattern > highest ? pattern : highest;
    lowest = above < lowest ? above : lowest;
  }
  return BitsRange{static_cast<uint32_t>(highest), static_cast<uint32_t>(lowest) + 0x80000000u};
}

// Two 32-bit numbers in each lane.
typedef uint64_t Pairs __attribute__((vector_size(kVectorBytes)));

// The products of the lanes' lower halves.
inline Pairs multiply_lower(Pairs a, Pairs b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Pairs>(
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Pairs>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Pairs>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// From patterns to multiply_high(grid.highest - pattern, grid.inverse). The processors multiply every other number:
// taken as pairs, the products need not be put in order, for which a compiler spends half of the instructions.
template <bool kFull>
SHARDOPS_LOOP void quotients_of(uint32_t* __restrict patterns, const SecondGrid grid, int64_t count) {
  typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
  constexpr int64_t kWidth = kVectorBytes / sizeof(uint32_t);
  const int64_t numel = kFull ? kBlock : count;
  const Pairs factors = Pairs{} + grid.inverse;
  int64_t i = 0;
  for (; i + kWidth <= numel; i += kWidth) {
    Words pattern;
    std::memcpy(&pattern, patterns + i, sizeof(pattern));
    const Pairs distance = reinterpret_cast<Pairs>(grid.highest - pattern);
    const Pairs even = multiply_lower(distance, factors) >> 32;
    const Pairs odd = multiply_lower(distance >> 32, factors) & 0xFFFFFFFF00000000u;
    const Pairs quotient = even | odd;
    std::memcpy(patterns + i, &quotient, sizeof(quotient));
  }
  if (kFull) return;
  for (; i < numel; ++i) patterns[i] = multiply_high(grid.highest - patterns[i], grid.inverse);
}

// Codes of exp_avg_sq; exp_avg becomes its ratios. Returns the largest pattern of their magnitudes.
template <bool kFull>
SHARDOPS_LOOP uint32_t encode_second(const uint32_t* __restrict quotients, const uint32_t* __restrict dither,
                                     const SecondGrid grid, uint8_t* __restrict codes, float* __restrict exp_avg,
                                     int64_t count) {
  const int64_t numel = kFull ? kBlock : count;
  int32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t code = second_code(quotients[i], dither[i]);
    codes[i] = static_cast<uint8_t>(code);
    const float ratio = first_ratio(exp_avg[i], raw_second(grid.highest, grid.step, code));
    exp_avg[i] = ratio;
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(ratio) & 0x7FFFFFFFu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

template <bool kFull>
SHARDOPS_LOOP void encode_first(const float* __restrict ratios, float factor, int8_t* __restrict codes, int64_t count) {
  const int64_t numel = kFull ? kBlock : count;
  if (factor == 0.0f) {
    std::memset(codes, 0, numel);
    return;
  }
  for (int64_t i = 0; i < numel; ++i)
    codes[i] = static_cast<int8_t>(static_cast<uint8_t>(first_code(ratios[i], factor)));
}

// Some blocks that lie one after another: block i from starts[i] to starts[i + 1].
struct BlockRun {
  int64_t count;
  int64_t starts[kTileBlocks + 1];

  int64_t numel(int64_t block) const { return starts[block + 1] - starts[block]; }
  bool is_full(int64_t block) const { return numel(block) == kBlock; }
};

void decode_blocks(const BlockRun& run, const int8_t* first_codes, const uint8_t* second_codes, const BlockWords* words,
                   float* exp_avg, float* exp_avg_sq) {
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t at = run.starts[i];
    const auto loop = run.is_full(i) ? decode_block<true> : decode_block<false>;
    loop(first_codes + at, second_codes + at, words[i], exp_avg + at, exp_avg_sq + at, run.numel(i));
  }
}

// exp_avg is used up. dither: 16 bits for each place in a block. Step by step for all blocks, so that a block's
// divisions have the loops of the others to hide behind.
void encode_blocks(const BlockRun& run, float* exp_avg, const float* exp_avg_sq, const uint32_t* dither,
                   int8_t* first_codes, uint8_t* second_codes, BlockWords* words) {
  alignas(64) uint32_t quotients[kTile];  // patterns first
  SecondGrid grids[kTileBlocks];
  FirstScale scales[kTileBlocks];
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t at = run.starts[i];
    const auto loop = run.is_full(i) ? second_range<true> : second_range<false>;
    const BitsRange range = loop(exp_avg_sq + at, quotients + at, run.numel(i));
    grids[i] = second_grid(range.highest, range.lowest);
  }
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t at = run.starts[i];
    (run.is_full(i) ? quotients_of<true> : quotients_of<false>)(quotients + at, grids[i], run.numel(i));
    const auto loop = run.is_full(i) ? encode_second<true> : encode_second<false>;
    scales[i] = first_scale(loop(quotients + at, dither, grids[i], second_codes + at, exp_avg + at, run.numel(i)));
  }
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t at = run.starts[i];
    const auto loop = run.is_full(i) ? encode_first<true> : encode_first<false>;
    loop(exp_avg + at, scales[i].factor, first_codes + at, run.numel(i));
    words[i] = block_words(grids[i], scales[i]);
  }
}

}  // namespace
}  // namespace SHARDOPS_ISA
}  // namespace shardops
