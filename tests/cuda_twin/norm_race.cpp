// The norm's CUDA kernels on threads of the operating system, beside the CPU kernel: exit status 0 if all bits agree.
// For ThreadSanitizer, which then sees every access to shared memory that no barrier orders. Built from this file,
// csrc/cuda/grad_norm.cu as C++ and csrc/cpu/grad_norm.cpp, with -DSHARDOPS_TWIN_THREADS -DSHARDOPS_ISA=isa_default.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/formats.h"
#include "cuda/kernels.h"

namespace shardops {

namespace isa_default {
double norm_block(const void* values, Dtype dtype, int64_t numel, Norm norm);
}

namespace {

// Bits of finite numbers: those without the highest bit of an exponent.
std::vector<uint16_t> halves_of_floats(int64_t numel, Dtype dtype) {
  std::vector<uint16_t> halves(numel * dtype_nbytes(dtype) / 2);
  uint32_t state = 12345;
  for (size_t i = 0; i < halves.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    halves[i] = static_cast<uint16_t>(state >> 16) & 0xBFFFu;
  }
  return halves;
}

double combined(const std::vector<double>& blocks, Norm norm) {
  std::vector<double> lanes(kNormLanes, 0.0);
  const auto combine = [norm](double a, double b) { return norm == Norm::kInf ? std::max(a, b) : a + b; };
  for (size_t i = 0; i < blocks.size(); ++i) lanes[i % kNormLanes] = combine(lanes[i % kNormLanes], blocks[i]);
  for (int64_t width = kNormLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + width]);
  }
  return lanes[0];
}

bool is_equal(const double* a, const double* b, int64_t count) {
  return std::memcmp(a, b, count * sizeof(double)) == 0;
}

// Two tensors: whole blocks and a short one; the second does not lie at an aligned address.
bool agrees(Dtype dtype, Norm norm) {
  const int64_t numels[] = {kNormBlock + 3 * kNormLanes + 5, kNormBlock + 1};
  const std::vector<uint16_t> memory = halves_of_floats(numels[0] + numels[1], dtype);
  const auto* start = reinterpret_cast<const char*>(memory.data());
  std::vector<NormTensor> tensors;
  std::vector<double> expected;
  for (const int64_t numel : numels) {
    tensors.push_back(NormTensor{start, numel, static_cast<int64_t>(expected.size())});
    for (int64_t offset = 0; offset < numel; offset += kNormBlock) {
      const char* block = start + offset * dtype_nbytes(dtype);
      expected.push_back(isa_default::norm_block(block, dtype, std::min(kNormBlock, numel - offset), norm));
    }
    start += numel * dtype_nbytes(dtype);
  }
  const int64_t count = static_cast<int64_t>(expected.size());
  std::vector<double> blocks(count);
  double total = 0.0;
  const double expected_total = combined(expected, norm);
  float nonfinite = -1.0f;
  const char* error = launch_norm_blocks(tensors.data(), 2, dtype, norm, blocks.data(), nullptr);
  if (error == nullptr) error = launch_norm_combine(blocks.data(), count, norm, &total, &nonfinite, nullptr);
  const bool agreed = error == nullptr && is_equal(blocks.data(), expected.data(), count) &&
                      is_equal(&total, &expected_total, 1) && nonfinite == 0.0f;
  std::printf("dtype %d, norm %d: %.17g beside %.17g\n", static_cast<int>(dtype), static_cast<int>(norm), total,
              expected_total);
  return agreed;
}

// More blocks than are on their way at a time, without and with one of the last lane that is infinite.
bool combines(Norm norm) {
  std::vector<double> blocks(5000);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = 1.0 / static_cast<double>(i + 1);
  bool agreed = true;
  for (const float expected_nonfinite : {0.0f, 1.0f}) {
    if (expected_nonfinite == 1.0f) blocks[17 * kNormLanes - 1] = INFINITY;
    double total = 0.0;
    const double expected_total = combined(blocks, norm);
    float nonfinite = -1.0f;
    const int64_t count = static_cast<int64_t>(blocks.size());
    const char* error = launch_norm_combine(blocks.data(), count, norm, &total, &nonfinite, nullptr);
    std::printf("norm %d of blocks: %.17g beside %.17g\n", static_cast<int>(norm), total, expected_total);
    agreed = agreed && error == nullptr && is_equal(&total, &expected_total, 1) && nonfinite == expected_nonfinite;
  }
  return agreed;
}

}  // namespace
}  // namespace shardops

int main() {
  using namespace shardops;
  bool agreed = true;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    for (const Norm norm : {Norm::kOne, Norm::kTwo, Norm::kInf}) agreed = agrees(dtype, norm) && agreed;
  }
  for (const Norm norm : {Norm::kOne, Norm::kTwo, Norm::kInf}) agreed = combines(norm) && agreed;
  return agreed ? 0 : 1;
}
