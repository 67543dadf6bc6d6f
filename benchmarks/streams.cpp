// The bandwidth limit of a primitive: arrays of the same sizes, read, written and updated as it does, with one addition
// a word in place of the formula. Compiled for this machine by benchmarks/_harness.py; not part of the package.
#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

enum Mode : int32_t { kRead = 0, kWrite = 1, kUpdate = 2 };

struct Stream {
  uint64_t* data;  // aligned to 64 bytes
  int64_t lines;   // of 64 bytes
  int32_t mode;
  int32_t through;  // written around the caches, as a long copy does: nothing is read first
};

static const int64_t kWords = 8;  // of a line

static uint64_t read(const uint64_t* data, int64_t words) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < words; ++i) sum += data[i];
  return sum;
}

static void write(uint64_t* data, int64_t words, uint64_t value, bool through) {
#ifdef __SSE2__
  if (through) {
    const __m128i pair = _mm_set1_epi64x(static_cast<long long>(value));
    for (int64_t i = 0; i < words; i += 2) _mm_stream_si128(reinterpret_cast<__m128i*>(data + i), pair);
    return;
  }
#endif
  for (int64_t i = 0; i < words; ++i) data[i] = value;
}

static void update(uint64_t* data, int64_t words) {
  for (int64_t i = 0; i < words; ++i) data[i] += 1;
}

// All arrays side by side, as a kernel goes over them: step k of `steps` takes the k-th part of each.
extern "C" uint64_t streams(const Stream* arrays, int count, int64_t steps, int threads) {
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (int thread = 0; thread < threads; ++thread) {
    for (int64_t step = steps * thread / threads; step < steps * (thread + 1) / threads; ++step) {
      for (int index = 0; index < count; ++index) {
        const Stream& array = arrays[index];
        const int64_t begin = array.lines * step / steps, end = array.lines * (step + 1) / steps;
        uint64_t* data = array.data + begin * kWords;
        const int64_t words = (end - begin) * kWords;
        if (array.mode == kRead) total += read(data, words);
        if (array.mode == kWrite) write(data, words, total, array.through != 0);
        if (array.mode == kUpdate) update(data, words);
      }
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
  }
  return total;
}
