// The counter-based dither: what is added below the last kept bit before a value is cut off, so that roundings of a
// sequence of steps cancel. It depends on the element's global index and the step alone: equal for every sharding.
#pragma once

#include "platform.h"

namespace shardops {

constexpr uint32_t kDitherPerIndex = 0x85EBCA77u;
constexpr uint32_t kDitherPerStep = 0x9E3779B9u;

// One tensor's dither in one step: the word of index k is k * multiplier + base (mod 2^32); its upper bits are used.
struct Dither {
  uint32_t multiplier;
  uint32_t base;
};

// Half of what is cut off, for every index: to nearest, ties away from zero.
constexpr Dither kNoDither = {0u, 0x80000000u};

// step: the number of this update, starting at 1.
SHARDOPS_HD Dither dither_of(uint32_t salt, int64_t step) {
  return Dither{kDitherPerIndex, static_cast<uint32_t>(step) * kDitherPerStep + salt};
}

SHARDOPS_HD uint32_t dither_word(const Dither& dither, uint32_t index) {
  return index * dither.multiplier + dither.base;
}

// Where a local tensor's elements lie in the global one, mod 2^32: rows of `columns` elements, `stride` apart.
struct GlobalIndex {
  uint32_t first;
  uint32_t stride;
  int64_t columns;  // at least 1 where there are elements
};

// Of the first element of a row, and of those after it one more each.
SHARDOPS_HD uint32_t global_index(const GlobalIndex& index, int64_t row, int64_t column) {
  return index.first + static_cast<uint32_t>(row) * index.stride + static_cast<uint32_t>(column);
}

}  // namespace shardops
