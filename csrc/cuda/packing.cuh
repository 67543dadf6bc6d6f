// Elements of one and two bytes as a GPU holds them: several in a register, taken out and put together by byte
// permutations, one instruction where shifts and masks are two or three.
#pragma once

#include "../common/low_precision.h"
#include "access.cuh"

namespace shardops {

// Bytes of two words, b's above a's, chosen by the selector's hexadecimal digits, lowest byte first; 8 more: the sign
// of the byte that the digit names.
SHARDOPS_HD uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#else
  const uint64_t bytes = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = (selector >> (4 * i)) & 0xFu;
    const auto byte = static_cast<uint8_t>(bytes >> (8 * (digit & 7u)));
    const uint32_t chosen = digit < 8u ? byte : (byte & 0x80u ? 0xFFu : 0u);
    result |= chosen << (8 * i);
  }
  return result;
#endif
}

// Elements of an array: floats as they are, narrower ones in words.
template <typename T, int kCount>
struct Elements {
  static_assert(sizeof(T) < 4);
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr bool kIsWhole = kCount % kPerWord == 0;  // words; otherwise a single element
  static_assert(kIsWhole || kCount == 1);
  static constexpr int kWords = kIsWhole ? kCount / kPerWord : 1;
  Vector<uint32_t, kWords> words;

  // An element's bits, nothing above them.
  SHARDOPS_MEMBER uint32_t bits(int j) const {
    const uint32_t place = j % kPerWord, word = words[j / kPerWord];
    return sizeof(T) == 1 ? permute(word, 0u, 0x4440u + place) : permute(word, 0u, 0x4410u + 0x22u * place);
  }
  // The same as a signed number.
  SHARDOPS_MEMBER uint32_t signed_bits(int j) const {
    const uint32_t place = j % kPerWord, word = words[j / kPerWord];
    return sizeof(T) == 1 ? permute(word, 0u, 0x8880u + 0x1111u * place) : permute(word, 0u, 0x9910u + 0x2222u * place);
  }
  // In a word's upper half; of two bytes.
  SHARDOPS_MEMBER uint32_t upper(int j) const { return j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xFFFF0000u; }
  // One by one, over zeros.
  SHARDOPS_MEMBER void add(int j, T value) {
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    words[j / kPerWord] |= bits << (8 * sizeof(T) * (j % kPerWord));
  }
  SHARDOPS_MEMBER T get(int j) const {
    const uint32_t found = bits(j);
    T value;
    memcpy(&value, &found, sizeof(T));
    return value;
  }
  // From each word what begins at byte kByte.
  template <int kByte>
  SHARDOPS_MEMBER void pack(const Vector<uint32_t, kCount>& from) {
    if constexpr (!kIsWhole) {
      words[0] = from[0] >> (8 * kByte);
    } else if constexpr (sizeof(T) == 2) {
      constexpr uint32_t kSelector = 0x5410u + 0x1111u * kByte;
      for (int j = 0; j < kCount; j += 2) words[j / 2] = permute(from[j], from[j + 1], kSelector);
    } else {
      constexpr uint32_t kSelector = 0x40u + 0x11u * kByte;
      for (int j = 0; j < kCount; j += 4) {
        words[j / 4] =
            permute(permute(from[j], from[j + 1], kSelector), permute(from[j + 2], from[j + 3], kSelector), 0x5410u);
      }
    }
  }

  SHARDOPS_MEMBER float value(int j) const {
    if constexpr (std::is_same_v<T, Bf16>) return bits_to_float(upper(j));
    return to_float(get(j));
  }
  SHARDOPS_MEMBER void round(const Vector<float, kCount>& values) {
    Vector<uint32_t, kCount> rounded;
    for (int j = 0; j < kCount; ++j) {
      T stored;
      from_float(values[j], stored);
      rounded[j] = stored.bits;
    }
    pack<0>(rounded);
  }
};

template <int kCount>
struct Elements<float, kCount> {
  Vector<float, kCount> values;

  SHARDOPS_MEMBER void add(int j, float value) { values[j] = value; }
  SHARDOPS_MEMBER float get(int j) const { return values[j]; }
  SHARDOPS_MEMBER float value(int j) const { return values[j]; }
  SHARDOPS_MEMBER void round(const Vector<float, kCount>& exact) { values = exact; }
};

// kCount elements that lie one after another.
template <int kCount, typename T>
SHARDOPS_HD Elements<T, kCount> load_elements(const T* source) {
  Elements<T, kCount> loaded;
  if constexpr (std::is_same_v<T, float>) {
    loaded.values = load<kCount>(source);
  } else if constexpr (Elements<T, kCount>::kIsWhole) {
    loaded.words = load<Elements<T, kCount>::kWords>(reinterpret_cast<const uint32_t*>(source));
  } else {
    loaded.words[0] = 0;
    loaded.add(0, load<1>(source)[0]);
  }
  return loaded;
}

template <int kCount, typename T>
SHARDOPS_HD void store_elements(T* target, const Elements<T, kCount>& stored) {
  if constexpr (std::is_same_v<T, float>) {
    store(target, stored.values);
  } else if constexpr (Elements<T, kCount>::kIsWhole) {
    store(reinterpret_cast<uint32_t*>(target), stored.words);
  } else {
    store(target, Vector<T, 1>{stored.get(0)});
  }
}

}  // namespace shardops
