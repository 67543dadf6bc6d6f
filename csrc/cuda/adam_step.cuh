// What the kernels of sharded_adam share: where a block's work is, and the step of the few elements that a thread
// holds, in every storage of gradients, masters and copies. The moments are the kernels' own.
#pragma once

#include "../common/split_fp32.h"
#include "adam_launch.h"
#include "packing.cuh"

namespace shardops {

// ---- where the work is ----

// One block's part of one tensor.
struct AdamWork {
  const uint64_t* words;  // the tensor's
  int64_t first;          // of its items
  uint32_t items;
};

SHARDOPS_HD uint32_t first_chunk(const AdamLaunch& launch, uint32_t tensor) {
  return static_cast<uint32_t>(launch.words[tensor * launch.fields + kWork]);
}

// The only place where offsets into the tensors are formed.
SHARDOPS_HD AdamWork find_work(const AdamLaunch& launch, uint32_t block) {
  uint32_t low = 0, high = launch.tensors - 1;  // the last tensor whose first chunk is not after the block
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (first_chunk(launch, middle) <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  AdamWork work;
  work.words = launch.words + low * launch.fields;
  work.first = static_cast<int64_t>(block - static_cast<uint32_t>(work.words[kWork])) * launch.chunk_items;
  const int64_t left = static_cast<int64_t>(work.words[kItemsField]) - work.first;
  work.items = left < launch.chunk_items ? static_cast<uint32_t>(left) : launch.chunk_items;
  return work;
}

// A field that may be absent: 0 then.
SHARDOPS_HD uint64_t field(const AdamLaunch& launch, const AdamWork& work, AdamField name) {
  return launch.column[name] >= 0 ? work.words[launch.column[name]] : 0;
}

// In global memory: said by a conversion, which stays with the pointer. An assumption beside it is lost where the
// address may be an absent field's, and each access then finds out what memory it goes to.
template <typename T>
SHARDOPS_HD T* array(uint64_t address) {
#if defined(__CUDA_ARCH__)
  return static_cast<T*>(__cvta_global_to_generic(address));
#else
  return reinterpret_cast<T*>(address);
#endif
}

SHARDOPS_HD StepScalars step_scalars(const AdamLaunch& launch, const AdamWork& work) {
  const uint32_t number = static_cast<uint32_t>(work.words[kWork] >> 32);
  StepScalars scalars = launch.device_scalars != nullptr ? launch.device_scalars[number] : launch.scalars[number];
  const float coef = launch.clip_coef != nullptr ? *launch.clip_coef : 1.0f;
  scalars.adam.grad_coef = launch.maximize ? -coef : coef;
  return scalars;
}

SHARDOPS_HD bool is_skipped(const AdamLaunch& launch) {
  return launch.found_inf != nullptr && *launch.found_inf != 0.0f;
}

// ---- the dither of a tensor's elements ----

struct ElementDither {
  Dither dither;
  uint32_t first;
  uint32_t stride;
  int64_t columns;

  SHARDOPS_MEMBER ElementDither(const AdamLaunch& launch, const AdamWork& work, uint32_t step)
      : dither(launch.dithered ? dither_of(static_cast<uint32_t>(field(launch, work, kSaltField)), step) : kNoDither),
        first(static_cast<uint32_t>(field(launch, work, kIndexField))),
        stride(static_cast<uint32_t>(field(launch, work, kIndexField) >> 32)),
        columns(static_cast<int64_t>(field(launch, work, kIndexColumnsField))) {}

  // offset: of an element in its tensor. Rows that are one range of indices need no division.
  template <bool kStrided>
  SHARDOPS_MEMBER uint32_t word(int64_t offset) const {
    uint32_t index = first + static_cast<uint32_t>(offset);
    if (kStrided) {
      const bool narrow = ((offset | columns) >> 32) == 0;
      const uint32_t row = narrow ? static_cast<uint32_t>(offset) / static_cast<uint32_t>(columns)
                                  : static_cast<uint32_t>(offset / columns);
      index += row * (stride - static_cast<uint32_t>(columns));
    }
    return dither_word(dither, index);
  }
};

// ---- a thread's elements ----

// kCount of them, one after another, from an offset in the tensor.
template <int kCount_>
struct Run {
  static constexpr int kCount = kCount_;
  static constexpr bool kChecksRange = false;  // memory is the limit here, not instructions
  int64_t start;

  template <typename T>
  SHARDOPS_MEMBER Elements<T, kCount> load(const T* values) const {
    return load_elements<kCount>(values + start);
  }
  template <typename T>
  SHARDOPS_MEMBER void store(T* values, const Elements<T, kCount>& stored) const {
    store_elements(values + start, stored);
  }
  SHARDOPS_MEMBER int64_t offset(int j) const { return start + j; }
};

template <typename T, typename Access>
SHARDOPS_HD void store_rounded(const Access& access, uint64_t address, const Vector<float, Access::kCount>& values) {
  Elements<T, Access::kCount> rounded;
  rounded.round(values);
  access.store(array<T>(address), rounded);
}

// Rounded to a dtype that the launch tells.
template <typename Access>
SHARDOPS_HD void store_as(const Access& access, Dtype dtype, uint64_t address,
                          const Vector<float, Access::kCount>& values) {
  switch (dtype) {
    case Dtype::kFloat32: return store_rounded<float>(access, address, values);
    case Dtype::kBFloat16: return store_rounded<Bf16>(access, address, values);
    case Dtype::kFloat16: return store_rounded<Fp16>(access, address, values);
  }
}

// Whether kCount elements of that dtype may be accessed at once.
template <int kCount>
SHARDOPS_HD uint32_t misaligned_as(Dtype dtype, uint64_t address) {
  return dtype == Dtype::kFloat32 ? misaligned<kCount>(array<float>(address))
                                  : misaligned<kCount>(array<uint16_t>(address));
}

// Everything of a step but the moments' storage. kMaster: kParam for every master that is fp32 in memory. kGeneral:
// what the launch asks for beyond the plainest update.
template <Master kMaster, typename Param, typename Grad, bool kGeneral>
struct AdamStep {
  using Remainder = std::conditional_t<kMaster == Master::kSplit24, int8_t, int16_t>;
  static constexpr bool kHasRemainder = kMaster == Master::kSplit || kMaster == Master::kSplit24;

  AdamScalars scalars;
  ElementDither dither;
  Param* param;  // or the fp32 master, wherever it is
  const Grad* grad;
  Remainder* remainder;
  float* max_exp_avg_sq;
  uint64_t copy;  // of the master, in the parameter's dtype
  uint64_t shadow;
  float grad_scale;
  bool unscale;
  bool coupled;
  bool strided;
  Dtype copy_dtype;
  Dtype shadow_dtype;

  SHARDOPS_MEMBER AdamStep(const AdamLaunch& launch, const AdamWork& work, const StepScalars& step)
      : scalars(step.adam),
        dither(launch, work, step.step),
        param(array<Param>(work.words[kParamField])),
        grad(array<const Grad>(work.words[kGradField])),
        remainder(kHasRemainder ? array<Remainder>(work.words[launch.column[kMasterField]]) : nullptr),
        max_exp_avg_sq(nullptr),
        copy(0),
        shadow(0),
        grad_scale(1.0f),
        unscale(false),
        coupled(false),
        strided(false),
        copy_dtype(launch.param),
        shadow_dtype(launch.shadow) {
    if (!kGeneral) {
      scalars.from_grad = 0;  // beta1 above 0.5
      return;
    }
    if (kMaster == Master::kParam && launch.copies_param) {
      copy = work.words[kParamField];
      param = array<Param>(field(launch, work, kMasterField));
    }
    max_exp_avg_sq = array<float>(field(launch, work, kMaxExpAvgSqField));
    shadow = field(launch, work, kShadowField);
    unscale = launch.grad_scale != nullptr;
    if (unscale) grad_scale = *launch.grad_scale;
    coupled = launch.coupled_decay;
    strided = launch.strided;
  }

  // 0 if kCount elements may be accessed at once wherever the count is a multiple of kCount.
  template <int kCount>
  SHARDOPS_MEMBER uint32_t misaligned_arrays() const {
    uint32_t bits = misaligned<kCount>(param) | misaligned<kCount>(grad);
    if (kHasRemainder) bits |= misaligned<kCount>(remainder);
    if (kGeneral) {
      bits |= misaligned<kCount>(max_exp_avg_sq);  // 0 where absent
      bits |= misaligned_as<kCount>(copy_dtype, copy) | misaligned_as<kCount>(shadow_dtype, shadow);
    }
    return bits;
  }

  SHARDOPS_MEMBER uint32_t word(int64_t offset) const {
    return kGeneral && strided ? dither.template word<true>(offset) : dither.template word<false>(offset);
  }

  // Updates exp_avg and exp_avg_sq in place, in fp32; all else in memory.
  template <typename Access>
  SHARDOPS_MEMBER void update(const Access& access, Vector<float, Access::kCount>& exp_avg,
                              Vector<float, Access::kCount>& exp_avg_sq) const {
    constexpr int kCount = Access::kCount;
    const Elements<Grad, kCount> grads = access.load(grad);
    const Elements<Param, kCount> params = access.load(param);
    Elements<Remainder, kCount> remainders;
    if constexpr (kHasRemainder) remainders = access.load(remainder);
    Elements<float, kCount> largest;
    const bool amsgrad = kGeneral && max_exp_avg_sq != nullptr;
    if (amsgrad) largest = access.load(max_exp_avg_sq);

    Vector<float, kCount> masters, second;
    UpdateRange range;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (kHasRemainder) {
        const uint32_t rest = remainders.signed_bits(j);
        masters[j] = bits_to_float(params.upper(j) + (kMaster == Master::kSplit24 ? rest << 8 : rest));
      } else {
        masters[j] = params.value(j);
      }
      float value = grads.value(j);
      if (kGeneral && unscale) value = SHARDOPS_DIV(value, grad_scale);
      apply_decay(scalars, kGeneral && coupled, value, masters[j]);
      update_moments(scalars, value, exp_avg[j], exp_avg_sq[j]);
      second[j] = exp_avg_sq[j];
      if (amsgrad) second[j] = largest.values[j] = raised_second(exp_avg_sq[j], largest.values[j]);
      range.add(exp_avg[j], second[j]);
    }
    if (Access::kChecksRange && usually(range.holds(scalars))) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        masters[j] = updated_master_in_range(scalars, masters[j], exp_avg[j], second[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        masters[j] = updated_master(scalars, masters[j], exp_avg[j], SHARDOPS_SQRT(second[j]));
      }
    }
    if (amsgrad) access.store(max_exp_avg_sq, largest);
    if (kGeneral && shadow != 0) store_as(access, shadow_dtype, shadow, masters);
    if (kGeneral && kMaster == Master::kParam && copy != 0) store_as(access, copy_dtype, copy, masters);
    store_masters(access, masters);
  }

 private:
  template <typename Access>
  SHARDOPS_MEMBER void store_masters(const Access& access, const Vector<float, Access::kCount>& masters) const {
    constexpr int kCount = Access::kCount;
    Elements<Param, kCount> params;
    if constexpr (kMaster == Master::kParam || kMaster == Master::kNearest) {
      params.round(masters);
    } else {
      Vector<uint32_t, kCount> bits = cut_masters(access, masters);
      if constexpr (kHasRemainder) {
        Elements<Remainder, kCount> remainders;
        remainders.template pack<kMaster == Master::kSplit24 ? 1 : 0>(bits);  // what is above has nothing in these bits
        access.store(remainder, remainders);
        for (int j = 0; j < kCount; ++j) bits[j] += 0x8000u;
      }
      params.template pack<2>(bits);
    }
    access.store(param, params);
  }

  // The patterns that are stored in parts: common/split_fp32.h with the parts still together.
  template <typename Access>
  SHARDOPS_MEMBER Vector<uint32_t, Access::kCount> cut_masters(const Access& access,
                                                               const Vector<float, Access::kCount>& masters) const {
    Vector<uint32_t, Access::kCount> bits;
    if constexpr (kMaster == Master::kSplit) {
      for (int j = 0; j < Access::kCount; ++j)
        bits[j] = masters[j] != masters[j] ? 0x7FC00000u : float_to_bits(masters[j]);
      return bits;
    }
    constexpr int kShift = kMaster == Master::kSplit24 ? 24 : 16;
    float magnitude = 0.0f;
    for (int j = 0; j < Access::kCount; ++j) magnitude = larger_magnitude(magnitude, masters[j]);
    if (Access::kChecksRange && usually(float_to_bits(magnitude) <= kLargestPlain)) {
      for (int j = 0; j < Access::kCount; ++j)
        bits[j] = raised_bits<true>(masters[j], word(access.offset(j)) >> kShift);
    } else {
      for (int j = 0; j < Access::kCount; ++j)
        bits[j] = raised_bits<false>(masters[j], word(access.offset(j)) >> kShift);
    }
    return bits;
  }
};

}  // namespace shardops
