/* AVX-512: 16 floats or 8 doubles at a time. */
#include "totals.h"

#ifdef KEDGE_X86
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx2,fma,f16c")
#endif

typedef struct {
    __m512d low, high;
} SumsAvx512;

#define NAMED(x) avx512_##x
#define LANES 16
#define WIDTH_OF_DOUBLES 8
#define INT int32_t
#define LONG int64_t
#define FLOATS __m512
#define DOUBLES __m512d
#define INTS __m512i
#define LONGS __m512i
#define LOAD_FLOAT32(p) _mm512_loadu_ps(p)
#define LOAD_FLOAT64(p) _mm512_loadu_pd(p)
#define LOAD_FLOAT16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define LOAD_BFLOAT16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define MIN_FLOATS _mm512_min_ps
#define MAX_FLOATS _mm512_max_ps
#define MIN_DOUBLES _mm512_min_pd
#define MAX_DOUBLES _mm512_max_pd
#define COUNT_EQUAL_FLOATS(counts, x, y) \
    counts = _mm512_mask_add_epi32(counts, _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), counts, _mm512_set1_epi32(1))
#define COUNT_EQUAL_DOUBLES(counts, x, y) \
    counts = _mm512_mask_add_epi64(counts, _mm512_cmp_pd_mask(x, y, _CMP_EQ_OQ), counts, _mm512_set1_epi64(1))
#define SUMS_OF_FLOATS SumsAvx512
#define LOW_HALF(x) _mm512_cvtps_pd(_mm512_castps512_ps256(x))
#define HIGH_HALF(x) _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)))
#define ADD_FLOATS(sums, x)          \
    {                                \
        __m512 part = x;             \
        sums.low += LOW_HALF(part);  \
        sums.high += HIGH_HALF(part); \
    }
#define ADD_SQUARES_OF_FLOATS(sums, x)                   \
    {                                                    \
        __m512d low = LOW_HALF(x), high = HIGH_HALF(x);  \
        sums.low += low * low;                           \
        sums.high += high * high;                        \
    }
#include "kinds.h"

const Kernels AVX512 = KERNELS("avx512");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
