// What the twins count, for the tests.
#include "cuda_on_host.h"

#define SHARDOPS_EXPORT extern "C" __attribute__((visibility("default")))

SHARDOPS_EXPORT void shardops_twin_reset_traffic() {
  cuda_on_host::Traffic& counted = cuda_on_host::traffic();
  counted.loaded = counted.stored = counted.wide_loads = counted.wide_stores = 0;
  cuda_on_host::launches() = 0;
}

SHARDOPS_EXPORT void shardops_twin_traffic(int64_t* counts) {
  const cuda_on_host::Traffic& counted = cuda_on_host::traffic();
  counts[0] = counted.loaded;
  counts[1] = counted.stored;
  counts[2] = counted.wide_loads;
  counts[3] = counted.wide_stores;
  counts[4] = cuda_on_host::launches();
}
