// Copy with cast and scale: the one loop under flatten_shard, unflatten_shard and cast_gather on a CPU.
#include "isa.h"

#include <cstring>

#include "../common/low_precision.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

template <typename To, typename From, bool kScale>
void convert(To* __restrict destination, const From* __restrict source, int64_t numel, float scale) {
  for (int64_t i = 0; i < numel; ++i) {
    const float value = to_float(source[i]);
    from_float(kScale ? SHARDOPS_MUL(value, scale) : value, destination[i]);
  }
}

template <typename To, typename From>
void convert(void* destination, const void* source, int64_t numel, const float* scale) {
  To* to = static_cast<To*>(destination);
  const From* from = static_cast<const From*>(source);
  if (scale) {
    convert<To, From, true>(to, from, numel, *scale);
  } else {
    convert<To, From, false>(to, from, numel, 1.0f);
  }
}

template <typename To>
void convert_from(void* destination, const void* source, Dtype from, int64_t numel, const float* scale) {
  switch (from) {
    case Dtype::kFloat32: return convert<To, float>(destination, source, numel, scale);
    case Dtype::kBFloat16: return convert<To, Bf16>(destination, source, numel, scale);
    case Dtype::kFloat16: return convert<To, Fp16>(destination, source, numel, scale);
  }
}

}  // namespace

void cast_copy(void* destination, Dtype to, const void* source, Dtype from, int64_t numel, const float* scale) {
  if (numel == 0) return;
  if (to == from && !scale) {
    std::memcpy(destination, source, numel * dtype_nbytes(to));  // keeps a NaN's payload, as a copy should
    return;
  }
  switch (to) {
    case Dtype::kFloat32: return convert_from<float>(destination, source, from, numel, scale);
    case Dtype::kBFloat16: return convert_from<Bf16>(destination, source, from, numel, scale);
    case Dtype::kFloat16: return convert_from<Fp16>(destination, source, from, numel, scale);
  }
}

}  // namespace SHARDOPS_ISA
}  // namespace shardops
