/* The two kernels of one number format on one instruction set; included once for each, by scalar.c, avx2.c and so on.
 *
 * Expects: KERNEL(pass) names a function; ELEMENT is a number as stored, LOAD(p) reads WIDTH of them as a VECTOR of
 * REAL, TO_DOUBLE reads one; MIN, MAX on vectors; COUNTS, a vector of counters, with COUNT_ZEROS(counts, x), COUNTER
 * being one of them; and where REAL is float SUMS, the doubles of one vector, with ADD_WIDE(sums, x). WIDE_IS_SAME
 * says that REAL is double already. All of these but the includer's own are undefined at the end.
 *
 * Sums go: 16 vectors into 4 in REAL, these into one, that into doubles; at most 8 roundings in REAL a number.
 */

#define ADD(k)                    \
    {                             \
        VECTOR x = LOAD(at + k * WIDTH); \
        s##k += x;                \
        q##k += x * x;            \
        low = MIN(low, x);        \
        high = MAX(high, x);      \
        COUNT_ZEROS(zeros, x);    \
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

    Totals t = {KERNEL(total)(&sum), KERNEL(total)(&sumsq), INFINITY, -INFINITY, 0, 0, (double)n};
    REAL lows[WIDTH], highs[WIDTH];
    COUNTER counts[WIDTH];
    size_t none = 0;
    __builtin_memcpy(lows, &low, sizeof low);
    __builtin_memcpy(highs, &high, sizeof high);
    __builtin_memcpy(counts, &zeros, sizeof zeros);
    for (int i = 0; i < WIDTH; i++) {
        t.min = lows[i] < t.min ? lows[i] : t.min;
        t.max = highs[i] > t.max ? highs[i] : t.max;
        none += (size_t)counts[i];
    }
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
    /* See Note [Blocks that are read again]. */
    if (!isfinite(t.sum) || (!WIDE_IS_SAME && (!isfinite(t.sumsq) || (t.sumsq < SMALL && none < n))))
        careful(KIND, data, n, out);
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
    if (!isfinite(total) || (!WIDE_IS_SAME && total < SMALL)) careful(KIND, data, n, out);
}

#undef ADD
#undef ADD_SQUARE
#undef KERNEL
#undef KIND
#undef ELEMENT
#undef LOAD
#undef TO_DOUBLE
