// One register of 32-bit numbers, and what compilers' vector extensions have no operators for. Loops that mix 8, 16 and
// 32 bits are written in these: a compiler takes the narrowest type's number of elements, four registers to a value.
#pragma once

#include "isa.h"

#if defined(__AVX2__)
#define SHARDOPS_LANES

#include <immintrin.h>

#include <cstring>

#include "../common/low_precision.h"

#define SHARDOPS_INLINE inline __attribute__((always_inline))
#define SHARDOPS_LAMBDA __attribute__((always_inline))

namespace shardops {
namespace SHARDOPS_ISA {
namespace {

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kLanes = kVectorBytes / sizeof(float);

SHARDOPS_INLINE Floats as_floats(Words bits) { return reinterpret_cast<Floats>(bits); }
SHARDOPS_INLINE Words as_words(Floats value) { return reinterpret_cast<Words>(value); }

// Of signed integers.
SHARDOPS_INLINE Floats to_floats(Words value) {
  return __builtin_convertvector(reinterpret_cast<Integers>(value), Floats);
}

template <typename Register>
SHARDOPS_INLINE Register load(const void* source) {
  Register value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

template <typename Register>
SHARDOPS_INLINE void store(void* destination, Register value) {
  std::memcpy(destination, &value, sizeof(value));
}

SHARDOPS_INLINE Words load_words(const uint32_t* source) { return load<Words>(source); }
SHARDOPS_INLINE void store_words(uint32_t* destination, Words value) { store(destination, value); }
SHARDOPS_INLINE Floats load_floats(const float* source) { return load<Floats>(source); }
SHARDOPS_INLINE void store_floats(float* destination, Floats value) { store(destination, value); }

// 0, 1, 2, ..
SHARDOPS_INLINE Words lane_numbers() {
  Words numbers = {};
  for (int64_t i = 0; i < kLanes; ++i) numbers[i] = static_cast<uint32_t>(i);
  return numbers;
}

// For each 128 bits, 16 bytes that choose a byte each; kNone chooses a zero.
constexpr char kNone = -128;

// ---- each is one instruction or two, by the width of the register ----

#if defined(__AVX512F__)

typedef __m512i Register;

// The masked forms, all lanes on, are the same instructions; gcc warns of the other ones.
#define SHARDOPS_MM(name, ...) _mm512_maskz_##name(static_cast<__mmask16>(-1), __VA_ARGS__)
#define SHARDOPS_MM_64(name, ...) _mm512_maskz_##name(static_cast<__mmask8>(-1), __VA_ARGS__)
#define SHARDOPS_MM_16(name, ...) _mm512_maskz_##name(static_cast<__mmask32>(-1), __VA_ARGS__)
#define SHARDOPS_MM_8(name, ...) _mm512_maskz_##name(static_cast<__mmask64>(-1), __VA_ARGS__)

typedef __m128i Bytes;   // of a register's lanes
typedef __m256i Halves;  // of a register's lanes

SHARDOPS_INLINE Register repeated(__m128i value) { return SHARDOPS_MM(broadcast_i32x4, value); }
SHARDOPS_INLINE Register bytes_repeated(const void* source) { return repeated(load<Bytes>(source)); }
// For 128 bits each, four bytes further.
SHARDOPS_INLINE Register second_byte_places() {
  return _mm512_set_epi64(0x80800F8080800E80, 0x80800D8080800C80, 0x80800B8080800A80, 0x8080098080800880,
                          0x8080078080800680, 0x8080058080800480, 0x8080038080800280, 0x8080018080800080);
}
SHARDOPS_INLINE Register choose_bytes(Register a, Register places) { return SHARDOPS_MM_8(shuffle_epi8, a, places); }
SHARDOPS_INLINE Words widened(Bytes bytes) { return reinterpret_cast<Words>(SHARDOPS_MM(cvtepu8_epi32, bytes)); }
SHARDOPS_INLINE Words sign_extended(Bytes bytes) { return reinterpret_cast<Words>(SHARDOPS_MM(cvtepi8_epi32, bytes)); }
SHARDOPS_INLINE Words sign_extended_halves(Halves halves) {
  return reinterpret_cast<Words>(SHARDOPS_MM(cvtepi16_epi32, halves));
}
SHARDOPS_INLINE Words upper_from(Halves halves) {
  const Register places = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                           3, 0, 2, 0, 1, 0, 0, 0);
  return reinterpret_cast<Words>(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, places, _mm512_castsi256_si512(halves)));
}
SHARDOPS_INLINE Register upper_halves(Words a, Words b) {
  const Register places = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(reinterpret_cast<Register>(a), places, reinterpret_cast<Register>(b));
}
SHARDOPS_INLINE Register lower_halves(Words a, Words b) {
  const Register places = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                           24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutex2var_epi16(reinterpret_cast<Register>(a), places, reinterpret_cast<Register>(b));
}
// 32 bits of each 128 in turn -> the 128 bits of each in turn.
SHARDOPS_INLINE Register gathered(Register a) {
  const Register places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return SHARDOPS_MM(permutexvar_epi32, places, a);
}
SHARDOPS_INLINE Register pack_unsigned(Words a, Words b) {
  return SHARDOPS_MM_16(packus_epi32, reinterpret_cast<Register>(a), reinterpret_cast<Register>(b));
}
SHARDOPS_INLINE Register pack_signed(Words a, Words b) {
  return SHARDOPS_MM_16(packs_epi32, reinterpret_cast<Register>(a), reinterpret_cast<Register>(b));
}
SHARDOPS_INLINE Register pack_unsigned_halves(Register a, Register b) { return SHARDOPS_MM_8(packus_epi16, a, b); }
SHARDOPS_INLINE Register pack_signed_halves(Register a, Register b) { return SHARDOPS_MM_8(packs_epi16, a, b); }
SHARDOPS_INLINE Words mean_halves(Words a, Words b) {
  return reinterpret_cast<Words>(
      SHARDOPS_MM_16(avg_epu16, reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
}
SHARDOPS_INLINE Words smaller(Words a, Words b) {
  return reinterpret_cast<Words>(SHARDOPS_MM(min_epu32, reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
}
SHARDOPS_INLINE Words larger(Words a, Words b) {
  return reinterpret_cast<Words>(SHARDOPS_MM(max_epu32, reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
}
SHARDOPS_INLINE Floats square_root(Floats a) {
  return reinterpret_cast<Floats>(SHARDOPS_MM(sqrt_ps, reinterpret_cast<__m512>(a)));
}
SHARDOPS_INLINE Words nearest(Floats a) {
  return reinterpret_cast<Words>(SHARDOPS_MM(cvtps_epi32, reinterpret_cast<__m512>(a)));
}
SHARDOPS_INLINE Words multiply_high(Words a, Words b) {
  const Register odd_a = SHARDOPS_MM(shuffle_epi32, reinterpret_cast<Register>(a), _MM_PERM_DDBB);
  const Register even = SHARDOPS_MM_64(mul_epu32, reinterpret_cast<Register>(a), reinterpret_cast<Register>(b));
  const Register odd = SHARDOPS_MM_64(mul_epu32, odd_a, reinterpret_cast<Register>(b));
  return reinterpret_cast<Words>(_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB));
}
SHARDOPS_INLINE Words zero_where(Words a, uint32_t b, Words value) {
  const __mmask16 differs =
      _mm512_cmpneq_epu32_mask(reinterpret_cast<Register>(a), reinterpret_cast<Register>(Words{} + b));
  return reinterpret_cast<Words>(_mm512_maskz_mov_epi32(differs, reinterpret_cast<Register>(value)));
}
SHARDOPS_INLINE __m256i larger_half(Words a) {
  const auto both = reinterpret_cast<Register>(a);
  return _mm256_max_epu32(SHARDOPS_MM_64(extracti64x4_epi64, both, 0), SHARDOPS_MM_64(extracti64x4_epi64, both, 1));
}

#else

typedef __m256i Register;
typedef int64_t Bytes;
typedef __m128i Halves;

SHARDOPS_INLINE Register repeated(__m128i value) { return _mm256_broadcastsi128_si256(value); }
SHARDOPS_INLINE Register bytes_repeated(const void* source) { return _mm256_set1_epi64x(load<Bytes>(source)); }
SHARDOPS_INLINE Register second_byte_places() {
  return _mm256_set_epi64x(0x8080078080800680, 0x8080058080800480, 0x8080038080800280, 0x8080018080800080);
}
SHARDOPS_INLINE Register choose_bytes(Register a, Register places) { return _mm256_shuffle_epi8(a, places); }
SHARDOPS_INLINE Words widened(Bytes bytes) {
  return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes)));
}
SHARDOPS_INLINE Words sign_extended(Bytes bytes) {
  return reinterpret_cast<Words>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
}
SHARDOPS_INLINE Words sign_extended_halves(Halves halves) {
  return reinterpret_cast<Words>(_mm256_cvtepi16_epi32(halves));
}
SHARDOPS_INLINE Words upper_from(Halves halves) {
  const Register places =
      _mm256_set_epi64x(0x0F0E80800D0C8080, 0x0B0A808009088080, 0x0706808005048080, 0x0302808001008080);
  return reinterpret_cast<Words>(_mm256_shuffle_epi8(repeated(halves), places));
}
SHARDOPS_INLINE Register in_turn(Register a) { return _mm256_permute4x64_epi64(a, 0xD8); }
SHARDOPS_INLINE Register gathered(Register a) {
  return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
SHARDOPS_INLINE Register pack_unsigned(Words a, Words b) {
  return _mm256_packus_epi32(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b));
}
SHARDOPS_INLINE Register pack_signed(Words a, Words b) {
  return _mm256_packs_epi32(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b));
}
SHARDOPS_INLINE Register upper_halves(Words a, Words b) { return in_turn(pack_unsigned(a >> 16, b >> 16)); }
SHARDOPS_INLINE Register lower_halves(Words a, Words b) { return in_turn(pack_unsigned(a & 0xFFFFu, b & 0xFFFFu)); }
SHARDOPS_INLINE Register pack_unsigned_halves(Register a, Register b) { return _mm256_packus_epi16(a, b); }
SHARDOPS_INLINE Register pack_signed_halves(Register a, Register b) { return _mm256_packs_epi16(a, b); }
SHARDOPS_INLINE Words mean_halves(Words a, Words b) {
  return reinterpret_cast<Words>(_mm256_avg_epu16(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
}
SHARDOPS_INLINE Words smaller(Words a, Words b) {
  return reinterpret_cast<Words>(_mm256_min_epu32(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
}
SHARDOPS_INLINE Words larger(Words a, Words b) {
  return reinterpret_cast<Words>(_mm256_max_epu32(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b)));
}
SHARDOPS_INLINE Floats square_root(Floats a) {
  return reinterpret_cast<Floats>(_mm256_sqrt_ps(reinterpret_cast<__m256>(a)));
}
SHARDOPS_INLINE Words nearest(Floats a) {
  return reinterpret_cast<Words>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(a)));
}
SHARDOPS_INLINE Words multiply_high(Words a, Words b) {
  const Register odd_a = _mm256_shuffle_epi32(reinterpret_cast<Register>(a), 0xF5);
  const Register even = _mm256_mul_epu32(reinterpret_cast<Register>(a), reinterpret_cast<Register>(b));
  const Register odd = _mm256_mul_epu32(odd_a, reinterpret_cast<Register>(b));
  return reinterpret_cast<Words>(_mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xF5), odd, 0xAA));
}
SHARDOPS_INLINE Words zero_where(Words a, uint32_t b, Words value) {
  const Register equal = _mm256_cmpeq_epi32(reinterpret_cast<Register>(a), reinterpret_cast<Register>(Words{} + b));
  return reinterpret_cast<Words>(_mm256_andnot_si256(equal, reinterpret_cast<Register>(value)));
}
SHARDOPS_INLINE __m256i larger_half(Words a) { return reinterpret_cast<__m256i>(a); }

#endif

// ---- made of these ----

// The largest of the lanes.
SHARDOPS_INLINE uint32_t largest_of(Words a) {
  const __m256i eight = larger_half(a);
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xB1))));
}

SHARDOPS_INLINE Words load_codes(const uint8_t* source) { return widened(load<Bytes>(source)); }
SHARDOPS_INLINE Words load_codes(const int8_t* source) { return sign_extended(load<Bytes>(source)); }

// Bits 8 to 15 of each lane, the others 0.
SHARDOPS_INLINE Words load_second_bytes(const int8_t* source) {
  return reinterpret_cast<Words>(choose_bytes(bytes_repeated(source), second_byte_places()));
}

// Bits 16 to 31 of each lane, the others 0.
SHARDOPS_INLINE Words load_upper(const Bf16* source) { return upper_from(load<Halves>(source)); }
SHARDOPS_INLINE Words load_halves(const int16_t* source) { return sign_extended_halves(load<Halves>(source)); }
SHARDOPS_INLINE Floats load_floats(const Bf16* source) { return as_floats(load_upper(source)); }

// The upper or lower 16 bits of each lane.
SHARDOPS_INLINE void store_upper(Bf16* destination, Words a, Words b) { store(destination, upper_halves(a, b)); }
SHARDOPS_INLINE void store_lower(int16_t* destination, Words a, Words b) { store(destination, lower_halves(a, b)); }

// Of each lane bits 8 to 15.
SHARDOPS_INLINE void store_second_bytes(int8_t* destination, Words a, Words b, Words c, Words d) {
  const __m128i none = _mm_set1_epi8(kNone);
  const __m128i places =
      _mm_setr_epi8(1, 5, 9, 13, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone);
  const auto bytes = [](Words value, __m128i chosen) {
    return choose_bytes(reinterpret_cast<Register>(value), repeated(chosen));
  };
  store(destination, gathered(bytes(a, places) | bytes(b, _mm_alignr_epi8(places, none, 12)) |
                              bytes(c, _mm_alignr_epi8(places, none, 8)) | bytes(d, _mm_alignr_epi8(places, none, 4))));
}

// Numbers that a byte holds.
SHARDOPS_INLINE void store_codes(uint8_t* destination, Words a, Words b, Words c, Words d) {
  store(destination, gathered(pack_unsigned_halves(pack_unsigned(a, b), pack_unsigned(c, d))));
}
SHARDOPS_INLINE void store_codes(int8_t* destination, Words a, Words b, Words c, Words d) {
  store(destination, gathered(pack_signed_halves(pack_signed(a, b), pack_signed(c, d))));
}

}  // namespace
}  // namespace SHARDOPS_ISA

}  // namespace shardops

#endif
