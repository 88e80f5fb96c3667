/* Some numbers of a view, evenly spread, and what is counted among them. */
#ifndef KEDGE_DRAW_H
#define KEDGE_DRAW_H

#include "view.h"

/* How many numbers of a value are drawn for its histogram, at most. */
#define DRAWN 256

/* In how many buckets their powers of two are counted, see Note [Exponents] in `kedge.store.exponents`. */
#define BUCKETS 83

/* Calls `take(state, number)` with at most so many numbers, those at every multiple of one distance; returns how many. */
typedef void (*Taker)(void *state, double number);
int64_t draw(const View *view, int64_t most, Taker take, void *state);

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
