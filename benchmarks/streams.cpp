// The bandwidth limit of an optimizer step: the same arrays, read and written at the same widths, with one addition an
// element in place of the formula. Compiled for this machine by benchmarks/_harness.py; not part of the package.
#include <cstdint>

// read: const uint16_t or uint32_t; updated arrays likewise. 64 bytes of the widest array at a time.
template <typename Param>
static void streams(Param* __restrict param, const Param* __restrict grad, uint32_t* __restrict exp_avg,
                    uint32_t* __restrict exp_avg_sq, Param* __restrict extra, int64_t begin, int64_t end) {
  constexpr int64_t kStep = 32;
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    for (int64_t j = i; j < i + kStep; ++j) param[j] += grad[j];
    if (extra) {
      for (int64_t j = i; j < i + kStep; ++j) extra[j] += 1;
    }
    for (int64_t j = i; j < i + kStep; ++j) exp_avg[j] += 1;
    for (int64_t j = i; j < i + kStep; ++j) exp_avg_sq[j] += 1;
  }
}

template <typename Param>
static void threaded(Param* param, const Param* grad, uint32_t* exp_avg, uint32_t* exp_avg_sq, Param* extra,
                     int64_t numel, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t share = (numel / threads) & ~int64_t{31};
    const int64_t begin = thread * share;
    streams(param, grad, exp_avg, exp_avg_sq, extra, begin, thread + 1 == threads ? numel : begin + share);
  }
}

extern "C" void streams_fp32(uint32_t* param, const uint32_t* grad, uint32_t* exp_avg, uint32_t* exp_avg_sq,
                             int64_t numel, int threads) {
  threaded<uint32_t>(param, grad, exp_avg, exp_avg_sq, nullptr, numel, threads);
}

extern "C" void streams_bf16_split(uint16_t* param, const uint16_t* grad, uint32_t* exp_avg, uint32_t* exp_avg_sq,
                                   uint16_t* remainder, int64_t numel, int threads) {
  threaded<uint16_t>(param, grad, exp_avg, exp_avg_sq, remainder, numel, threads);
}
