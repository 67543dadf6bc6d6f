// Shows that what the kernels hand to quotient_in_range() and root_in_range() lies in the ranges that those promise to
// round: UpdateRange of csrc/common/adam_math.h, and the quotients of block_quant.h. Run by test_cuda_arithmetic.py.
#include <atomic>

#include "common/adam_math.h"
#include "common/block_quant.h"
#include "range_proof.h"

namespace shardops {
namespace {

// ---- the ranges of what the kernels divide and take the root of ----

bool in_second_range(float value) { return same_bits(value, 0.0f) || (value >= kSmallestInRange && value <= 0x1p40f); }
bool in_first_range(float value) {
  return value == 0.0f || (std::fabs(value) >= kSmallestInRange && std::fabs(value) <= 0x1p20f);
}
bool in_eps_range(float value) { return value >= kSmallestInRange && value <= 0x1p20f; }

// A value that is often at an edge, and often not allowed.
float any_value(Random& random) {
  static const float edges[] = {0.0f,     -0.0f, kSmallestInRange, 0x1p20f, 0x1p40f, 0x1p-126f, 0x1p-149f,
                                INFINITY, NAN,   0x1p-50f,         1.0f,    0x1p100f};
  const uint32_t kind = random() % 8;
  if (kind == 0) return bits_to_float(random());
  float value = kind < 3 ? edges[random() % 12] : random.between(kSmallestInRange, kind < 6 ? 0x1p20f : 0x1p40f);
  if (kind == 1) value = stepped(value, random.step(2));
  return random() % 16 == 0 ? -value : value;
}

// UpdateRange::holds() is true for exactly what it says, and then everything is in the sequences' ranges: roots from 0
// to 2^20, so by the monotony of rounding denominators from 2^-100 to 2^21, so quotients that are zeros or from 2^-121
// to 2^120.
Finding update_ranges() {
  std::atomic<uint64_t> held{0};
  Finding total = over(1u << 22, [&held](uint32_t start, uint32_t end) {
    Finding finding;
    Random random{start * uint64_t{7}};
    AdamScalars scalars{};
    for (uint32_t i = start; i < end; i += stride) {
      constexpr int kMost = 8;
      float first[kMost], second[kMost];
      const int count = 1 + static_cast<int>(random() % kMost);
      const bool tame = random() % 2 == 0;
      scalars.eps = tame ? random.between(kSmallestInRange, 0x1p20f) : any_value(random);
      bool expected = in_eps_range(scalars.eps);
      UpdateRange range;
      for (int j = 0; j < count; ++j) {
        do first[j] = any_value(random);
        while (tame && !in_first_range(first[j]));
        do second[j] = any_value(random);
        while (tame && !in_second_range(second[j]));
        range.add(first[j], second[j]);
        expected = expected && in_first_range(first[j]) && in_second_range(second[j]);
      }
      const bool holds = range.holds(scalars);
      finding.check(holds == expected, "holds()", first[0], second[0], scalars.eps, holds);
      if (!holds) continue;
      ++held;
      for (int j = 0; j < count; ++j) {
        const float inverse = inverse_root(std::fmax(second[j], kSmallestInRange));
        const float root = refined_root(second[j], inverse), denominator = root + scalars.eps;
        finding.check(same_bits(root, exact_root(second[j])) && root <= 0x1p20f && denominator >= kSmallestInRange &&
                          denominator <= 0x1p21f,
                      "the root or denominator", second[j], scalars.eps, inverse, root);
        const float seed = stepped(1.0f / denominator, is_delicate(denominator) ? 0 : random.step(quotient_steps));
        const float quotient = refined_quotient(first[j], denominator, seed), size = std::fabs(quotient);
        finding.check(
            same_bits(quotient, first[j] / denominator) &&
                (size == 0.0f || (is_allowed(first[j], denominator) && size >= 0x1p-121f && size <= 0x1p120f)),
            "the quotient", first[j], denominator, seed, quotient);
      }
    }
    return finding;
  });
  total.check(held > (1u << 20) / stride, "a trial, which seldom holds,", static_cast<float>(held), 0.0f, 0.0f, 0.0f);
  return total;
}

// Every scale of a block's exp_avg, and every step of its grid.
Finding block_quotients() {
  Finding finding;
  uint64_t scales = 0;
  for (uint32_t largest = 0; largest <= 0xFFFFu; ++largest) {
    for (const uint32_t bits : {largest << 16, (largest << 16) | 1u, (largest << 16) | 0xFFFFu}) {
      const FirstScale scale = first_scale(bits);
      const float value = bits_to_float(scale.bits);
      if (!(value > 0.0f)) {
        finding.check(scale.factor == 0.0f, "the factor", value, 0.0f, 0.0f, scale.factor);
        continue;
      }
      ++scales;
      finding.check(is_allowed(127.0f, value) && same_bits(scale.factor, 127.0f / value), "the factor", 127.0f, value,
                    0.0f, scale.factor);
      finding.check(!is_delicate(value), "a delicate scale", 127.0f, value, 0.0f, 0.0f);
    }
  }
  finding.check(scales > 3 * 0x7000, "the number of scales", static_cast<float>(scales), 0.0f, 0.0f, 0.0f);
  // Each distance between the ends of a grid gives a step; all of them come up at these distances.
  uint32_t steps = 0, last = 0;
  for (uint64_t distance = 0; distance <= kCanonicalNan - kSmallestSecond;
       distance += distance < 0x1000000 ? 0x1000 : 0x10000) {
    const auto highest = static_cast<uint32_t>(kSmallestSecond + distance);
    const SecondGrid grid = second_grid(highest, 0u);
    finding.check(grid.highest == highest && grid.step >= last && grid.step <= last + (last == 0 ? 9u << 13 : 1u << 13),
                  "the step of a grid", static_cast<float>(highest), 0.0f, 0.0f, static_cast<float>(grid.step));
    if (grid.step == last) continue;
    last = grid.step;
    ++steps;
    const float step = static_cast<float>(grid.step);
    finding.check(
        grid.step < 1u << 24 && is_allowed(0x1p48f, step) && grid.inverse == static_cast<uint32_t>(0x1p48f / step),
        "the inverse of a step", 0x1p48f, step, 0.0f, static_cast<float>(grid.inverse));
    finding.check(!is_delicate(step), "a delicate step", 0x1p48f, step, 0.0f, 0.0f);
  }
  const SecondGrid empty = second_grid(0u, 0xFFFFFFFFu);
  finding.check(empty.step == 9u << 13 && steps == (last >> 13) - 8, "the number of steps", static_cast<float>(steps),
                0.0f, 0.0f, static_cast<float>(empty.step));
  return finding;
}

}  // namespace
}  // namespace shardops

int main(int count, char** words) {
  using namespace shardops;
  parse(count, words);
  report("update_ranges", update_ranges());
  report("block_quotients", block_quotients());
}
