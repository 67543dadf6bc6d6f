// bf16 + remainder <-> fp32 master. With 16 bits of remainder, 4 bytes hold an exact master and, in their upper half,
// the bf16 parameter; with 8, 3 bytes hold one whose last 8 bits were rounded off. The upper half rounds to nearest
// with ties away from zero: under ties-to-even some bf16 values own 65,537 fp32 patterns, which 16 bits cannot tell
// apart.
#pragma once

#include "low_precision.h"

namespace shardops {

// bits = (high << 16) + sign_extend(remainder)
SHARDOPS_HD float join_fp32(Bf16 high, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(high.bits) << 16;
  return bits_to_float(upper + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

// high = (bits + 0x8000) >> 16; remainder = bits - (high << 16). A NaN becomes 0x7FC00000 first: the integer rule would
// turn 0x7FFFFFFF into -0.0 and 0x7F800001 into infinity.
SHARDOPS_HD void split_fp32(float value, Bf16& high, int16_t& remainder) {
  const uint32_t bits = value != value ? 0x7FC00000u : float_to_bits(value);
  const uint32_t upper = (bits + 0x8000u) >> 16;
  high.bits = static_cast<uint16_t>(upper);
  remainder = static_cast<int16_t>(static_cast<uint16_t>(bits - (upper << 16)));
}

// bits = (high << 16) + remainder * 256
SHARDOPS_HD float join_24(Bf16 high, int8_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(high.bits) << 16;
  return bits_to_float(upper + (static_cast<uint32_t>(static_cast<int32_t>(remainder)) << 8));
}

// The magnitude's last 8 bits are rounded off by adding the dither, 0 to 255, and cutting; the rest is split as above.
// kPlain: as in raised_bits.
template <bool kPlain = false>
SHARDOPS_HD void split_24(float value, uint32_t dither, Bf16& high, int8_t& remainder) {
  const uint32_t bits = raised_bits<kPlain>(value, dither);
  high.bits = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  remainder = static_cast<int8_t>(static_cast<uint8_t>(bits >> 8));  // high << 16 has nothing in these 8 bits
}

}  // namespace shardops
