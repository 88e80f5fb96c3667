/* Note [Blocks and spans]
 *
 * Numbers are read in blocks, and blocks are added up to spans, whose borders depend on nothing but how many numbers there
 * are. Threads take spans as they come; at the end their totals are added in the order of the spans. So the result is
 * the same to the last bit, whoever computed which span.
 *
 * Threads are started for one call and joined in it: there is no pool that a fork would lose.
 */
#include "reduce.h"

#include <stdatomic.h>
#include <stdlib.h>

#if defined(_WIN32)
#define KEDGE_ONE_THREAD
#else
#include <pthread.h>
#include <signal.h>
#endif

#ifdef KEDGE_X86
#include <cpuid.h>
#endif

#define SPAN (1 << 16)
#define MOST_SPANS 1024
#define MOST_THREADS 64
#define GATHERED 2048 /* numbers that are copied at once, so that they stay in the nearest cache */

const Kernels *const *instruction_sets(void) {
    static const Kernels *sets[4];
    if (!sets[0]) {
        int n = 0;
        sets[n++] = &SCALAR;
#ifdef KEDGE_X86
        __builtin_cpu_init();
        unsigned a, b, features = 0, d; /* not every compiler knows F16C by name */
        __get_cpuid(1, &a, &b, &features, &d);
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && features & bit_F16C) {
            sets[n++] = &AVX2;
            if (__builtin_cpu_supports("avx512f")) sets[n++] = &AVX512;
        }
#endif
#ifdef KEDGE_NEON
        sets[n++] = &NEON;
#endif
    }
    return sets;
}

static const Totals NOTHING = {0, 0, INFINITY, -INFINITY, 0, 0, 0, 0};

static void add(Totals *to, const Totals *more) {
    to->sum += more->sum;
    to->sumsq += more->sumsq;
    /* Comparisons with NaN are false: once one is NaN, it stays. */
    if (!(to->min <= more->min) && to->min == to->min) to->min = more->min;
    if (!(to->max >= more->max) && to->max == to->max) to->max = more->max;
    to->nonzero += more->nonzero;
    to->nonfinite += more->nonfinite;
    to->nan += more->nan;
    to->count += more->count;
}

typedef struct {
    const View *view;
    Kernel kernel;
    int64_t span;
    int64_t spans;
    Totals *totals;
    _Atomic int64_t next;
} Work;

static void reduce_span(const Work *work, int64_t span, Totals *out) {
    const View *view = work->view;
    int64_t at = span * work->span, end = at + work->span;
    if (end > view->numbers) end = view->numbers;
    *out = NOTHING;
    Totals block;
    if (is_dense(view)) {
        size_t width = size_of(view->kind);
        for (; at < end; at += BLOCK) {
            size_t n = end - at < BLOCK ? (size_t)(end - at) : BLOCK;
            work->kernel(view->data + (size_t)at * width, n, &block);
            add(out, &block);
        }
        return;
    }
    double buffer[GATHERED];
    Cursor cursor;
    seek(view, &cursor, at);
    for (; at < end; at += GATHERED) {
        size_t n = end - at < GATHERED ? (size_t)(end - at) : GATHERED;
        gather(view, &cursor, n, buffer);
        work->kernel(buffer, n, &block);
        add(out, &block);
    }
}

static void *take_spans(void *argument) {
    Work *work = argument;
    for (int64_t span; (span = atomic_fetch_add(&work->next, 1)) < work->spans;)
        reduce_span(work, span, &work->totals[span]);
    return NULL;
}

#ifdef KEDGE_ONE_THREAD
static void run(Work *work, int threads) {
    (void)threads;
    take_spans(work);
}
#else
static void run(Work *work, int threads) {
    pthread_t started[MOST_THREADS];
    int n = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    while (n < threads - 1 && n < MOST_THREADS && pthread_create(&started[n], NULL, take_spans, work) == 0) n++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    take_spans(work);
    for (int i = 0; i < n; i++) pthread_join(started[i], NULL);
}
#endif

static void repeat(Totals *totals, double times) {
    totals->sum *= times;
    totals->sumsq *= times;
    totals->nonzero *= times;
    totals->nonfinite *= times;
    totals->nan *= times;
    totals->count *= times;
}

int reduce(const View *view, const Kernels *kernels, Pass pass, int threads, Totals *out) {
    Work work = {.view = view, .kernel = kernels->of[pass][view->kind], .span = SPAN};
    if (view->numbers > (int64_t)SPAN * MOST_SPANS)
        work.span = (view->numbers / MOST_SPANS / BLOCK + 1) * BLOCK;
    work.spans = (view->numbers + work.span - 1) / work.span;
    if (work.spans == 1) {
        reduce_span(&work, 0, out);
    } else {
        work.totals = malloc((size_t)work.spans * sizeof *work.totals);
        if (!work.totals) return -1;
        if (threads > 1 && view->numbers >= SHARED)
            run(&work, threads);
        else
            take_spans(&work);
        *out = NOTHING;
        for (int64_t i = 0; i < work.spans; i++) add(out, &work.totals[i]);
        free(work.totals);
    }
    if (view->repeats != 1) repeat(out, (double)view->repeats);
    return 0;
}
