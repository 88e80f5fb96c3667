// A card of HIP's for one kernel: runs the source of statistics.cu, as hiprtc would get it, by fibers.
//
// Each thread of a block is a fiber. All run up to a barrier or to a read from another lane, one after another, and go on
// when all are there. It is an error if they do not come to the same place, or if some have ended and others have not.
#include "work.h"

#include <c10/util/Half.h>

#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <chrono>
#include <cstdio>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace wavefronts {

constexpr unsigned kThreads = 256;
constexpr size_t kStack = (32 << 10) + 832; // no power of two, or all stacks would share a few lines of the cache
enum class Stop { kRunning, kBarrier, kLanes, kEnd };

struct Fiber {
  ucontext_t begin;
  jmp_buf at;
  Stop stop;
  int passed[2]; // to other lanes: what is read now, and what comes next
  unsigned turn;
  std::unique_ptr<char[]> stack;
};

// A block of threads, on the thread of its stream.
struct Block {
  std::vector<Fiber> fibers;
  jmp_buf scheduler;
  unsigned wavefront = 64, index = 0, count = 0, current = 0;
  void (*kernel)(Work) = nullptr;
  Work work;
};
thread_local Block the_block;

void stop_at(Stop stop) {
  auto& fiber = the_block.fibers[the_block.current];
  fiber.stop = stop;
  if (_setjmp(fiber.at) == 0) {
    _longjmp(the_block.scheduler, 1);
  }
}

void begin() {
  the_block.kernel(the_block.work);
  stop_at(Stop::kEnd);
}

void go_on(bool first) {
  auto& block = the_block;
  for (block.current = 0; block.current < kThreads; ++block.current) {
    if (_setjmp(block.scheduler) == 0) {
      auto& fiber = block.fibers[block.current];
      if (first) {
        setcontext(&fiber.begin);
      }
      _longjmp(fiber.at, 1);
    }
  }
  for (const auto& fiber : block.fibers) {
    if (fiber.stop != block.fibers[0].stop) {
      std::fputs("threads of a block have come to different places\n", stderr);
      std::abort();
    }
  }
}

void run(void (*kernel)(Work), const Work& work, unsigned blocks, unsigned wavefront) {
  auto& block = the_block;
  block.fibers.resize(kThreads);
  block.kernel = kernel;
  block.work = work;
  block.count = blocks;
  block.wavefront = wavefront;
  for (block.index = 0; block.index < blocks; ++block.index) {
    for (auto& fiber : block.fibers) {
      if (!fiber.stack) {
        fiber.stack.reset(new char[kStack]);
      }
      fiber.turn = 0;
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = fiber.stack.get();
      fiber.begin.uc_stack.ss_size = kStack;
      makecontext(&fiber.begin, begin, 0);
    }
    go_on(true);
    while (block.fibers[0].stop != Stop::kEnd) {
      go_on(false);
    }
  }
}

unsigned lane() {
  return the_block.current % the_block.wavefront;
}

int from_lane(int address, int x) {
  auto& block = the_block;
  auto& fiber = block.fibers[block.current];
  const unsigned turn = fiber.turn++ % 2;
  fiber.passed[turn] = x;
  const unsigned wanted = static_cast<unsigned>(address) / 4 % block.wavefront;
  const unsigned from = block.current - lane() + wanted;
  stop_at(Stop::kLanes);
  return block.fibers[from].passed[turn];
}

} // namespace wavefronts

// What the compiler of HIP has built in.
#define __HIP__ 1
#define __device__
#define __global__
#define __shared__ static thread_local
#define _Float16 c10::Half
#define ext_vector_type(n) vector_size((n) * sizeof(unsigned))
#define __HIP_MEMORY_SCOPE_WORKGROUP 0
#define __HIP_MEMORY_SCOPE_AGENT 0
#define __hip_atomic_fetch_add(at, x, order, scope) __atomic_fetch_add(at, x, order)
#define __hip_atomic_store(at, x, order, scope) __atomic_store_n(at, x, order)
#define __hip_atomic_fetch_min(at, x, order, scope) (*(at) = (x) < *(at) ? (x) : *(at))
#define __builtin_amdgcn_fence(order, scope)
#define __builtin_amdgcn_workitem_id_x() wavefronts::the_block.current
#define __builtin_amdgcn_workgroup_id_x() wavefronts::the_block.index
#define __builtin_amdgcn_grid_size_x() (wavefronts::the_block.count * wavefronts::kThreads)
#define __builtin_amdgcn_s_barrier() wavefronts::stop_at(wavefronts::Stop::kBarrier)
#define __builtin_amdgcn_ds_bpermute(address, x) wavefronts::from_lane(address, x)
#define __builtin_amdgcn_mbcnt_lo(mask, before) ((before) + std::min(wavefronts::lane(), 32u))
#define __builtin_amdgcn_mbcnt_hi(mask, before) ((before) + (wavefronts::lane() > 32 ? wavefronts::lane() - 32 : 0))
#define __builtin_amdgcn_s_memrealtime() (std::chrono::steady_clock::now().time_since_epoch().count() / 10)

namespace card {
#include "statistics.cu"
} // namespace card

#undef __HIP__
#undef __device__
#undef __global__
#undef __shared__
#undef _Float16
#undef APART
#undef KERNEL

namespace sim {

// Runs a kernel for a format, in the order of `Kind`, on memory that the host can read.
void run_kernel(int format, const Work& work, unsigned blocks, unsigned wavefront) {
  void (*kernels[])(Work) = {
      card::statistics_float32, card::statistics_float64, card::statistics_float16, card::statistics_bfloat16};
  wavefronts::run(kernels[format], work, blocks, wavefront);
}

} // namespace sim
