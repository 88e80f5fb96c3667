/* AVX2 with FMA and F16C: 8 floats or 4 doubles at a time. */
#include "totals.h"

#ifdef KEDGE_X86
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

typedef struct {
    __m256d low, high;
} SumsAvx2;

#define NAMED(x) avx2_##x
#define LANES 8
#define WIDTH_OF_DOUBLES 4
#define INT int32_t
#define LONG int64_t
#define FLOATS __m256
#define DOUBLES __m256d
#define INTS __m256i
#define LONGS __m256i
#define LOAD_FLOAT32(p) _mm256_loadu_ps(p)
#define LOAD_FLOAT64(p) _mm256_loadu_pd(p)
#define LOAD_FLOAT16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define LOAD_BFLOAT16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define MIN_FLOATS _mm256_min_ps
#define MAX_FLOATS _mm256_max_ps
#define MIN_DOUBLES _mm256_min_pd
#define MAX_DOUBLES _mm256_max_pd
#define COUNT_EQUAL_FLOATS(counts, x, y) \
    counts = _mm256_sub_epi32(counts, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_EQ_OQ)))
#define COUNT_EQUAL_DOUBLES(counts, x, y) \
    counts = _mm256_sub_epi64(counts, _mm256_castpd_si256(_mm256_cmp_pd(x, y, _CMP_EQ_OQ)))
#define SUMS_OF_FLOATS SumsAvx2
#define ADD_FLOATS(sums, x)                                                \
    {                                                                      \
        __m256 part = x;                                                   \
        sums.low += _mm256_cvtps_pd(_mm256_castps256_ps128(part));         \
        sums.high += _mm256_cvtps_pd(_mm256_extractf128_ps(part, 1));      \
    }
#define ADD_SQUARES_OF_FLOATS(sums, x)                                     \
    {                                                                      \
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));          \
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));       \
        sums.low += low * low;                                             \
        sums.high += high * high;                                          \
    }
#include "kinds.h"

const Kernels AVX2 = KERNELS("avx2");

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
