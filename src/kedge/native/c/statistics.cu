/* All statistics of a value on a device, in one reading: the kernel that `_native` launches.
 *
 * For CUDA it is compiled to PTX by NVRTC, without headers, and shipped as statistics.ptx: `python -m tests.native.kernel` writes
 * that. For HIP it is shipped as it is, and compiled by hiprtc for the card that is there; see Note [Two kinds of cards].
 *
 * # Note [Groups]
 * A thread reads 16 bytes at a time, four times, and adds up groups of 16 numbers in float32 with at most 5 roundings; groups
 * are added up in float64. A group's sum of squares shows whether float32 was enough: if it is not finite, or so small that
 * squares may have vanished, the group is added up in float64, and its NaN and infinities are counted. So each number is read once.
 *
 * # Note [The last block]
 * Each block of threads writes a row of its own. The one that finishes last adds the rows up, in their order, so the bits are the
 * same whichever it is; and it leaves the counter at 0, so that a graph can be replayed. How many blocks there are depends on
 * the number of bytes alone.
 *
 * # Note [Two kinds of cards]
 * What they call differently is in one place, below. Under HIP these are builtins of the compiler, which are the same whether
 * hiprtc's header or none is there. Groups of 32 threads are joined first on all cards, and are never apart in a wavefront of 32
 * or 64: a thread reads from another of its own group, and what comes from beyond is not used. So sums are added up in the same
 * order on all of them. Functions that would be called on NVIDIA's cards, to save code, are part of their callers on AMD's,
 * where a call takes registers and memory for the worst case.
 */
#include "work.h"

#define THREADS 256
#define LOADS 4
#define SMALL 8.077935669463161e-28 /* 2^-90, as in totals.h */
#define INFINITE same_bits<float>(0x7f800000)
#define BUCKETS 83
#define LOWEST (-48)

enum { FULL, NORM, FINITE, DRAW };

/* -- what cards call differently ----------------------------------------------------------------------------- */

#ifdef __HIP__

#ifndef __device__ /* without a header */
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#define APART
#define KERNEL(name) extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS))) void name(const Work work)

typedef unsigned Vector __attribute__((ext_vector_type(4), may_alias)); /* what a thread reads at a time */
typedef double Part;                                                    /* what one block writes and another one reads */

static __device__ unsigned thread() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ unsigned block() { return __builtin_amdgcn_workgroup_id_x(); }
static __device__ unsigned blocks() { return __builtin_amdgcn_grid_size_x() / THREADS; }

/* Waits until all threads of the block are here, and sees what they have written. */
static __device__ void wait_for_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/* Orders what this thread has written and will read against all blocks. */
static __device__ void order_memory() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }

/* Half a number from the thread so much further on, and a whole one; see Note [Two kinds of cards]. */
static __device__ int int_from(int x, int distance) {
    int lane = (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
    return __builtin_amdgcn_ds_bpermute(4 * (lane + distance), x);
}
static __device__ double from_lane(double x, int distance) {
    union {
        double whole;
        int half[2];
    } number = {x};
    number.half[0] = int_from(number.half[0], distance);
    number.half[1] = int_from(number.half[1], distance);
    return number.whole;
}

static __device__ void add_one_to(unsigned *shared) {
    __hip_atomic_fetch_add(shared, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
static __device__ void lower(unsigned long long *shared, unsigned long long to) {
    __hip_atomic_fetch_min(shared, to, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

/* Counts a block; true for the last of them, which leaves the counter at 0. */
static __device__ bool arrives_last(unsigned *counter) {
    unsigned before = __hip_atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
    if (before != blocks() - 1) return false;
    __hip_atomic_store(counter, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    return true;
}

/* A clock that all blocks share, in ticks of `work.tick` seconds. */
static __device__ unsigned long long ticks() {
#if __has_builtin(__builtin_readsteadycounter)
    return __builtin_readsteadycounter();
#else /* before clang 19; cards from gfx11 on lack it */
    return __builtin_amdgcn_s_memrealtime();
#endif
}

#else

#define APART __noinline__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, 4) name(const __grid_constant__ Work work)

typedef uint4 Vector;
typedef volatile double Part;

static __device__ unsigned thread() { return threadIdx.x; }
static __device__ unsigned block() { return blockIdx.x; }
static __device__ unsigned blocks() { return gridDim.x; }
static __device__ void wait_for_block() { __syncthreads(); }
static __device__ void order_memory() { __threadfence(); }
static __device__ double from_lane(double x, int distance) { return __shfl_down_sync(0xffffffffu, x, distance); }
static __device__ void add_one_to(unsigned *shared) { atomicAdd(shared, 1u); }
static __device__ void lower(unsigned long long *shared, unsigned long long to) { atomicMin(shared, to); }
static __device__ bool arrives_last(unsigned *counter) { return atomicInc(counter, blocks() - 1) == blocks() - 1; }

static __device__ unsigned long long ticks() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#endif

/* The bits of a number as another type of the same size. */
template <typename To, typename From> static __device__ To same_bits(From from) {
    union {
        From from;
        To to;
    } number = {from};
    return number.to;
}

/* -- formats ------------------------------------------------------------------------------------------------ */

struct Float32 {
    typedef unsigned Stored;
    typedef float Number;
    static __device__ float widened(unsigned bits) { return same_bits<float>(bits); }
};

struct Float64 {
    typedef unsigned long long Stored;
    typedef double Number;
    static __device__ double widened(unsigned long long bits) { return same_bits<double>(bits); }
};

struct Float16 {
    typedef unsigned short Stored;
    typedef float Number;
    static __device__ float widened(unsigned short bits) {
#ifdef __HIP__
        return (float)same_bits<_Float16>(bits);
#else
        float number;
        asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
        return number;
#endif
    }
};

struct BFloat16 {
    typedef unsigned short Stored;
    typedef float Number;
    static __device__ float widened(unsigned short bits) { return same_bits<float>((unsigned)bits << 16); }
};

/* -- adding up ---------------------------------------------------------------------------------------------- */

static __device__ double infinite() { return (double)INFINITE; }

struct Totals {
    double sum, squares, low, high, nonzero, nonfinite, nan;
};

/* What one thread has seen. */
template <typename Number> struct Seen {
    double sum, squares;
    Number low, high; /* without NaN */
    unsigned nonzero, nonfinite, nan;

    __device__ Seen()
        : sum(0), squares(0), low((Number)INFINITE), high(-(Number)INFINITE), nonzero(0), nonfinite(0), nan(0) {}

    __device__ void add_one(Number x) {
        double wide = (double)x;
        sum += wide;
        squares += wide * wide;
        nonzero += x != 0;
        low = x < low ? x : low;
        high = x > high ? x : high;
        nan += x != x;
        nonfinite += !(wide - wide == 0);
    }

    /* Adds a group of numbers; see Note [Groups]. */
    template <int N> __device__ void add(const Number (&x)[N]) {
        Number part[4] = {0, 0, 0, 0}, square[4] = {0, 0, 0, 0};
        unsigned there = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            part[i & 3] += x[i];
            square[i & 3] += x[i] * x[i];
            there += x[i] != 0;
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
        }
        Number whole = (part[0] + part[1]) + (part[2] + part[3]);
        Number all = (square[0] + square[1]) + (square[2] + square[3]);
        nonzero += there;
        bool enough = all - all == 0 && ((double)all >= SMALL || !there);
        if (enough) {
            sum += (double)whole;
            squares += (double)all;
            return;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            double wide = (double)x[i];
            sum += wide;
            squares += wide * wide;
            nan += x[i] != x[i];
            nonfinite += !(wide - wide == 0);
        }
    }

    __device__ Totals totals() const {
        Totals t = {sum, squares, (double)low, (double)high, (double)nonzero, (double)nonfinite, (double)nan};
        return t;
    }
};

static __device__ void join(Totals &a, const Totals &b) {
    a.sum += b.sum;
    a.squares += b.squares;
    a.low = b.low < a.low ? b.low : a.low;
    a.high = b.high > a.high ? b.high : a.high;
    a.nonzero += b.nonzero;
    a.nonfinite += b.nonfinite;
    a.nan += b.nan;
}

static __device__ Totals nothing() {
    Totals t = {0, 0, infinite(), -infinite(), 0, 0, 0};
    return t;
}

/* Joins what the threads of a block have; thread 0 has the result. */
static __device__ APART void join_block(Totals &t) {
    __shared__ Totals of_warps[THREADS / 32];
#pragma unroll 1
    for (int distance = 16; distance; distance >>= 1) {
        Totals other = {from_lane(t.sum, distance),     from_lane(t.squares, distance),   from_lane(t.low, distance),
                        from_lane(t.high, distance),    from_lane(t.nonzero, distance),   from_lane(t.nonfinite, distance),
                        from_lane(t.nan, distance)};
        join(t, other);
    }
    if (thread() % 32 == 0) of_warps[thread() / 32] = t;
    wait_for_block();
    if (thread() == 0) {
#pragma unroll 1
        for (int warp = 1; warp < THREADS / 32; warp++) join(t, of_warps[warp]);
    }
    wait_for_block();
}

/* -- reading ------------------------------------------------------------------------------------------------ */

/* The place of a number among those of a view, in the order of its dimensions. */
static __device__ APART long long place_of(const Work &work, long long index) {
    if (!work.dims) return index;
    long long place = 0;
#pragma unroll 1
    for (int d = work.dims - 1; d > 0; d--) {
        long long next;
        if ((unsigned long long)index >> 32) {
            next = index / work.size[d];
        } else {
            unsigned size = work.size[d] >> 32 ? 0xffffffffu : (unsigned)work.size[d];
            next = work.size[d] >> 32 ? 0 : (unsigned)index / size;
        }
        place += (index - next * work.size[d]) * work.stride[d];
        index = next;
    }
    return place + index * work.stride[0];
}

/* Sets the bytes of the channels in which one of some numbers is above zero, which lie one after another from this index on. */
template <typename Format>
static __device__ APART void mark(const Work &work, long long index, int numbers) {
    unsigned long long inner = (unsigned long long)work.inner, channels = (unsigned long long)work.channels;
    unsigned long long period = inner * channels, within, channel;
    if ((unsigned long long)index >> 32 || period >> 32) {
        within = (unsigned long long)index % period;
        channel = within / inner;
    } else {
        within = (unsigned)index % (unsigned)period;
        channel = (unsigned)within / (unsigned)inner;
    }
    unsigned long long left = inner - (within - channel * inner);
    const typename Format::Stored *stored = (const typename Format::Stored *)work.numbers + index;
#pragma unroll 1
    for (int i = 0; i < numbers; i++) {
        if (Format::widened(stored[i]) > 0 && !work.active[channel]) work.active[channel] = 1;
        if (--left == 0) {
            left = inner;
            if (++channel == channels) channel = 0;
        }
    }
}

/* Reads this block's numbers where they lie one after another from a multiple of 16 bytes on. */
template <typename Format> static __device__ void read_aligned(const Work &work, Seen<typename Format::Number> &seen) {
    typedef typename Format::Number Number;
    typedef typename Format::Stored Stored;
    const int VECTOR = 16 / sizeof(Stored), CHUNK = CHUNK_BYTES / sizeof(Stored);
    const int GROUP = LOADS * VECTOR < 16 ? LOADS * VECTOR : 16;
    const Stored *numbers = (const Stored *)work.numbers;
    long long whole = work.count / CHUNK;
    for (long long chunk = block(); chunk < whole; chunk += blocks()) {
        long long first = chunk * CHUNK + thread() * VECTOR;
        Stored stored[LOADS][VECTOR];
#pragma unroll
        for (int load = 0; load < LOADS; load++)
            *(Vector *)stored[load] = *(const Vector *)(numbers + first + load * THREADS * VECTOR);
#pragma unroll
        for (int group = 0; group < LOADS * VECTOR / GROUP; group++) {
            Number x[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                int at = group * GROUP + i;
                x[i] = Format::widened(stored[at / VECTOR][at % VECTOR]);
            }
            seen.add(x);
        }
#pragma unroll 1
        for (int load = 0; load < LOADS && work.active; load++) mark<Format>(work, first + load * THREADS * VECTOR, VECTOR);
    }
    if (whole % blocks() != block()) return;
#pragma unroll 1
    for (long long index = whole * CHUNK + thread(); index < work.count; index += THREADS) { /* the rest */
        seen.add_one(Format::widened(numbers[index]));
        if (work.active) mark<Format>(work, index, 1);
    }
}

/* Reads this block's numbers one by one, wherever they lie. */
template <typename Format> static __device__ void read_each(const Work &work, Seen<typename Format::Number> &seen) {
    typedef typename Format::Number Number;
    typedef typename Format::Stored Stored;
    const int CHUNK = CHUNK_BYTES / sizeof(Stored), GROUP = 4;
    const Stored *numbers = (const Stored *)work.numbers;
#pragma unroll 1
    for (long long chunk = block(); chunk * CHUNK < work.count; chunk += blocks()) {
        long long end = (chunk + 1) * CHUNK < work.count ? (chunk + 1) * CHUNK : work.count;
        long long index = chunk * CHUNK + thread();
#pragma unroll 1
        for (; index + (GROUP - 1) * THREADS < end; index += GROUP * THREADS) {
            Number x[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) x[i] = Format::widened(numbers[place_of(work, index + i * THREADS)]);
            seen.add(x);
        }
#pragma unroll 1
        for (; index < end; index += THREADS) seen.add_one(Format::widened(numbers[place_of(work, index)]));
    }
    if (!work.active) return;
    const long long step = (long long)blocks() * THREADS;
#pragma unroll 1
    for (long long index = (long long)block() * THREADS + thread(); index < work.count; index += step) mark<Format>(work, index, 1);
}

/* -- drawn numbers ------------------------------------------------------------------------------------------ */

/* Counts up to THREADS numbers by their powers of two, see Note [Exponents] in `kedge.store.exponents`. */
template <typename Format> static __device__ void draw(const Work &work) {
    __shared__ unsigned counts[BUCKETS + 1];
    for (int i = thread(); i <= BUCKETS; i += THREADS) counts[i] = 0;
    wait_for_block();
    long long index = thread() * work.distance;
    if (index < work.count) {
        double x = (double)Format::widened(((const typename Format::Stored *)work.numbers)[place_of(work, index)]);
        unsigned bits = same_bits<unsigned>((float)x) & 0x7fffffffu;
        int exponent = (int)(bits >> 23), bucket = exponent - 127 - LOWEST + 2;
        bucket = bucket < 1 ? 1 : bucket > BUCKETS - 1 ? BUCKETS - 1 : bucket;
        if (exponent == 0) bucket = 0;
        if (bits && exponent != 255) add_one_to(&counts[bucket]);
        if (x <= work.low || x >= work.high) add_one_to(&counts[BUCKETS]);
    }
    wait_for_block();
    for (int i = thread(); i <= BUCKETS; i += THREADS) work.drawn[i] = (unsigned short)counts[i];
}

/* -- the kernel --------------------------------------------------------------------------------------------- */

static __device__ void write_row(const Work &work, const Totals &t, unsigned long long begun) {
    double missing = infinite() - infinite(), repeats = (double)work.repeats;
    bool single = work.count == 1 && work.repeats == 1; /* such as a loss: its norm alone would lose the sign */
    bool full = work.what == FULL, squared = work.what != FINITE, spoiled = t.nan > 0;
    work.row[0] = work.what != NORM || single ? t.sum * repeats : missing;
    work.row[1] = squared ? t.squares * repeats : missing;
    work.row[2] = full && !spoiled ? t.low : missing;
    work.row[3] = full && !spoiled ? t.high : missing;
    work.row[4] = full ? t.nonzero * repeats : missing;
    work.row[5] = squared ? t.nonfinite * repeats : missing;
    work.row[6] = squared ? t.nan * repeats : missing;
    work.row[7] = (double)(ticks() - begun) * work.tick;
}

/* Writes this block's part; true in the block that is the last. */
static __device__ bool is_last(const Work &work, const Totals &t, unsigned long long begun) {
    __shared__ bool last;
    if (thread() == 0) {
        Part *part = work.parts + (long long)block() * ROW;
        part[0] = t.sum;
        part[1] = t.squares;
        part[2] = t.low;
        part[3] = t.high;
        part[4] = t.nonzero;
        part[5] = t.nonfinite;
        part[6] = t.nan;
        part[7] = same_bits<double>(begun);
        order_memory();
        last = arrives_last(work.arrived);
    }
    wait_for_block();
    return last;
}

template <typename Format> static __device__ void measure(const Work &work) {
    __shared__ unsigned long long first;
    unsigned long long begun = ticks();
    if (work.drawn && block() == 0) draw<Format>(work);
    if (work.what == DRAW) return;
    Seen<typename Format::Number> seen;
    if (work.dims || (unsigned long long)work.numbers % 16)
        read_each<Format>(work, seen);
    else
        read_aligned<Format>(work, seen);
    Totals t = seen.totals();
    join_block(t);
    if (blocks() > 1) {
        if (!is_last(work, t, begun)) return;
        order_memory();
        if (thread() == 0) first = ~0ull;
        wait_for_block();
        t = nothing();
#pragma unroll 1
        for (unsigned block = thread(); block < blocks(); block += THREADS) {
            Part *part = work.parts + (long long)block * ROW;
            Totals other = {part[0], part[1], part[2], part[3], part[4], part[5], part[6]};
            join(t, other);
            lower(&first, same_bits<unsigned long long>((double)part[7]));
        }
        join_block(t);
        begun = first;
    }
    if (thread() == 0) write_row(work, t, begun);
}

KERNEL(statistics_float32) { measure<Float32>(work); }
KERNEL(statistics_float64) { measure<Float64>(work); }
KERNEL(statistics_float16) { measure<Float16>(work); }
KERNEL(statistics_bfloat16) { measure<BFloat16>(work); }
