// The sharded Adam step on a CPU: a range of one tensor, tile by tile, in one pass over memory.
// A tile's updated masters are in the L1 cache when the parameter, its remainder and its shadow are made of them.
#include "isa.h"

#include "../common/split_fp32.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

constexpr int64_t kTile = 512;

template <typename T>
void encode(T* __restrict destination, const float* __restrict tile, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) from_float(tile[i], destination[i]);
}

void encode_split(Bf16* __restrict high, int16_t* __restrict remainder, const float* __restrict tile, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) split_fp32(tile[i], high[i], remainder[i]);
}

void encode_as(Dtype dtype, void* destination, int64_t offset, const float* tile, int64_t numel) {
  switch (dtype) {
    case Dtype::kFloat32: return encode(static_cast<float*>(destination) + offset, tile, numel);
    case Dtype::kBFloat16: return encode(static_cast<Bf16*>(destination) + offset, tile, numel);
    case Dtype::kFloat16: return encode(static_cast<Fp16*>(destination) + offset, tile, numel);
  }
}

// Not inlined: __restrict holds for the parameters of a function, and without it the vectoriser gives up on so many
// arrays.
template <bool kCoupled, bool kAmsgrad, typename Grad>
__attribute__((noinline)) void update(const AdamScalars scalars, const Grad* __restrict grad, float* __restrict master,
                                      float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                      float* __restrict max_exp_avg_sq, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    float largest = kAmsgrad ? max_exp_avg_sq[i] : 0.0f;
    adam_update<kCoupled, kAmsgrad>(scalars, to_float(grad[i]), master[i], exp_avg[i], exp_avg_sq[i], largest);
    if (kAmsgrad) max_exp_avg_sq[i] = largest;
  }
}

// The updated masters go to a tile: splitting them in this loop, too, costs more than the tile does.
template <bool kCoupled, bool kAmsgrad, typename Grad>
__attribute__((noinline)) void update_split(const AdamScalars scalars, const Grad* __restrict grad,
                                            const Bf16* __restrict high, const int16_t* __restrict remainder,
                                            float* __restrict master, float* __restrict exp_avg,
                                            float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq,
                                            int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    float value = join_fp32(high[i], remainder[i]);
    float largest = kAmsgrad ? max_exp_avg_sq[i] : 0.0f;
    adam_update<kCoupled, kAmsgrad>(scalars, to_float(grad[i]), value, exp_avg[i], exp_avg_sq[i], largest);
    if (kAmsgrad) max_exp_avg_sq[i] = largest;
    master[i] = value;
  }
}

// Updates a tile; returns its masters: in memory, or in `tile` for a split.
template <bool kCoupled, bool kAmsgrad, typename Grad>
float* update_tile(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, const Grad* grad,
                   int64_t offset, int64_t numel, float* tile) {
  float* max_exp_avg_sq = kAmsgrad ? tensor.max_exp_avg_sq + offset : nullptr;
  float* exp_avg = tensor.exp_avg + offset;
  float* exp_avg_sq = tensor.exp_avg_sq + offset;
  if (format.master == Master::kSplit) {
    update_split<kCoupled, kAmsgrad>(scalars, grad, static_cast<const Bf16*>(tensor.param) + offset,
                                     static_cast<const int16_t*>(tensor.master) + offset, tile, exp_avg, exp_avg_sq,
                                     max_exp_avg_sq, numel);
    return tile;
  }
  float* master = static_cast<float*>(format.master == Master::kParam ? tensor.param : tensor.master) + offset;
  update<kCoupled, kAmsgrad>(scalars, grad, master, exp_avg, exp_avg_sq, max_exp_avg_sq, numel);
  return master;
}

template <typename Grad>
float* update_tile(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, const Grad* grad,
                   int64_t offset, int64_t numel, float* tile) {
  if (format.coupled_decay) {
    return format.amsgrad ? update_tile<true, true>(format, tensor, scalars, grad, offset, numel, tile)
                          : update_tile<true, false>(format, tensor, scalars, grad, offset, numel, tile);
  }
  return format.amsgrad ? update_tile<false, true>(format, tensor, scalars, grad, offset, numel, tile)
                        : update_tile<false, false>(format, tensor, scalars, grad, offset, numel, tile);
}

template <typename Grad>
float* unscale_and_update(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars,
                          const Grad* grad, int64_t offset, int64_t numel, float* tile) {
  if (!format.unscale) return update_tile(format, tensor, scalars, grad, offset, numel, tile);
  alignas(64) float unscaled[kTile];
  for (int64_t i = 0; i < numel; ++i) unscaled[i] = SHARDOPS_DIV(to_float(grad[i]), format.grad_scale);
  return update_tile(format, tensor, scalars, static_cast<const float*>(unscaled), offset, numel, tile);
}

float* update_tile(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, int64_t offset,
                   int64_t numel, float* tile) {
  switch (format.grad) {
    case Dtype::kFloat32:
      return unscale_and_update(format, tensor, scalars, static_cast<const float*>(tensor.grad) + offset, offset, numel,
                                tile);
    case Dtype::kBFloat16:
      return unscale_and_update(format, tensor, scalars, static_cast<const Bf16*>(tensor.grad) + offset, offset, numel,
                                tile);
    case Dtype::kFloat16:
      return unscale_and_update(format, tensor, scalars, static_cast<const Fp16*>(tensor.grad) + offset, offset, numel,
                                tile);
  }
  return nullptr;
}

void store_param(const AdamFormat& format, const AdamTensor& tensor, int64_t offset, int64_t numel,
                 const float* master) {
  if (format.master == Master::kSplit) {
    encode_split(static_cast<Bf16*>(tensor.param) + offset, static_cast<int16_t*>(tensor.master) + offset, master,
                 numel);
  } else if (format.master == Master::kFloat32) {
    encode_as(format.param, tensor.param, offset, master, numel);
  }
  if (format.has_shadow) encode_as(format.shadow, tensor.shadow, offset, master, numel);
}

}  // namespace

void sharded_adam(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, int64_t begin,
                  int64_t end) {
  alignas(64) float master_tile[kTile];
  // A step that ends where it began has nothing to write out: one long loop over memory prefetches best.
  const bool in_place = !format.unscale && format.master == Master::kParam && !format.has_shadow;
  const int64_t tile = in_place ? end - begin : kTile;
  for (int64_t offset = begin; offset < end; offset += tile) {
    const int64_t numel = end - offset < tile ? end - offset : tile;
    const float* master = update_tile(format, tensor, scalars, offset, numel, master_tile);
    store_param(format, tensor, offset, numel, master);
  }
}

}  // namespace SHARDOPS_ISA
}  // namespace shardops
