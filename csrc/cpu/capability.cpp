// Detection by CPUID, with SHARDOPS_CPU_CAPABILITY as an override for tests and for doubt.
#include "capability.h"

#include <cstdlib>
#include <stdexcept>

namespace shardops {

std::vector<std::string> supported_cpu_capabilities() {
  std::vector<std::string> names{"default"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    names.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      names.push_back("avx512");
    }
  }
#endif
  return names;
}

int chosen_cpu_capability() {
  const std::vector<std::string> names = supported_cpu_capabilities();
  const char* wanted = std::getenv("SHARDOPS_CPU_CAPABILITY");
  if (wanted == nullptr || *wanted == '\0') return static_cast<int>(names.size()) - 1;
  std::string listed;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == wanted) return static_cast<int>(i);
    listed += (i ? ", " : "") + names[i];
  }
  throw std::runtime_error("SHARDOPS_CPU_CAPABILITY=" + std::string(wanted) +
                           " cannot be used: this CPU and build run " + listed +
                           "; unset it to take the best of these");
}

}  // namespace shardops
