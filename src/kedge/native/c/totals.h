/* What one pass over numbers gives, and what the passes are given. */
#ifndef KEDGE_TOTALS_H
#define KEDGE_TOTALS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* The statistics of some numbers, in the order of a row of a table. */
typedef struct {
    double sum, sumsq; /* of all numbers: NaN or infinite where one is */
    double min, max;   /* NaN where one is NaN */
    double nonzero;    /* NaN counts as non-zero */
    double nonfinite;      /* NaN and infinities */
    double nan;
    double count;
} Totals;

#define COLUMNS (sizeof(Totals) / sizeof(double))

typedef enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, KINDS } Kind;

/* What a pass computes. NORM fills sumsq, nonfinite, nan and count alone. */
typedef enum { FULL, NORM, PASSES } Pass;

/* The most numbers that a kernel is given at once: its counts are 32 bits wide, and float sums are checked once a block. */
#define BLOCK 4096

/* Reads n contiguous numbers, 1 <= n <= BLOCK, and overwrites *out. */
typedef void (*Kernel)(const void *data, size_t n, Totals *out);

/* The kernels of one instruction set. */
typedef struct {
    const char *name;
    Kernel of[PASSES][KINDS];
} Kernels;

extern const Kernels SCALAR;
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define KEDGE_X86
extern const Kernels AVX2, AVX512;
#endif
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__)
#define KEDGE_NEON
extern const Kernels NEON;
#endif

static inline size_t size_of(Kind kind) {
    return kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2;
}

/* A sum of squares below this may have lost squares that are subnormal in float32. */
#define SMALL 0x1p-90

static inline float bits_to_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat16(uint16_t half) {
    return bits_to_float((uint32_t)half << 16);
}

static inline float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13); /* infinities and NaN */
    if (rest >= 0x400) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
    float magnitude = (float)rest * 0x1p-24f; /* subnormal: a multiple of 2^-24, exact in float32 */
    return sign ? -magnitude : magnitude;
}

#endif
