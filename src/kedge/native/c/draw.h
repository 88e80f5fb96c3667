/* Some numbers of a view, evenly spread, and what is counted among them. */
#ifndef KEDGE_DRAW_H
#define KEDGE_DRAW_H

#include "view.h"

/* How many numbers of a value are drawn for its histogram, at most. */
#define DRAWN 256

/* In how many buckets their powers of two are counted, see Note [Exponents] in `kedge.store.exponents`. */
#define BUCKETS 83

/* A distance at which at most so many numbers are drawn; it has no factor in common with how many there are, as
 * `kedge.store.exponents.spacing` has it. */
int64_t spacing(int64_t n, int64_t most);

/* How many numbers are drawn from a view, if at most so many are. */
static inline int64_t drawn_of(const View *view, int64_t most) {
    int64_t distance = spacing(view->numbers, most);
    return (view->numbers + distance - 1) / distance;
}

/* The number of a view at an index, in the order of memory. */
double number_at(const View *view, int64_t index);

/* Calls `take(state, number)` with at most so many numbers; returns how many. It is inlined, and so is what takes them. */
static inline __attribute__((always_inline)) int64_t draw(const View *view, int64_t most, void (*take)(void *, double), void *state) {
    int64_t n = view->numbers, distance = spacing(n, most), drawn = 0;
    if (is_dense(view) && view->kind == FLOAT32) { /* nearly all are, and this takes a fifth of the time */
        const float *from = (const float *)view->data;
        for (int64_t i = 0; i < n; i += distance, drawn++) take(state, from[i]);
    } else {
        for (int64_t i = 0; i < n; i += distance, drawn++) take(state, number_at(view, i));
    }
    return drawn;
}

/* What is counted among drawn numbers. */
typedef struct {
    uint16_t *buckets; /* BUCKETS of them, added to */
    double low, high;  /* NaN where `outside` is not asked for */
    int32_t outside;   /* how many are not above `low`, or not below `high`; a NaN is neither */
} Drawn;

/* Counts among at most DRAWN numbers; returns how many were drawn. */
int64_t count_drawn(const View *view, Drawn *drawn);

/* Writes the counts of one value as a recording has them; returns how many bytes they take, 0 where nothing was counted. */
size_t encode_buckets(const uint16_t buckets[BUCKETS], unsigned char content[1 + 2 * BUCKETS]);

#endif
