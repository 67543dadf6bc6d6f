// Copy with cast and scale: the one loop under flatten_shard, unflatten_shard and cast_gather on a CPU.
#include "isa.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../common/low_precision.h"

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

// A cache line, and the shortest copy that is worth a loop over lines.
constexpr int64_t kLine = 64;
constexpr int64_t kLongCopy = 4096;

#if defined(__SSE2__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// destination starts at a line. kStream: past the caches, so that the line is not read before it is written.
template <bool kStream>
inline void copy_line(char* __restrict destination, const char* __restrict source) {
#if defined(__AVX2__)
  auto* to = reinterpret_cast<__m256i*>(destination);
  const auto* from = reinterpret_cast<const __m256i*>(source);
  const __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
  if constexpr (kStream) {
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  } else {
    _mm256_store_si256(to, low);
    _mm256_store_si256(to + 1, high);
  }
#elif defined(__SSE2__)
  auto* to = reinterpret_cast<__m128i*>(destination);
  const auto* from = reinterpret_cast<const __m128i*>(source);
  for (int i = 0; i < 4; ++i) {
    const __m128i part = _mm_loadu_si128(from + i);
    if constexpr (kStream) {
      _mm_stream_si128(to + i, part);
    } else {
      _mm_store_si128(to + i, part);
    }
  }
#else
  std::memcpy(destination, source, kLine);
#endif
}

template <bool kStream>
void copy_lines(char* __restrict destination, const char* __restrict source, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += kLine) copy_line<kStream>(destination + i, source + i);
}

// Bytes up to the next line.
inline int64_t misaligned(const void* address) {
  return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(address) & (kLine - 1));
}

// memcpy for long ranges. glibc's own takes `rep movsb` for them, which on a Zen 4 moved half of what this loop moves
// within the caches (1 MiB: 45 us and 21 us).
void copy_bytes(void* destination, const void* source, int64_t nbytes, bool stream) {
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  if (!stream && nbytes < kLongCopy) {
    std::memcpy(to, from, nbytes);
    return;
  }
  const int64_t head = std::min(misaligned(to), nbytes);
  const int64_t lines = (nbytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  if (stream) {
    copy_lines<true>(to + head, from + head, lines);
  } else {
    copy_lines<false>(to + head, from + head, lines);
  }
  std::memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
}

#if defined(__AVX512F__)
// from_float's bits for whole registers by the instruction that AVX-512 has, which keeps a NaN's payload; returns how
// many. In the caches it is three times as fast as the loop.
template <bool kScale>
int64_t convert_registers(Fp16* __restrict destination, const float* __restrict source, int64_t numel, float scale) {
  constexpr int64_t kLanes = kVectorBytes / sizeof(float);
  const __m512i sign = _mm512_set1_epi32(INT32_MIN), nan = _mm512_set1_epi32(0x7FC00000);
  const int64_t count = numel / kLanes * kLanes;
  for (int64_t i = 0; i < count; i += kLanes) {
    __m512 value = _mm512_loadu_ps(source + i);
    if constexpr (kScale) value = _mm512_mul_ps(value, _mm512_set1_ps(scale));
    const __m512i signed_nan = _mm512_or_si512(_mm512_and_si512(_mm512_castps_si512(value), sign), nan);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    value = _mm512_mask_blend_ps(is_nan, value, _mm512_castsi512_ps(signed_nan));
    const __m256i halves = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + i), halves);
  }
  return count;
}
#endif

template <typename To, typename From, bool kScale>
void convert(To* __restrict destination, const From* __restrict source, int64_t numel, float scale) {
  int64_t begin = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<To, Fp16> && std::is_same_v<From, float>) {
    begin = convert_registers<kScale>(destination, source, numel, scale);
  }
#endif
  for (int64_t i = begin; i < numel; ++i) {
    const float value = to_float(source[i]);
    from_float(kScale ? SHARDOPS_MUL(value, scale) : value, destination[i]);
  }
}

// By way of a block that stays in the first cache, whose lines are then written past the caches.
template <typename To, typename From, bool kScale>
void convert_streaming(To* destination, const From* source, int64_t numel, float scale) {
  constexpr int64_t kBlock = kLongCopy / sizeof(To);
  alignas(kLine) To block[kBlock];
  // The first block ends where a line does; all others then start at one.
  int64_t count = std::min<int64_t>(numel, kBlock - kLine / sizeof(To) + misaligned(destination) / sizeof(To));
  for (int64_t i = 0; i < numel; i += count, count = std::min(numel - i, kBlock)) {
    convert<To, From, kScale>(block, source + i, count, scale);
    copy_bytes(destination + i, block, count * sizeof(To), true);
  }
}

template <typename To, typename From>
void convert(void* destination, const void* source, int64_t numel, const float* scale, bool stream) {
  To* to = static_cast<To*>(destination);
  const From* from = static_cast<const From*>(source);
  if (stream) {
    return scale ? convert_streaming<To, From, true>(to, from, numel, *scale)
                 : convert_streaming<To, From, false>(to, from, numel, 1.0f);
  }
  return scale ? convert<To, From, true>(to, from, numel, *scale) : convert<To, From, false>(to, from, numel, 1.0f);
}

template <typename To>
void convert_from(void* destination, const void* source, Dtype from, int64_t numel, const float* scale, bool stream) {
  switch (from) {
    case Dtype::kFloat32: return convert<To, float>(destination, source, numel, scale, stream);
    case Dtype::kBFloat16: return convert<To, Bf16>(destination, source, numel, scale, stream);
    case Dtype::kFloat16: return convert<To, Fp16>(destination, source, numel, scale, stream);
  }
}

void cast(void* destination, Dtype to, const void* source, Dtype from, int64_t numel, const float* scale, bool stream) {
  switch (to) {
    case Dtype::kFloat32: return convert_from<float>(destination, source, from, numel, scale, stream);
    case Dtype::kBFloat16: return convert_from<Bf16>(destination, source, from, numel, scale, stream);
    case Dtype::kFloat16: return convert_from<Fp16>(destination, source, from, numel, scale, stream);
  }
}

}  // namespace

void cast_copy(void* destination, Dtype to, const void* source, Dtype from, int64_t numel, const float* scale,
               bool stream) {
  if (numel == 0) return;
  stream = stream && kCanStream && numel * dtype_nbytes(to) >= 2 * kLongCopy;
  if (to == from && !scale) {
    copy_bytes(destination, source, numel * dtype_nbytes(to), stream);  // keeps a NaN's payload, as a copy should
  } else {
    cast(destination, to, source, from, numel, scale, stream);
  }
#if defined(__SSE2__)
  if (stream) _mm_sfence();  // before anyone is told that the copy is done
#endif
}

}  // namespace SHARDOPS_ISA
}  // namespace shardops
