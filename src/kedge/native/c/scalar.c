/* One number at a time: for every processor; and the careful way, see Note [Blocks that are read again]. */
#include "totals.h"

#define NAMED(x) scalar_##x
#define LANES 1
#define WIDTH_OF_DOUBLES 1
#define INT int32_t
#define LONG int64_t
#define FLOATS float
#define DOUBLES double
#define INTS INT
#define LONGS LONG
#define LOAD_FLOAT32(p) (*(p))
#define LOAD_FLOAT64(p) (*(p))
#define LOAD_FLOAT16(p) from_float16(*(p))
#define LOAD_BFLOAT16(p) from_bfloat16(*(p))
#define MIN_FLOATS(a, b) ((b) < (a) ? (b) : (a))
#define MAX_FLOATS(a, b) ((b) > (a) ? (b) : (a))
#define MIN_DOUBLES MIN_FLOATS
#define MAX_DOUBLES MAX_FLOATS
#define COUNT_ZERO_FLOATS(counts, x) counts += (x) == 0
#define COUNT_ZERO_DOUBLES COUNT_ZERO_FLOATS
#define SUMS_OF_FLOATS double
#define ADD_FLOATS(sums, x) sums += (double)(x)
#include "kinds.h"

const Kernels SCALAR = KERNELS("scalar");

/* So many partial results side by side that the processor does not wait for each addition. */
#define SIDE 8

#define CAREFUL(name, ELEMENT, TO_DOUBLE)                                          \
    static void name(const void *data, size_t n, Totals *out) {                    \
        const ELEMENT *at = data;                                                  \
        double sum[SIDE] = {0}, sumsq[SIDE] = {0}, low[SIDE], high[SIDE];          \
        int64_t nonzero[SIDE] = {0}, nonfinite[SIDE] = {0}, nan[SIDE] = {0};       \
        for (int k = 0; k < SIDE; k++) low[k] = INFINITY, high[k] = -INFINITY;     \
        for (size_t i = 0; i < n; i += SIDE) {                                     \
            int m = n - i < SIDE ? (int)(n - i) : SIDE;                            \
            for (int k = 0; k < m; k++) {                                          \
                double x = TO_DOUBLE(at[i + k]);                                   \
                sum[k] += x;                                                       \
                sumsq[k] += x * x;                                                 \
                low[k] = x < low[k] ? x : low[k];                                  \
                high[k] = x > high[k] ? x : high[k];                               \
                nonzero[k] += x != 0;                                              \
                nonfinite[k] += !isfinite(x);                                      \
                nan[k] += x != x;                                                  \
            }                                                                      \
        }                                                                          \
        Totals t = {0, 0, INFINITY, -INFINITY, 0, 0, (double)n};                   \
        int64_t nans = 0;                                                          \
        for (int k = 0; k < SIDE; k++) {                                           \
            t.sum += sum[k];                                                       \
            t.sumsq += sumsq[k];                                                   \
            t.min = low[k] < t.min ? low[k] : t.min;                               \
            t.max = high[k] > t.max ? high[k] : t.max;                             \
            t.nonzero += (double)nonzero[k];                                       \
            t.nonfinite += (double)nonfinite[k];                                   \
            nans += nan[k];                                                        \
        }                                                                          \
        if (nans) t.min = t.max = NAN;                                             \
        *out = t;                                                                  \
    }

CAREFUL(careful_float32, float, IDENTITY)
CAREFUL(careful_float64, double, IDENTITY)
CAREFUL(careful_float16, uint16_t, FROM_FLOAT16)
CAREFUL(careful_bfloat16, uint16_t, FROM_BFLOAT16)

void careful(Kind kind, const void *data, size_t n, Totals *out) {
    static const Kernel of[KINDS] = {careful_float32, careful_float64, careful_float16, careful_bfloat16};
    of[kind](data, n, out);
}
