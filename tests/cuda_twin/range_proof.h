// What the proofs about quotients and roots share: floats near others, random ones, threads, and what was found.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/platform.h"

namespace shardops {

// How a run is made; read from the command line by parse().
inline std::string part = "all";
inline std::string fault = "none";  // what is done wrong, to show that it is found
inline int threads = 1;
inline uint32_t stride = 1;     // every how many cases are tried: 1 is the proof
inline int root_steps = 3;      // seeds: so many floats on either side of the nearest one
inline int quotient_steps = 2;  // likewise
inline uint32_t rows = 0;       // divisors that are tried with all dividends

inline void parse(int count, char** words) {
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    const auto number = static_cast<uint32_t>(std::atoi(words[i + 1]));
    if (name == "--part") part = words[i + 1];
    if (name == "--fault") fault = words[i + 1];
    if (name == "--threads") threads = static_cast<int>(number);
    if (name == "--stride") stride = number;
    if (name == "--root-steps") root_steps = static_cast<int>(number);
    if (name == "--quotient-steps") quotient_steps = static_cast<int>(number);
    if (name == "--rows") rows = number;
  }
}

// The float that is some steps from a positive one.
SHARDOPS_HD float stepped(float value, int steps) { return bits_to_float(float_to_bits(value) + steps); }

// Of float64's 53 bits, 2 * 24 + 2 suffice for a root that is rounded twice to be rounded correctly.
SHARDOPS_HD float exact_root(float a) { return static_cast<float>(std::sqrt(static_cast<double>(a))); }

// The nearest float to 1 / sqrt(a), or in rare cases its neighbour: seeds are taken on both sides of it.
SHARDOPS_HD float inverse_root(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }

inline bool same_bits(float a, float b) { return float_to_bits(a) == float_to_bits(b); }

// Divisors of which some seed within two steps leads to a wrong quotient: their mantissas, found by range_proof.cpp.
inline bool is_delicate(float b) { return (float_to_bits(b) & 0x7FFFFFu) >= 0x7FFFFBu; }

// What quotient_in_range() promises to divide. Divisors are multiplied by powers of two, exactly.
inline bool is_allowed(float a, float b) {
  const double magnitude = std::fabs(a), divisor = b;
  return b >= kSmallestInRange && b <= 0x1p125f && std::isfinite(a) && magnitude >= kSmallestInRange &&
         magnitude >= divisor * 0x1p-126 && magnitude <= divisor * 0x1p127;
}

constexpr int kMostSteps = 8;

struct Finding {
  uint64_t cases = 0;
  uint64_t wrong = 0;
  uint64_t by_steps[kMostSteps] = {};
  std::vector<std::string> first;  // a few

  // steps: how far the seed is from the nearest one.
  void check(bool right, const char* what, float a, float b, float seed, float found, int steps = 0) {
    ++cases;
    if (right) return;
    ++by_steps[std::min(std::abs(steps), kMostSteps - 1)];
    if (wrong++ >= 20) return;
    char text[200];
    std::snprintf(text, sizeof(text), "%s of %a, %a with %a gives %a", what, a, b, seed, found);
    first.push_back(text);
  }
  void add(const Finding& other) {
    cases += other.cases;
    wrong += other.wrong;
    for (int i = 0; i < kMostSteps; ++i) by_steps[i] += other.by_steps[i];
    first.insert(first.end(), other.first.begin(), other.first.end());
  }
};

inline void report(const char* name, const Finding& finding) {
  std::printf("%s: %llu cases, %llu wrong, by steps:", name, static_cast<unsigned long long>(finding.cases),
              static_cast<unsigned long long>(finding.wrong));
  for (const uint64_t wrong : finding.by_steps) std::printf(" %llu", static_cast<unsigned long long>(wrong));
  for (size_t i = 0; i < finding.first.size() && i < 20; ++i) std::printf("\n  %s", finding.first[i].c_str());
  std::printf("\n");
}

// Finding of all of [0, count), shared by the threads in pieces.
inline Finding over(uint32_t count, const std::function<Finding(uint32_t first, uint32_t last)>& piece) {
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

}  // namespace shardops
