// The sharded Adam step on a CPU: a range of one tensor, tile by tile, in one pass over memory.
// A tile's master weights and gradients are fp32 in the L1 cache while the formula runs, so that one loop serves every
// dtype; where they are fp32 in memory already, the loop works on memory itself.
#include "isa.h"

#include "../common/split_fp32.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

constexpr int64_t kTile = 512;

template <typename T>
void decode(float* __restrict tile, const T* __restrict source, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) tile[i] = to_float(source[i]);
}

template <typename T>
void encode(T* __restrict destination, const float* __restrict tile, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) from_float(tile[i], destination[i]);
}

void decode_split(float* __restrict tile, const Bf16* __restrict high, const int16_t* __restrict remainder,
                  int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) tile[i] = join_fp32(high[i], remainder[i]);
}

void encode_split(Bf16* __restrict high, int16_t* __restrict remainder, const float* __restrict tile, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) split_fp32(tile[i], high[i], remainder[i]);
}

void unscale(float* __restrict tile, const float* __restrict grad, float grad_scale, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) tile[i] = SHARDOPS_DIV(grad[i], grad_scale);
}

void encode_as(Dtype dtype, void* destination, int64_t offset, const float* tile, int64_t numel) {
  switch (dtype) {
    case Dtype::kFloat32: return encode(static_cast<float*>(destination) + offset, tile, numel);
    case Dtype::kBFloat16: return encode(static_cast<Bf16*>(destination) + offset, tile, numel);
    case Dtype::kFloat16: return encode(static_cast<Fp16*>(destination) + offset, tile, numel);
  }
}

template <bool kCoupled, bool kAmsgrad>
void update(const AdamScalars scalars, const float* __restrict grad, float* __restrict master,
            float* __restrict exp_avg, float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq,
            int64_t numel) {
  float unused = 0.0f;
  for (int64_t i = 0; i < numel; ++i) {
    adam_update<kCoupled, kAmsgrad>(scalars, grad[i], master[i], exp_avg[i], exp_avg_sq[i],
                                    kAmsgrad ? max_exp_avg_sq[i] : unused);
  }
}

using Update = void (*)(const AdamScalars, const float*, float*, float*, float*, float*, int64_t);

Update select_update(const AdamFormat& format) {
  if (format.coupled_decay) return format.amsgrad ? update<true, true> : update<true, false>;
  return format.amsgrad ? update<false, true> : update<false, false>;
}

// The tile's gradients as fp32: the tensor itself, or a decoded and unscaled copy in `tile`.
const float* load_grad(const AdamFormat& format, const AdamTensor& tensor, int64_t offset, int64_t numel, float* tile) {
  const float* grad = tile;
  switch (format.grad) {
    case Dtype::kFloat32: grad = static_cast<const float*>(tensor.grad) + offset; break;
    case Dtype::kBFloat16: decode(tile, static_cast<const Bf16*>(tensor.grad) + offset, numel); break;
    case Dtype::kFloat16: decode(tile, static_cast<const Fp16*>(tensor.grad) + offset, numel); break;
  }
  if (!format.unscale) return grad;
  if (grad == tile) {
    for (int64_t i = 0; i < numel; ++i) tile[i] = SHARDOPS_DIV(tile[i], format.grad_scale);
  } else {
    unscale(tile, grad, format.grad_scale, numel);
  }
  return tile;
}

// The tile's master weights: where they are in memory, or a decoded copy in `tile`.
float* load_master(const AdamFormat& format, const AdamTensor& tensor, int64_t offset, int64_t numel, float* tile) {
  switch (format.master) {
    case Master::kParam: return static_cast<float*>(tensor.param) + offset;
    case Master::kFloat32: return static_cast<float*>(tensor.master) + offset;
    case Master::kSplit:
      decode_split(tile, static_cast<const Bf16*>(tensor.param) + offset,
                   static_cast<const int16_t*>(tensor.master) + offset, numel);
      return tile;
  }
  return tile;
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
  alignas(64) float grad_tile[kTile];
  alignas(64) float master_tile[kTile];
  const Update update_tile = select_update(format);
  // With everything fp32 in memory there is nothing to stage, and one long loop prefetches best.
  const bool in_place = format.grad == Dtype::kFloat32 && !format.unscale && format.master == Master::kParam &&
                        !format.has_shadow;
  const int64_t tile = in_place ? end - begin : kTile;
  for (int64_t offset = begin; offset < end; offset += tile) {
    const int64_t numel = end - offset < tile ? end - offset : tile;
    const float* grad = load_grad(format, tensor, offset, numel, grad_tile);
    float* master = load_master(format, tensor, offset, numel, master_tile);
    update_tile(scalars, grad, master, tensor.exp_avg + offset, tensor.exp_avg_sq + offset,
                format.amsgrad ? tensor.max_exp_avg_sq + offset : nullptr, numel);
    store_param(format, tensor, offset, numel, master);
  }
}

}  // namespace SHARDOPS_ISA
}  // namespace shardops
