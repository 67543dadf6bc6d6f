// CUDA on a CPU, for the twins of the kernels: their files, compiled as C++ beside this header, run here unchanged.
// Threads of a block run one after the other; where they wait for each other they are fibers, or, with
// SHARDOPS_TWIN_THREADS, threads of the operating system, so that ThreadSanitizer sees a race in shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#if defined(SHARDOPS_TWIN_THREADS)
#include <barrier>
#include <thread>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time
#define SHARDOPS_COUNT_ACCESS(is_store, nbytes) ::cuda_on_host::count_access(is_store, nbytes)

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

inline thread_local Index3 threadIdx;
inline Index3 blockIdx, blockDim, gridDim;

namespace cuda_on_host {

constexpr int kWarp = 32;

// ---- counting ----

struct Traffic {
  std::atomic<int64_t> loaded{0}, stored{0};           // bytes
  std::atomic<int64_t> wide_loads{0}, wide_stores{0};  // accesses of at least 8 bytes
};

inline Traffic& traffic() {
  static Traffic counted;
  return counted;
}

inline void count_access(bool is_store, int64_t nbytes) {
  Traffic& counted = traffic();
  (is_store ? counted.stored : counted.loaded).fetch_add(nbytes, std::memory_order_relaxed);
  if (nbytes >= 8) (is_store ? counted.wide_stores : counted.wide_loads).fetch_add(1, std::memory_order_relaxed);
}

inline std::atomic<int64_t>& launches() {
  static std::atomic<int64_t> counted{0};
  return counted;
}

// How large a chip launchers see; SHARDOPS_TWIN_MULTIPROCESSORS sets it.
inline int multiprocessors() {
  const char* wanted = std::getenv("SHARDOPS_TWIN_MULTIPROCESSORS");
  return wanted == nullptr ? 2 : std::atoi(wanted);
}

// ---- threads that wait for each other ----

#if defined(SHARDOPS_TWIN_THREADS)

class Barrier {
 public:
  explicit Barrier(int count) : barrier_(count) {}
  void wait() { barrier_.arrive_and_wait(); }

 private:
  std::barrier<> barrier_;
};

inline void run_together(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

#else

// Fibers, which go round: one that waits passes on to the next one that has not ended. Begun by makecontext, then
// switched by _longjmp, which, unlike swapcontext, makes no system call.
class Fibers {
 public:
  Fibers(int count, const std::function<void(int)>& body) : body_(body), fibers_(count), left_(count) {
    for (int i = 0; i < count; ++i) {
      Fiber& fiber = fibers_[i];
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = stack(i);
      fiber.start.uc_stack.ss_size = kStack;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, reinterpret_cast<void (*)()>(&Fibers::enter), 0);
    }
  }

  void run() {
    active() = this;
    if (_setjmp(home_) == 0) go_to(0);
    active() = nullptr;
  }

  // Lets the others run first.
  void pass_on() {
    Fiber& self = fibers_[current_];
    const int next = next_of(current_);
    if (next == current_) {
      std::fprintf(stderr, "cuda_on_host: thread %d waits for threads that have ended\n", current_);
      std::abort();
    }
    if (_setjmp(self.resume) == 0) go_to(next);
  }

  static Fibers*& active() {
    static Fibers* fibers = nullptr;
    return fibers;
  }

 private:
  static constexpr size_t kStack = 64 * 1024;

  struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool has_started = false;
    bool has_ended = false;
  };

  // Kept from block to block.
  static char* stack(size_t index) {
    static std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() <= index) stacks.push_back(std::make_unique<char[]>(kStack));
    return stacks[index].get();
  }

  static void enter() {
    Fibers& fibers = *active();
    const int self = fibers.current_;
    fibers.body_(self);
    fibers.fibers_[self].has_ended = true;
    if (--fibers.left_ == 0) _longjmp(fibers.home_, 1);
    fibers.go_to(fibers.next_of(self));
  }

  int next_of(int index) const {
    const int count = static_cast<int>(fibers_.size());
    int next = (index + 1) % count;
    while (fibers_[next].has_ended && next != index) next = (next + 1) % count;
    return next;
  }

  void go_to(int next) {
    current_ = next;
    threadIdx = Index3{static_cast<unsigned>(next)};
    Fiber& fiber = fibers_[next];
    if (fiber.has_started) _longjmp(fiber.resume, 1);
    fiber.has_started = true;
    setcontext(&fiber.start);
  }

  const std::function<void(int)>& body_;
  std::vector<Fiber> fibers_;
  jmp_buf home_;
  int current_ = 0;
  int left_;
};

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}

  void wait() {
    if (++arrived_ == count_) {
      arrived_ = 0;
      ++generation_;
      return;
    }
    const int64_t mine = generation_;
    while (generation_ == mine) Fibers::active()->pass_on();
  }

 private:
  int count_;
  int arrived_ = 0;
  int64_t generation_ = 0;
};

inline void run_together(int count, const std::function<void(int)>& body) { Fibers(count, body).run(); }

#endif

// The barriers of one block, and the slots through which the threads of a warp exchange values.
struct Block {
  struct Warp {
    Barrier barrier{kWarp};
    // Two sets, which exchanges take in turn: when one is written again, all have read it before the barrier between.
    uint64_t slots[2][kWarp] = {};
    uint32_t exchanges[kWarp] = {};
  };

  explicit Block(int threads) : barrier(threads) {
    for (int i = 0; i < threads; i += kWarp) warps.push_back(std::make_unique<Warp>());
  }

  Barrier barrier;
  std::vector<std::unique_ptr<Warp>> warps;
};

inline Block*& block() {
  static Block* current = nullptr;
  return current;
}

inline Block& talking_block() {
  if (block() == nullptr) {
    std::fprintf(stderr, "cuda_on_host: a kernel whose launch says that its threads do not talk waits for one\n");
    std::abort();
  }
  return *block();
}

// The value that lane `source` of this thread's warp gives.
template <typename T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Block::Warp& warp = *talking_block().warps[threadIdx.x / kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  uint64_t* slots = warp.slots[warp.exchanges[lane]++ % 2];
  std::memcpy(&slots[lane], &value, sizeof(T));
  warp.barrier.wait();
  std::memcpy(&value, &slots[source % kWarp], sizeof(T));
  return value;
}

// Returns null, or the text of SHARDOPS_TWIN_LAUNCH_ERROR: no launch succeeds then.
template <bool kTalks, typename Kernel, typename Arguments>
const char* run(Kernel* kernel, int64_t blocks, int threads, const Arguments& arguments) {
  if (const char* error = std::getenv("SHARDOPS_TWIN_LAUNCH_ERROR")) return error;
  launches().fetch_add(1);
  gridDim = Index3{static_cast<unsigned>(blocks)};
  blockDim = Index3{static_cast<unsigned>(threads)};
  for (int64_t index = 0; index < blocks; ++index) {
    blockIdx = Index3{static_cast<unsigned>(index)};
    if (kTalks) {
      Block current(threads);
      block() = &current;
      run_together(threads, [&](int thread) {
        threadIdx = Index3{static_cast<unsigned>(thread)};
        kernel(arguments);
      });
      block() = nullptr;
    } else {
      for (int thread = 0; thread < threads; ++thread) {
        threadIdx = Index3{static_cast<unsigned>(thread)};
        kernel(arguments);
      }
    }
  }
  return nullptr;
}

}  // namespace cuda_on_host

// SHARDOPS_TWIN_NO_SYNC leaves the block's barriers out, to show that the race is then found.
inline void __syncthreads() {
#if !defined(SHARDOPS_TWIN_NO_SYNC)
  cuda_on_host::talking_block().barrier.wait();
#endif
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return cuda_on_host::exchange(value, static_cast<int>(threadIdx.x % cuda_on_host::kWarp) ^ mask);
}

template <typename T>
T __shfl_down_sync(unsigned, T value, int delta) {
  const int lane = static_cast<int>(threadIdx.x % cuda_on_host::kWarp);
  return cuda_on_host::exchange(value, lane + delta < cuda_on_host::kWarp ? lane + delta : lane);
}

inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value) {
  for (int width = cuda_on_host::kWarp / 2; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(mask, value, width);
    value = other > value ? other : value;
  }
  return value;
}

inline uint32_t __reduce_min_sync(unsigned mask, uint32_t value) { return ~__reduce_max_sync(mask, ~value); }
