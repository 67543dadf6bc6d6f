// Accesses to global memory, one element or several at once: the only way in which kernels touch it, so that a twin can
// count what is moved.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common/platform.h"
#include "launch.cuh"

#if !defined(SHARDOPS_COUNT_ACCESS)  // the twin's cuda_on_host.h counts
#define SHARDOPS_COUNT_ACCESS(is_store, nbytes) ((void)0)
#endif

namespace shardops {

// What one access can move.
constexpr int kAccessBytes = 16;

// Some elements that lie one after another; as wide as they are, it is loaded and stored by one access, or by several
// of 16 bytes.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < kAccessBytes ? sizeof(T) * kCount : kAccessBytes) Vector {
  T values[kCount];

  SHARDOPS_MEMBER T& operator[](int index) { return values[index]; }
  SHARDOPS_MEMBER const T& operator[](int index) const { return values[index]; }
};

template <int kCount, typename T>
SHARDOPS_HD Vector<T, kCount> load(const T* source) {
  SHARDOPS_COUNT_ACCESS(false, sizeof(T) * kCount);
  return *reinterpret_cast<const Vector<T, kCount>*>(source);
}

// What several threads of a warp load by one access; counted for the one that says so.
template <int kCount, typename T>
SHARDOPS_HD Vector<T, kCount> load_together(const T* source, bool counted) {
  if (counted) SHARDOPS_COUNT_ACCESS(false, sizeof(T) * kCount);
  return *reinterpret_cast<const Vector<T, kCount>*>(source);
}

template <int kCount, typename T>
SHARDOPS_HD void store(T* target, const Vector<T, kCount>& values) {
  SHARDOPS_COUNT_ACCESS(true, sizeof(T) * kCount);
  *reinterpret_cast<Vector<T, kCount>*>(target) = values;
}

// The address if an access of kCount elements is not allowed at it: its bits below the access's width.
template <int kCount, typename T>
SHARDOPS_HD uint32_t misaligned(const T* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address)) & (alignof(Vector<T, kCount>) - 1);
}

}  // namespace shardops
