// Proves that refined_quotient() and refined_root() of csrc/common/platform.h, and so a GPU's quotient_in_range() and
// root_in_range(), round correctly whatever the approximate instructions return within a few units in the last place.
// Run by test_cuda_arithmetic.py, which has the argument; exit status 0: no counterexample, 1: one is printed.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/adam_math.h"
#include "common/block_quant.h"

namespace shardops {
namespace {

// ---- how a run is made ----

int threads = 1;
uint32_t stride = 1;         // every how many mantissas are looked at: 1 is the proof
int root_steps = 4;          // seeds, in floats on either side of the correctly rounded one
int quotient_steps = 2;      // likewise
std::string fault = "none";  // what is done wrong, to show that it is found

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

// The float that is some steps from a positive one.
SHARDOPS_HD float stepped(float value, int steps) { return bits_to_float(float_to_bits(value) + steps); }

// Of float64's 53 bits, 2 * 24 + 2 suffice for a root that is rounded twice to be rounded correctly.
SHARDOPS_HD float exact_root(float a) { return static_cast<float>(std::sqrt(static_cast<double>(a))); }

bool same_bits(float a, float b) { return float_to_bits(a) == float_to_bits(b); }

struct Finding {
  uint64_t cases = 0;
  uint64_t wrong = 0;
  std::string first;

  void check(bool right, const char* what, float a, float b, float seed, float found) {
    ++cases;
    if (right || wrong++ > 0) return;
    char text[200];
    std::snprintf(text, sizeof(text), "%s of %a, %a with %a gives %a", what, a, b, seed, found);
    first = text;
  }
  void add(const Finding& other) {
    if (wrong == 0) first = other.first;
    cases += other.cases;
    wrong += other.wrong;
  }
};

// Finding of all of [0, count), shared by the threads in pieces.
Finding over(uint32_t count, const std::function<Finding(uint32_t first, uint32_t last)>& piece) {
  std::vector<Finding> findings(threads);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      const auto first = static_cast<uint32_t>(uint64_t{count} * i / threads);
      findings[i] = piece(first, static_cast<uint32_t>(uint64_t{count} * (i + 1) / threads));
    });
  }
  for (std::thread& each : running) each.join();
  Finding total;
  for (const Finding& each : findings) total.add(each);
  return total;
}

struct Random {
  uint64_t state;
  uint32_t operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
  }
  // All exponents from low's to high's alike.
  float between(float low, float high) {
    const uint32_t first = float_to_bits(low);
    return bits_to_float(first + (*this)() % (float_to_bits(high) - first + 1));
  }
  int step(int most) { return static_cast<int>((*this)() % (2 * most + 1)) - most; }
};

// ---- roots ----

template <Fault kFault>
void check_root(Finding& finding, float a) {
  const float expected = exact_root(a);
  const float inverse = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a)));
  for (int step = -root_steps; step <= root_steps; ++step) {
    const float seed = stepped(inverse, step);
    const float found = root<kFault>(a, seed);
    finding.check(same_bits(found, expected), "the root", a, 0.0f, seed, found);
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
        inverse[j] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a[j])));
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

// Zeros, both ends of the range, and what is between at random.
template <Fault kFault>
Finding other_roots() {
  return over(1u << 22, [](uint32_t first, uint32_t last) {
    Finding finding;
    Random random{first};
    for (uint32_t i = first; i < last; i += stride) {
      check_root<kFault>(finding, stepped(kSmallestInRange, static_cast<int>(i)));
      check_root<kFault>(finding, stepped(0x1p100f, -static_cast<int>(i)));
      check_root<kFault>(finding, random.between(kSmallestInRange, 0x1p100f));
    }
    for (const float zero : {0.0f, -0.0f}) {
      for (int step = -root_steps; step <= root_steps; ++step) {
        const float seed = stepped(0x1p50f, step), found = root<kFault>(zero, seed);
        finding.check(same_bits(found, zero), "the root", zero, 0.0f, seed, found);
      }
    }
    return finding;
  });
}

// ---- quotients ----

template <Fault kFault>
void check_quotient(Finding& finding, float a, float b) {
  const float expected = a / b, inverse = 1.0f / b;
  for (int step = -quotient_steps; step <= quotient_steps; ++step) {
    const float seed = stepped(inverse, step);
    const float found = quotient<kFault>(a, b, seed);
    finding.check(same_bits(found, expected), "the quotient", a, b, seed, found);
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
        check_quotient<kFault>(finding, static_cast<float>(A), static_cast<float>(B));
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

// All 2^24 mantissas and binades of a, for divisors whose refined inverse is not the nearest float for some seed, and
// some more: what the argument about middles leaves out.
template <Fault kFault>
Finding whole_rows(uint32_t rows) {
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
        for (uint32_t a_bits = float_to_bits(0x1p22f); a_bits < float_to_bits(0x1p24f); a_bits += 32) {
          uint32_t differing = 0;
          for (uint32_t j = 0; j < 32; ++j) {
            const float a = bits_to_float(a_bits + j);
            differing |= float_to_bits(quotient<kFault>(a, b, seed)) ^ float_to_bits(a / b);
          }
          finding.cases += differing == 0 ? 32 : 0;
          for (uint32_t j = 0; j < 32 && differing != 0; ++j)
            check_quotient<kFault>(finding, bits_to_float(a_bits + j), b);
        }
      }
    }
    return finding;
  });
}

bool is_allowed(float a, float b) {
  const double magnitude = std::fabs(a), divisor = b;  // times a power of two, exactly
  return b >= kSmallestInRange && b <= 0x1p125f && std::isfinite(a) && magnitude >= kSmallestInRange &&
         magnitude >= divisor * 0x1p-126 && magnitude <= divisor * 0x1p127;
}

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
        check_quotient<kFault>(finding, a, b);
        check_quotient<kFault>(finding, -a, b);
      }
      for (const float b : {any, low_b, high_b}) {
        check_quotient<kFault>(finding, 0.0f, b);
        check_quotient<kFault>(finding, -0.0f, b);
      }
    }
    return finding;
  });
}

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
template <Fault kFault>
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
        const float inverse = static_cast<float>(1.0 / std::sqrt(static_cast<double>(std::fmax(second[j], 0x1p-100f))));
        const float rooted = root<kFault>(second[j], stepped(inverse, random.step(root_steps)));
        const float denominator = rooted + scalars.eps;
        finding.check(same_bits(rooted, exact_root(second[j])) && rooted <= 0x1p20f &&
                          denominator >= kSmallestInRange && denominator <= 0x1p21f,
                      "the root or denominator", second[j], scalars.eps, inverse, rooted);
        const float seed = stepped(1.0f / denominator, random.step(quotient_steps));
        const float found = quotient<kFault>(first[j], denominator, seed);
        const float size = std::fabs(found);
        finding.check(
            same_bits(found, first[j] / denominator) && (size == 0.0f || (size >= 0x1p-121f && size <= 0x1p120f)),
            "the step", first[j], denominator, seed, found);
      }
    }
    return finding;
  });
  total.check(held > (1u << 20) / stride, "a trial, which seldom holds,", static_cast<float>(held), 0.0f, 0.0f, 0.0f);
  return total;
}

// Every scale of a block's exp_avg, and every step of its grid.
template <Fault kFault>
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
      check_quotient<kFault>(finding, 127.0f, value);
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
    finding.check(grid.step < 1u << 24 && is_allowed(0x1p48f, step) && grid.inverse == (uint64_t{1} << 48) / grid.step,
                  "the inverse of a step", 0x1p48f, step, 0.0f, static_cast<float>(grid.inverse));
    check_quotient<kFault>(finding, 0x1p48f, step);
  }
  const SecondGrid empty = second_grid(0u, 0xFFFFFFFFu);
  finding.check(empty.step == 9u << 13 && steps == (last >> 13) - 8, "the number of steps", static_cast<float>(steps),
                0.0f, 0.0f, static_cast<float>(empty.step));
  return finding;
}

// ---- running ----

bool report(const char* name, const Finding& finding) {
  std::printf("%s: %llu cases, %llu wrong%s%s\n", name, static_cast<unsigned long long>(finding.cases),
              static_cast<unsigned long long>(finding.wrong), finding.first.empty() ? "" : "; ", finding.first.c_str());
  std::fflush(stdout);
  return finding.wrong == 0 && finding.cases > 0;
}

template <Fault kFault>
bool run(const std::string& part, uint32_t rows) {
  bool right = true, known = false;
  const auto has = [&](const char* name) {
    const bool chosen = part == "all" || part == name;
    known = known || chosen;
    return chosen;
  };
  if (has("roots")) right = report("roots", roots<kFault>()) && right;
  if (has("other_roots")) right = report("other_roots", other_roots<kFault>()) && right;
  if (has("quotients")) right = report("quotients", quotients<kFault>()) && right;
  if (has("other_quotients")) right = report("other_quotients", other_quotients<kFault>()) && right;
  if (has("update_ranges")) right = report("update_ranges", update_ranges<kFault>()) && right;
  if (has("block_quotients")) right = report("block_quotients", block_quotients<kFault>()) && right;
  if (rows > 0) right = report("whole_rows", whole_rows<kFault>(rows)) && right;
  return known && right;
}

}  // namespace
}  // namespace shardops

// --part NAME --threads N --stride N --root-steps N --quotient-steps N --rows N --fault NAME
int main(int count, char** words) {
  using namespace shardops;
  std::string part = "all";
  uint32_t rows = 0;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    if (name == "--part") part = words[i + 1];
    if (name == "--fault") fault = words[i + 1];
    if (name == "--threads") threads = std::atoi(words[i + 1]);
    if (name == "--stride") stride = static_cast<uint32_t>(std::atoi(words[i + 1]));
    if (name == "--root-steps") root_steps = std::atoi(words[i + 1]);
    if (name == "--quotient-steps") quotient_steps = std::atoi(words[i + 1]);
    if (name == "--rows") rows = static_cast<uint32_t>(std::atoi(words[i + 1]));
  }
  if (fault == "none") return run<Fault::kNone>(part, rows) ? 0 : 1;
  if (fault == "no_inverse") return run<Fault::kNoInverse>(part, rows) ? 0 : 1;
  if (fault == "no_remainder") return run<Fault::kNoRemainder>(part, rows) ? 0 : 1;
  if (fault == "sign") return run<Fault::kSign>(part, rows) ? 0 : 1;
  if (fault == "root_unrefined") return run<Fault::kRootUnrefined>(part, rows) ? 0 : 1;
  if (fault == "root_half") return run<Fault::kRootHalf>(part, rows) ? 0 : 1;
  std::fprintf(stderr, "no such fault: %s\n", fault.c_str());
  return 2;
}
