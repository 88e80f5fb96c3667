/* NEON, which every 64-bit ARM processor has: 4 floats or 2 doubles at a time. */
#include "totals.h"

#ifdef KEDGE_NEON
#include <arm_neon.h>

typedef struct {
    float64x2_t low, high;
} SumsNeon;

#define NAMED(x) neon_##x
#define LANES 4
#define WIDTH_OF_DOUBLES 2
#define INT uint32_t
#define LONG uint64_t
#define FLOATS float32x4_t
#define DOUBLES float64x2_t
#define INTS uint32x4_t
#define LONGS uint64x2_t
#define LOAD_FLOAT32(p) vld1q_f32(p)
#define LOAD_FLOAT64(p) vld1q_f64(p)
#define LOAD_FLOAT16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define LOAD_BFLOAT16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
#define MIN_FLOATS vminq_f32
#define MAX_FLOATS vmaxq_f32
#define MIN_DOUBLES vminq_f64
#define MAX_DOUBLES vmaxq_f64
#define COUNT_EQUAL_FLOATS(counts, x, y) counts = vsubq_u32(counts, vceqq_f32(x, y))
#define COUNT_EQUAL_DOUBLES(counts, x, y) counts = vsubq_u64(counts, vceqq_f64(x, y))
#define SUMS_OF_FLOATS SumsNeon
#define ADD_FLOATS(sums, x)                            \
    {                                                  \
        float32x4_t part = x;                          \
        sums.low += vcvt_f64_f32(vget_low_f32(part));  \
        sums.high += vcvt_high_f64_f32(part);          \
    }
#define ADD_SQUARES_OF_FLOATS(sums, x)                                                     \
    {                                                                                      \
        float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);      \
        sums.low += low * low;                                                             \
        sums.high += high * high;                                                          \
    }
#include "kinds.h"

const Kernels NEON = KERNELS("neon");
#endif
