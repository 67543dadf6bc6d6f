// The kernel tables, one for each instruction set of capability.h and in its order.
#include "capability.h"
#include "kernels.h"

#define SHARDOPS_DECLARE(isa)                                                                                   \
  namespace isa {                                                                                               \
  void sharded_adam(const AdamFormat&, const AdamTensor&, const AdamScalars&, const Dither&, int64_t, int64_t); \
  void cast_copy(void*, Dtype, const void*, Dtype, int64_t, const float*, bool);                                \
  double norm_block(const void*, Dtype, int64_t, Norm);                                                         \
  }
#define SHARDOPS_TABLE(isa) \
  CpuKernels { isa::sharded_adam, isa::cast_copy, isa::norm_block }

namespace shardops {

SHARDOPS_DECLARE(isa_default)
#if defined(__x86_64__)
SHARDOPS_DECLARE(isa_avx2)
SHARDOPS_DECLARE(isa_avx512)
#endif

const CpuKernels& cpu_kernels() {
  static const CpuKernels tables[] = {
      SHARDOPS_TABLE(isa_default),
#if defined(__x86_64__)
      SHARDOPS_TABLE(isa_avx2),
      SHARDOPS_TABLE(isa_avx512),
#endif
  };
  static const CpuKernels& chosen = tables[chosen_cpu_capability()];
  return chosen;
}

}  // namespace shardops
