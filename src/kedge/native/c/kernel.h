/* The kernels of one number format on one instruction set; included once for each, by kinds.h.
 *
 * Expects: KERNEL(pass) names a function; ELEMENT is a number as stored, LOAD(p) reads WIDTH of them as a VECTOR of
 * REAL, TO_DOUBLE reads one; MIN, MAX on vectors; COUNTS, a vector of counters, each a COUNTER, with
 * COUNT_EQUAL(counts, x, y); SUMS, the doubles of one vector, with ADD_WIDE(sums, x) and ADD_SQUARES(sums, x).
 * WIDE_IS_SAME says that REAL is double already. Those of the format are undefined at the end.
 *
 * Note [Blocks that are read again]
 *
 * Sums go: 16 vectors into 4 in REAL, these into one, that into doubles; at most 8 roundings in REAL a number. For floats that
 * is exact enough as long as nothing overflows or vanishes, which the totals of a block show: a NaN, an infinity or an
 * overflow makes its sum or its sum of squares non-finite, and squares that lose bits below the smallest normal float32
 * lie far below SMALL. Such a block is read again, with all sums in double, and NaN and infinities are counted.
 * Blocks of doubles are read again only where their sum is not finite.
 */

#define ADD(k)                    \
    {                             \
        VECTOR x = LOAD(at + k * WIDTH); \
        s##k += x;                \
        q##k += x * x;            \
        low = MIN(low, x);        \
        high = MAX(high, x);      \
        COUNT_EQUAL(zeros, x, zero); \
    }

#define ADD_SQUARE(k)             \
    {                             \
        VECTOR x = LOAD(at + k * WIDTH); \
        q##k += x * x;            \
    }

static double KERNEL(total)(const SUMS *sums) {
    double each[WIDTH], total = 0;
    __builtin_memcpy(each, sums, sizeof each);
    for (int i = 0; i < WIDTH; i++) total += each[i];
    return total;
}

static size_t KERNEL(counted)(const COUNTS *counts) {
    COUNTER each[WIDTH];
    size_t total = 0;
    __builtin_memcpy(each, counts, sizeof each);
    for (int i = 0; i < WIDTH; i++) total += (size_t)each[i];
    return total;
}

static void KERNEL(extremes)(const VECTOR *low, const VECTOR *high, Totals *t) {
    REAL lows[WIDTH], highs[WIDTH];
    __builtin_memcpy(lows, low, sizeof lows);
    __builtin_memcpy(highs, high, sizeof highs);
    for (int i = 0; i < WIDTH; i++) {
        t->min = lows[i] < t->min ? lows[i] : t->min;
        t->max = highs[i] > t->max ? highs[i] : t->max;
    }
}

/* Reads a block with all sums in double; the difference of a number to itself is zero if it is finite. */
static void KERNEL(again)(const void *data, size_t n, Totals *out) {
    const ELEMENT *at = data, *end = at + n;
    const VECTOR zero = {0};
    SUMS sum = {0}, sumsq = {0};
    VECTOR low = zero + (REAL)INFINITY, high = zero - (REAL)INFINITY;
    COUNTS zeros = {0}, finite = {0}, ordered = {0};
    for (; at + WIDTH <= end; at += WIDTH) {
        VECTOR x = LOAD(at), none = x - x;
        ADD_WIDE(sum, x);
        ADD_SQUARES(sumsq, x);
        low = MIN(low, x);
        high = MAX(high, x);
        COUNT_EQUAL(zeros, x, zero);
        COUNT_EQUAL(finite, none, zero);
        COUNT_EQUAL(ordered, x, x);
    }
    Totals t = {KERNEL(total)(&sum), KERNEL(total)(&sumsq), INFINITY, -INFINITY, 0, 0, 0, (double)n};
    KERNEL(extremes)(&low, &high, &t);
    size_t none = KERNEL(counted)(&zeros), good = KERNEL(counted)(&finite), numbers = KERNEL(counted)(&ordered);
    for (; at < end; at++) {
        double x = TO_DOUBLE(*at);
        t.sum += x;
        t.sumsq += x * x;
        t.min = x < t.min ? x : t.min;
        t.max = x > t.max ? x : t.max;
        none += x == 0;
        good += x - x == 0;
        numbers += x == x;
    }
    t.nonzero = (double)(n - none);
    t.nonfinite = (double)(n - good);
    t.nan = (double)(n - numbers);
    if (numbers < n) t.min = t.max = NAN;
    *out = t;
}

static void KERNEL(full)(const void *data, size_t n, Totals *out) {
    const ELEMENT *at = data, *end = at + n;
    const VECTOR zero = {0};
    SUMS sum = {0}, sumsq = {0};
    VECTOR low = zero + (REAL)INFINITY, high = zero - (REAL)INFINITY;
    COUNTS zeros = {0};
    while (at + 16 * WIDTH <= end) {
        VECTOR s0 = zero, s1 = zero, s2 = zero, s3 = zero, q0 = zero, q1 = zero, q2 = zero, q3 = zero;
        for (int i = 0; i < 4; i++, at += 4 * WIDTH) {
            ADD(0) ADD(1) ADD(2) ADD(3)
        }
        ADD_WIDE(sum, (s0 + s1) + (s2 + s3));
        ADD_WIDE(sumsq, (q0 + q1) + (q2 + q3));
    }
    VECTOR s0 = zero, s1 = zero, s2 = zero, s3 = zero, q0 = zero, q1 = zero, q2 = zero, q3 = zero;
    for (; at + 4 * WIDTH <= end; at += 4 * WIDTH) {
        ADD(0) ADD(1) ADD(2) ADD(3)
    }
    for (; at + WIDTH <= end; at += WIDTH) ADD(0)
    ADD_WIDE(sum, (s0 + s1) + (s2 + s3));
    ADD_WIDE(sumsq, (q0 + q1) + (q2 + q3));

    Totals t = {KERNEL(total)(&sum), KERNEL(total)(&sumsq), INFINITY, -INFINITY, 0, 0, 0, (double)n};
    KERNEL(extremes)(&low, &high, &t);
    size_t none = KERNEL(counted)(&zeros);
    for (; at < end; at++) {
        double x = TO_DOUBLE(*at);
        t.sum += x;
        t.sumsq += x * x;
        t.min = x < t.min ? x : t.min;
        t.max = x > t.max ? x : t.max;
        none += x == 0;
    }
    t.nonzero = (double)(n - none);
    *out = t;
    if (!isfinite(t.sum) || (!WIDE_IS_SAME && (!isfinite(t.sumsq) || (t.sumsq < SMALL && none < n))))
        KERNEL(again)(data, n, out);
}

static void KERNEL(norm)(const void *data, size_t n, Totals *out) {
    const ELEMENT *at = data, *end = at + n;
    const VECTOR zero = {0};
    SUMS sumsq = {0};
    while (at + 16 * WIDTH <= end) {
        VECTOR q0 = zero, q1 = zero, q2 = zero, q3 = zero;
        for (int i = 0; i < 4; i++, at += 4 * WIDTH) {
            ADD_SQUARE(0) ADD_SQUARE(1) ADD_SQUARE(2) ADD_SQUARE(3)
        }
        ADD_WIDE(sumsq, (q0 + q1) + (q2 + q3));
    }
    VECTOR q0 = zero, q1 = zero, q2 = zero, q3 = zero;
    for (; at + 4 * WIDTH <= end; at += 4 * WIDTH) {
        ADD_SQUARE(0) ADD_SQUARE(1) ADD_SQUARE(2) ADD_SQUARE(3)
    }
    for (; at + WIDTH <= end; at += WIDTH) ADD_SQUARE(0)
    ADD_WIDE(sumsq, (q0 + q1) + (q2 + q3));
    double total = KERNEL(total)(&sumsq);
    for (; at < end; at++) {
        double x = TO_DOUBLE(*at);
        total += x * x;
    }
    *out = (Totals){.sumsq = total, .count = (double)n};
    if (!isfinite(total) || (!WIDE_IS_SAME && total < SMALL)) KERNEL(again)(data, n, out);
}

#undef ADD
#undef ADD_SQUARE
#undef KERNEL
#undef ELEMENT
#undef LOAD
#undef TO_DOUBLE
