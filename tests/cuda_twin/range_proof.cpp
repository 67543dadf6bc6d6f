// Finds every case in which refined_quotient() or refined_root() of csrc/common/platform.h, and so a GPU's
// quotient_in_range() or root_in_range(), would round wrongly for some seed near the exact one, and proves that there
// are no others. test_cuda_arithmetic.py runs it, says how many cases there are, and why a GPU meets none of them.
#include <atomic>

#include "range_proof.h"

namespace shardops {
namespace {

// Faults are chosen outside of the loops.
enum class Fault { kNone, kNoInverse, kNoRemainder, kSign, kRootUnrefined, kRootHalf };

template <Fault kFault>
SHARDOPS_HD float quotient(float a, float b, float seed) {
  if constexpr (kFault == Fault::kNone) return refined_quotient(a, b, seed);
  const float inverse = kFault == Fault::kNoInverse ? seed : refined_inverse(b, seed);
  const float rough = a * inverse;
  if (kFault == Fault::kNoRemainder) return rough;
  if (kFault == Fault::kSign) return SHARDOPS_FMA(inverse, SHARDOPS_FMA(-b, rough, a), rough);  // of -0: 0
  return SHARDOPS_FMA(-inverse, SHARDOPS_FMA(b, rough, -a), rough);
}

template <Fault kFault>
SHARDOPS_HD float root(float a, float seed) {
  if (kFault == Fault::kRootUnrefined) return a * seed;
  if (kFault == Fault::kRootHalf) return SHARDOPS_FMA(SHARDOPS_FMA(-(a * seed), a * seed, a), seed, a * seed);
  return refined_root(a, seed);
}

// ---- roots ----

template <Fault kFault>
void check_root(Finding& finding, float a) {
  const float expected = exact_root(a);
  const float inverse = inverse_root(a);
  for (int step = -root_steps; step <= root_steps; ++step) {
    const float seed = stepped(inverse, step);
    const float found = root<kFault>(a, seed);
    finding.check(same_bits(found, expected), "the root", a, 0.0f, seed, found, step);
  }
}

// Two binades, after which everything repeats, times powers of two: all their floats, every seed. Sixteen at a time, so
// that the compiler can use vectors.
template <Fault kFault>
Finding roots() {
  constexpr int kAtOnce = 16;
  const uint32_t from = float_to_bits(1.0f);
  return over((1u << 24) / kAtOnce, [&](uint32_t first, uint32_t last) {
    Finding finding;
    for (uint32_t i = first; i < last; i += stride) {
      float a[kAtOnce], expected[kAtOnce], inverse[kAtOnce];
      for (int j = 0; j < kAtOnce; ++j) {
        a[j] = bits_to_float(from + i * kAtOnce + j);
        expected[j] = exact_root(a[j]);
        inverse[j] = inverse_root(a[j]);
      }
      uint32_t differing = 0;
      for (int step = -root_steps; step <= root_steps; ++step) {
        for (int j = 0; j < kAtOnce; ++j) {
          const float found = root<kFault>(a[j], stepped(inverse[j], step));
          differing |= float_to_bits(found) ^ float_to_bits(expected[j]);
        }
      }
      finding.cases += differing == 0 ? uint64_t{kAtOnce} * (2 * root_steps + 1) : 0;
      for (int j = 0; j < kAtOnce && differing != 0; ++j) check_root<kFault>(finding, a[j]);
    }
    return finding;
  });
}

// All else that is allowed is such a float times a power of four, and the sequence does not notice: a result differs by
// a power of two, to the bit, also where remainders are subnormal. The ends of the range, what is between at random,
// and zeros, which give themselves.
template <Fault kFault>
Finding other_roots() {
  return over(1u << 22, [](uint32_t first, uint32_t last) {
    Finding finding;
    Random random{first};
    for (uint32_t i = first; i < last; i += stride) {
      const auto near = static_cast<int>(i % (1u << 16));
      for (const float a : {stepped(kSmallestInRange, near), stepped(0x1p100f, -near), stepped(kSmallestInRange, i),
                            random.between(kSmallestInRange, 0x1p100f)}) {
        const int half = (static_cast<int>(float_to_bits(a) >> 23) - 127) >> 1;  // a: times 4^half in [1, 4)
        const float scaled = std::ldexp(a, -2 * half), inverse = inverse_root(a);
        for (int step = -root_steps; step <= root_steps; ++step) {
          const float seed = stepped(inverse, step), found = root<kFault>(a, seed);
          const float expected = std::ldexp(root<kFault>(scaled, std::ldexp(seed, half)), half);
          finding.check(same_bits(found, expected) && (step != 0 || same_bits(found, exact_root(a))), "the root", a,
                        0.0f, seed, found, step);
        }
      }
    }
    for (const float zero : {0.0f, -0.0f}) {
      for (int step = -root_steps; step <= root_steps; ++step) {
        const float seed = stepped(0x1p50f, step), found = root<kFault>(zero, seed);
        finding.check(same_bits(found, zero), "the root", zero, 0.0f, seed, found, step);
      }
    }
    return finding;
  });
}

// ---- quotients ----

template <Fault kFault>
void check_quotient(Finding& finding, float a, float b, int steps) {
  const float expected = a / b, inverse = 1.0f / b;
  for (int step = -steps; step <= steps; ++step) {
    const float seed = stepped(inverse, step);
    const float found = quotient<kFault>(a, b, seed);
    finding.check(same_bits(found, expected), "the quotient", a, b, seed, found, step);
  }
}

// How far a quotient is from the middle between two floats: odd / (2 B) of their distance at least, where B is b's
// mantissa as an integer of 24 bits. Those of |odd| <= kNear are found by solving for a, and tried.
constexpr int kNear = 7;

// Every a for one b whose quotient is that near to a middle. A * 2^(k + 1) = B * (2 M + 1) + odd, with k = 23 where
// A >= B and 24 where A < B; a power of two in B divides odd, too.
template <Fault kFault>
void check_near_middles(Finding& finding, uint32_t B, uint64_t& malformed) {
  const int twos = __builtin_ctz(B);
  if ((1u << twos) > kNear) return;
  const uint32_t modulus = B >> twos;  // odd
  uint64_t power = 1 % modulus;        // 2^-(k + 1 - twos)
  int halved = 0;
  for (int k = 23; k <= 24; ++k) {
    for (; halved < k + 1 - twos; ++halved) power = (power & 1 ? power + modulus : power) >> 1;
    for (int64_t odd = -kNear; odd <= kNear; ++odd) {
      if ((odd & ((int64_t{1} << twos) - 1)) != 0 || ((odd >> twos) & 1) == 0) continue;
      const int64_t n = (odd >> twos) % static_cast<int64_t>(modulus);
      uint64_t A = (n < 0 ? n + modulus : n) * power % modulus;
      const uint32_t low = k == 23 ? B : 1u << 23, high = k == 23 ? 1u << 24 : B;
      if (A < low) A += (low - A + modulus - 1) / modulus * modulus;
      for (; A < high; A += modulus) {
        const int64_t product = static_cast<int64_t>(A << (k + 1)) - odd;
        malformed += product % B != 0 || (product / B) % 2 == 0;
        check_quotient<kFault>(finding, static_cast<float>(A), static_cast<float>(B), quotient_steps);
      }
    }
  }
}

// The error of an inverse's mantissa Y: |Y B / 2^47 - 1|, or with 2^46 for B = 2^23; exact in float64.
double inverse_error(float b, float inverse) {
  return std::fabs(static_cast<double>(b) * static_cast<double>(inverse) - 1.0);
}

// All b: the quotients that are nearest to a middle, and the largest error of the refined inverse, from which follows
// how near to a middle a quotient has to be before the sequence can round it wrongly.
template <Fault kFault>
Finding quotients() {
  std::vector<double> worst(threads, 0.0);
  std::vector<uint64_t> not_nearest(threads, 0), malformed(threads, 0);
  std::atomic<int> next{0};
  Finding total = over(1u << 23, [&](uint32_t first, uint32_t last) {
    const int self = next++;
    Finding finding;
    for (uint32_t i = first; i < last; i += stride) {
      const uint32_t B = (1u << 23) + i;
      const float b = static_cast<float>(B), nearest = 1.0f / b;
      for (int step = -quotient_steps; step <= quotient_steps; ++step) {
        const float seed = stepped(nearest, step);
        const float inverse = kFault == Fault::kNoInverse ? seed : refined_inverse(b, seed);
        worst[self] = std::fmax(worst[self], inverse_error(b, inverse));
        not_nearest[self] += inverse != nearest;
      }
      check_near_middles<kFault>(finding, B, malformed[self]);
    }
    return finding;
  });
  double error = 0.0;
  uint64_t others = 0, ill = 0;
  for (int i = 0; i < threads; ++i) {
    error = std::fmax(error, worst[i]);
    others += not_nearest[i];
    ill += malformed[i];
  }
  // In units of the quotient's last place, with 2^23 <= mantissa < 2^24: a * inverse is off by less than 2^24 * error,
  // and by half a unit for its rounding; the remainder is rounded once, by 2^-24 of itself at most, and multiplied by
  // the inverse, which is off by `error` of itself. What is then rounded is off by less than `off`; a middle is
  // odd / (2 B) > odd / 2^25 away.
  const double rough = 0.5 + 0x1p24 * error;
  const double off = rough * (error + 0x1p-24 + error * 0x1p-24);
  const double reach = off * 0x1p25;
  std::printf("inverses: error at most %.9f * 2^-24, %llu not the nearest; middles nearer than %.3f / 2^25 matter\n",
              error * 0x1p24, static_cast<unsigned long long>(others), reach);
  total.check(reach < kNear + 1, "the bound", static_cast<float>(reach), 0.0f, 0.0f, static_cast<float>(off));
  total.check(ill == 0, "the equation", 0.0f, 0.0f, 0.0f, static_cast<float>(ill));
  return total;
}

// All 2^23 mantissas of a, some below and some above the divisor's, for divisors whose refined inverse is not the
// nearest float for some seed, and some more: what the argument about middles leaves out.
template <Fault kFault>
Finding whole_rows() {
  std::vector<uint32_t> divisors;
  for (uint32_t i = 0; i < 1u << 23; ++i) {
    const float b = static_cast<float>((1u << 23) + i), nearest = 1.0f / b;
    bool all_nearest = true;
    for (int step = -quotient_steps; step <= quotient_steps; ++step) {
      all_nearest = all_nearest && refined_inverse(b, stepped(nearest, step)) == nearest;
    }
    if (!all_nearest) divisors.push_back((1u << 23) + i);
  }
  std::printf("divisors with an inverse that is not the nearest: %zu\n", divisors.size());
  Random random{1};
  while (divisors.size() > rows) {
    divisors[random() % divisors.size()] = divisors.back();
    divisors.pop_back();
  }
  while (divisors.size() < rows) divisors.push_back((1u << 23) + random() % (1u << 23));
  return over(static_cast<uint32_t>(divisors.size()), [&](uint32_t first, uint32_t last) {
    Finding finding;
    for (uint32_t i = first; i < last; ++i) {
      const float b = static_cast<float>(divisors[i]);
      for (int step = -quotient_steps; step <= quotient_steps; ++step) {
        const float seed = stepped(1.0f / b, step);
        for (uint32_t a_bits = float_to_bits(0x1p23f); a_bits < float_to_bits(0x1p24f); a_bits += 32) {
          uint32_t differing = 0;
          for (uint32_t j = 0; j < 32; ++j) {
            const float a = bits_to_float(a_bits + j);
            differing |= float_to_bits(quotient<kFault>(a, b, seed)) ^ float_to_bits(a / b);
          }
          finding.cases += differing == 0 ? 32 : 0;
          for (uint32_t j = 0; j < 32 && differing != 0; ++j) {
            const float a = bits_to_float(a_bits + j), found = quotient<kFault>(a, b, seed);
            finding.check(same_bits(found, a / b), "the quotient", a, b, seed, found, step);
          }
        }
      }
    }
    return finding;
  });
}

// How far seeds are tried where no quotient may be wrong.
int seeds(float b) { return is_delicate(b) ? 0 : quotient_steps; }

// The whole range at random, its edges, and both zeros.
template <Fault kFault>
Finding other_quotients() {
  return over(1u << 22, [](uint32_t first, uint32_t last) {
    Finding finding;
    Random random{~uint64_t{first}};
    for (uint32_t i = first; i < last; i += stride) {
      const int steps = static_cast<int>(random() % 4096);
      const float any = random.between(kSmallestInRange, 0x1p125f), wide = random.between(kSmallestInRange, 0x1p127f);
      const float low_b = stepped(kSmallestInRange, steps), high_b = stepped(0x1p125f, -steps);
      // Quotients at the ends: a from b, for what is not allowed is left out.
      const float smallest = stepped(any * 0x1p-126f, random.step(4)), largest = any * 0x1p127f;
      const float pairs[][2] = {{wide, any},     {wide, low_b},
                                {wide, high_b},  {stepped(kSmallestInRange, steps), any},
                                {smallest, any}, {stepped(std::isfinite(largest) ? largest : 0x1p127f, -steps), any}};
      for (const auto& [a, b] : pairs) {
        if (!is_allowed(a, b)) continue;
        for (const float dividend : {a, -a}) check_quotient<kFault>(finding, dividend, b, seeds(b));
      }
      for (const float b : {any, low_b, high_b}) {
        for (const float zero : {0.0f, -0.0f}) check_quotient<kFault>(finding, zero, b, seeds(b));
      }
    }
    return finding;
  });
}

// ---- running ----

template <Fault kFault>
void run() {
  const auto has = [](const char* name) { return part == "all" || part == name; };
  if (has("roots")) report("roots", roots<kFault>());
  if (has("other_roots")) report("other_roots", other_roots<kFault>());
  if (has("quotients")) report("quotients", quotients<kFault>());
  if (has("other_quotients")) report("other_quotients", other_quotients<kFault>());
  if (rows > 0) report("whole_rows", whole_rows<kFault>());
}

}  // namespace
}  // namespace shardops

int main(int count, char** words) {
  using namespace shardops;
  parse(count, words);
  if (fault == "none") run<Fault::kNone>();
  if (fault == "no_inverse") run<Fault::kNoInverse>();
  if (fault == "no_remainder") run<Fault::kNoRemainder>();
  if (fault == "sign") run<Fault::kSign>();
  if (fault == "root_unrefined") run<Fault::kRootUnrefined>();
  if (fault == "root_half") run<Fault::kRootHalf>();
}
