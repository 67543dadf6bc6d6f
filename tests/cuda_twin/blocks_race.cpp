// The CUDA step over 8-bit codes on threads of the operating system, beside the CPU kernel: exit status 0 if all bits
// agree. For ThreadSanitizer, which sees accesses that no shuffle orders, and AddressSanitizer: arrays end where their
// last element does. Built from this file, csrc/cuda/sharded_adam_blocks.cu as C++ and csrc/cpu/sharded_adam.cpp, with
// -DSHARDOPS_TWIN_THREADS -DSHARDOPS_ISA=isa_default.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/adam_kinds.cuh"

namespace shardops {

namespace isa_default {
void sharded_adam(const AdamFormat& format, const AdamTensor& tensor, const AdamScalars& scalars, const Dither& dither,
                  int64_t begin, int64_t end);
}

namespace {

constexpr uint32_t kSalt = 12345u;
constexpr AdamOptions kOptions{1e-2, 0.9, 0.999, 1e-8, 0.1, true, false};

// One tensor's arrays in one form: an fp32 parameter, or a bf16 one with 8 bits of remainder.
struct Arrays {
  int64_t rows, columns;
  bool split;
  std::vector<uint8_t> param, remainder, first, second, words;

  Arrays(int64_t rows_, int64_t columns_, bool split_) : rows(rows_), columns(columns_), split(split_) {
    const int64_t numel = rows * columns;
    param.resize(numel * (split ? 2 : 4));
    remainder.resize(split ? numel : 0);
    first.resize(numel);
    second.resize(numel);
    words.resize(blocks() * sizeof(BlockWords));
  }
  int64_t blocks() const { return rows * ((columns + kBlock - 1) / kBlock); }
  bool operator==(const Arrays& other) const {
    return param == other.param && remainder == other.remainder && first == other.first && second == other.second &&
           words == other.words;
  }
};

const char* step_on_gpu(Arrays& arrays, const std::vector<float>& grad, bool wide, int64_t step) {
  auto launch = std::make_unique<AdamLaunch>();
  std::memset(static_cast<void*>(launch.get()), 0, sizeof(AdamLaunch));
  launch->tensors = 1;
  launch->chunk_items = 2 * kQuantisedPerRound;
  launch->dithered = true;
  launch->param = arrays.split ? Dtype::kBFloat16 : Dtype::kFloat32;
  launch->fields = kFieldCount;
  for (int8_t i = 0; i < static_cast<int8_t>(kFieldCount); ++i) launch->column[i] = i;
  launch->scalars[0] = StepScalars{adam_scalars(kOptions, step, 1.0f), static_cast<uint32_t>(step)};
  const auto address = [](const auto& values) { return reinterpret_cast<uint64_t>(values.data()); };
  launch->words[kParamField] = address(arrays.param);
  launch->words[kGradField] = address(grad);
  launch->words[kExpAvgField] = address(arrays.first);
  launch->words[kExpAvgSqField] = address(arrays.second);
  launch->words[kItemsField] = static_cast<uint64_t>(arrays.blocks());
  launch->words[kMasterField] = arrays.split ? address(arrays.remainder) : 0;
  launch->words[kSaltField] = kSalt;
  launch->words[kIndexField] = static_cast<uint64_t>(arrays.columns) << 32;
  launch->words[kIndexColumnsField] = static_cast<uint64_t>(arrays.columns);
  launch->words[kBlockWordsField] = address(arrays.words);
  launch->words[kBlockColumnsField] = static_cast<uint64_t>(arrays.columns);
  const Master master = arrays.split ? Master::kSplit24 : Master::kParam;
  const AdamKernelKind kind{master, launch->param, Dtype::kFloat32, Moments::kBlocks, !wide, wide};
  const int64_t grid = (arrays.blocks() + launch->chunk_items - 1) / launch->chunk_items;
  return launch_adam<Moments::kBlocks>(kind, *launch, grid, nullptr);
}

void step_on_cpu(Arrays& arrays, const std::vector<float>& grad, int64_t step) {
  const Dtype param = arrays.split ? Dtype::kBFloat16 : Dtype::kFloat32;
  const Master master = arrays.split ? Master::kSplit24 : Master::kParam;
  const AdamFormat format{param, Dtype::kFloat32, Moments::kBlocks, master, false, param, false, false, false, 1.0f};
  AdamTensor tensor{};
  tensor.param = arrays.param.data();
  tensor.grad = grad.data();
  tensor.exp_avg = arrays.first.data();
  tensor.exp_avg_sq = arrays.second.data();
  tensor.master = arrays.split ? arrays.remainder.data() : nullptr;
  tensor.numel = arrays.rows * arrays.columns;
  tensor.block_words = reinterpret_cast<BlockWords*>(arrays.words.data());
  tensor.block_columns = arrays.columns;
  tensor.index = GlobalIndex{0, static_cast<uint32_t>(arrays.columns), arrays.columns};
  isa_default::sharded_adam(format, tensor, adam_scalars(kOptions, step, 1.0f), dither_of(kSalt, step), 0,
                            arrays.blocks());
}

bool agrees(int64_t rows, int64_t columns, bool split, bool wide) {
  Arrays gpu(rows, columns, split), cpu(rows, columns, split);
  std::vector<float> grad(rows * columns);
  uint32_t state = 1;
  bool agreed = true;
  for (int64_t step = 1; step <= 2; ++step) {
    for (float& value : grad) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-40f;
    }
    const char* error = step_on_gpu(gpu, grad, wide, step);
    step_on_cpu(cpu, grad, step);
    agreed = agreed && error == nullptr && gpu == cpu;
  }
  std::printf("%lld rows of %lld, split %d, wide %d: %s\n", static_cast<long long>(rows),
              static_cast<long long>(columns), split, wide, agreed ? "equal" : "different");
  return agreed;
}

// Past the last block, half warps read that one once more and drop what they read. Its own writes it meanwhile: a race,
// though nothing depends on it. So under ThreadSanitizer rounds are full.
#if defined(__SANITIZE_THREAD__)
constexpr int64_t kWideBlocks = 3 * kQuantisedPerRound;
#else
constexpr int64_t kWideBlocks = 2 * kQuantisedPerRound + 3;
#endif

}  // namespace
}  // namespace shardops

int main() {
  using namespace shardops;
  bool agreed = true;
  for (const bool split : {false, true}) {
    agreed = agrees(1, kWideBlocks * kBlock, split, true) && agreed;
    agreed = agrees(3, kBlock + 2, split, false) && agreed;
  }
  return agreed ? 0 : 1;
}
