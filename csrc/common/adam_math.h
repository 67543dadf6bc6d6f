// Adam's formula for C++ and CUDA: the scalars of one tensor's step and the update of one element.
// The specification is shardops/backends/reference/sharded_adam.py; the order of operations here is the same.
#pragma once

#include "platform.h"

namespace shardops {

// The options of one call, as the op received them.
struct AdamOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled_weight_decay;
  bool maximize;
};

// What the loop over elements needs, computed once a tensor in float64 and rounded once.
struct AdamScalars {
  float exp_avg_weight;  // weight of (grad - exp_avg): 1 - beta1, or -beta1 when the sum starts from grad
  uint32_t from_grad;    // 0 or 1: torch's lerp starts from its nearer end. As wide as a float, for vector selects
  float beta2;
  float grad_weight;    // 1 - beta2
  float step_size;      // lr / (1 - beta1^t) * sqrt(1 - beta2^t)
  float eps;            // eps * sqrt(1 - beta2^t)
  float decay;          // 1 - lr * weight_decay, or 1
  float coupled_decay;  // weight_decay, or 0: not applied then
  float grad_coef;      // clip coefficient, negative when maximising
};

// base^exponent for exponent >= 1, by squaring: a stated sequence of IEEE multiplications, equal on every backend.
SHARDOPS_HD double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = result * base;
    base = base * base;
  }
  return result;
}

// step: the number of this update, starting at 1. clip_coef: 1 when gradients are not clipped.
SHARDOPS_HD AdamScalars adam_scalars(const AdamOptions& options, int64_t step, float clip_coef) {
  const double bias_correction1 = 1.0 - power(options.beta1, step);
  const double bias_correction2 = 1.0 - power(options.beta2, step);
  const double bias_correction2_sqrt = sqrt(bias_correction2);
  const double weight = 1.0 - options.beta1;
  AdamScalars scalars;
  scalars.from_grad = !(weight < 0.5);
  scalars.exp_avg_weight = static_cast<float>(scalars.from_grad ? -options.beta1 : weight);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.grad_weight = static_cast<float>(1.0 - options.beta2);
  // lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps), multiplied through by sqrt(bc2): one division an element, not two.
  scalars.step_size = static_cast<float>(options.lr / bias_correction1 * bias_correction2_sqrt);
  scalars.eps = static_cast<float>(options.eps * bias_correction2_sqrt);
  scalars.decay = options.decoupled_weight_decay ? static_cast<float>(1.0 - options.lr * options.weight_decay) : 1.0f;
  scalars.coupled_decay = options.decoupled_weight_decay ? 0.0f : static_cast<float>(options.weight_decay);
  scalars.grad_coef = options.maximize ? -clip_coef : clip_coef;
  return scalars;
}

// In parts, for a loop that does other work between them; adam_update() puts them together. Float: float, or a register
// of them. grad: times grad_coef, with coupled decay's penalty.
template <typename Float>
SHARDOPS_HD void update_moments(const AdamScalars& scalars, Float grad, Float& exp_avg, Float& exp_avg_sq) {
  const Float base = scalars.from_grad ? grad : exp_avg;
  exp_avg = SHARDOPS_ADD(base, SHARDOPS_MUL(scalars.exp_avg_weight, SHARDOPS_SUB(grad, exp_avg)));
  exp_avg_sq = SHARDOPS_ADD(SHARDOPS_MUL(scalars.beta2, exp_avg_sq),
                            SHARDOPS_MUL(SHARDOPS_MUL(scalars.grad_weight, grad), grad));
}

// decayed: the master after decoupled decay. root: the square root of exp_avg_sq or max_exp_avg_sq.
template <typename Float>
SHARDOPS_HD Float updated_master(const AdamScalars& scalars, Float decayed, Float exp_avg, Float root) {
  const Float denominator = SHARDOPS_ADD(root, scalars.eps);
  return SHARDOPS_SUB(decayed, SHARDOPS_MUL(scalars.step_size, SHARDOPS_DIV(exp_avg, denominator)));
}

// Clips and maximises a gradient that is divided by grad_scale, and applies the decay. coupled: an L2 penalty (Adam) in
// place of decoupled decay (AdamW).
SHARDOPS_HD void apply_decay(const AdamScalars& scalars, bool coupled, float& grad, float& master) {
  grad = SHARDOPS_MUL(grad, scalars.grad_coef);
  if (coupled) grad = SHARDOPS_ADD(grad, SHARDOPS_MUL(scalars.coupled_decay, master));
  master = SHARDOPS_MUL(master, scalars.decay);
}

// What the root is taken of: the larger one, NaN if either is. Not ||: a branch would keep a loop from being
// vectorised.
SHARDOPS_HD float raised_second(float exp_avg_sq, float max_exp_avg_sq) {
  const bool is_new = (exp_avg_sq > max_exp_avg_sq) | (exp_avg_sq != exp_avg_sq);
  return is_new ? exp_avg_sq : max_exp_avg_sq;
}

// One element: grad is fp32 and already divided by grad_scale; master, exp_avg and exp_avg_sq are updated in place.
// amsgrad: max_exp_avg_sq takes exp_avg_sq's place.
SHARDOPS_HD void adam_update(const AdamScalars& scalars, bool coupled, bool amsgrad, float grad, float& master,
                             float& exp_avg, float& exp_avg_sq, float& max_exp_avg_sq) {
  float value = master;
  apply_decay(scalars, coupled, grad, value);
  update_moments(scalars, grad, exp_avg, exp_avg_sq);
  float second = exp_avg_sq;
  if (amsgrad) second = max_exp_avg_sq = raised_second(exp_avg_sq, max_exp_avg_sq);
  master = updated_master(scalars, value, exp_avg, SHARDOPS_SQRT(second));
}

// Whether updated_master_in_range() may be used for some elements.
struct UpdateRange {
  uint32_t smallest_first = 0xFFFFFFFFu;  // patterns less one, without the sign: zeros are above all others
  uint32_t smallest_second = 0xFFFFFFFFu;
  uint32_t largest_second = 0u;
  float largest_first = 0.0f;

  SHARDOPS_MEMBER void add(float exp_avg, float second) {
    const uint32_t first_bits = (float_to_bits(exp_avg) << 1) - 1u, second_bits = float_to_bits(second);
    smallest_first = first_bits < smallest_first ? first_bits : smallest_first;
    smallest_second = second_bits - 1u < smallest_second ? second_bits - 1u : smallest_second;
    largest_second = second_bits > largest_second ? second_bits : largest_second;
    largest_first = larger_magnitude(largest_first, exp_avg);
  }

  // Then 2^-100 <= the denominator <= 2^20 + eps, and the quotient is a normal number.
  SHARDOPS_MEMBER bool holds(const AdamScalars& scalars) const {
    constexpr uint32_t kSmallest = 0x0D800000u;  // 2^-100
    return smallest_first >= (kSmallest << 1) - 1u && smallest_second >= kSmallest - 1u &&
           largest_second <= 0x53800000u /* 2^40 */ && largest_first <= 1048576.0f /* 2^20 */ &&
           scalars.eps >= 7.888609052210118e-31f /* 2^-100 */ && scalars.eps <= 1048576.0f;
  }
};

// updated_master() of the root of `second`, with the same bits.
SHARDOPS_HD float updated_master_in_range(const AdamScalars& scalars, float decayed, float exp_avg, float second) {
  const float denominator = SHARDOPS_ADD(root_in_range(second), scalars.eps);
  return SHARDOPS_SUB(decayed, SHARDOPS_MUL(scalars.step_size, quotient_in_range(exp_avg, denominator)));
}

// For loops that are made for their options.
template <bool kCoupled, bool kAmsgrad>
SHARDOPS_HD void adam_update(const AdamScalars& scalars, float grad, float& master, float& exp_avg, float& exp_avg_sq,
                             float& max_exp_avg_sq) {
  adam_update(scalars, kCoupled, kAmsgrad, grad, master, exp_avg, exp_avg_sq, max_exp_avg_sq);
}

}  // namespace shardops
