#include "draw.h"

#include <string.h>

#define LOWEST (-48)

static int64_t common_factor(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static double to_double(const char *at, Kind kind) {
    switch (kind) {
    case FLOAT32: return *(const float *)at;
    case FLOAT64: return *(const double *)at;
    case FLOAT16: return from_float16(*(const uint16_t *)at);
    default: return from_bfloat16(*(const uint16_t *)at);
    }
}

int64_t spacing(int64_t n, int64_t most) {
    int64_t distance = (n + most - 1) / most;
    while (common_factor(distance, n) > 1) distance++;
    return distance;
}

double number_at(const View *view, int64_t index) {
    size_t width = size_of(view->kind);
    if (is_dense(view)) return to_double(view->data + (size_t)index * width, view->kind);
    Cursor cursor;
    seek(view, &cursor, index);
    return to_double(place(view, &cursor, width), view->kind);
}

typedef struct {
    uint16_t buckets[BUCKETS + 1]; /* the last is for what is not finite */
    double low, high;
    int32_t outside;
} Counts;

static inline int bucket_of(int exponent) {
    int bucket = exponent - 127 - LOWEST + 2;
    bucket = bucket < 1 ? 1 : bucket > BUCKETS - 1 ? BUCKETS - 1 : bucket;
    return exponent == 0 ? 0 : exponent == 255 ? BUCKETS : bucket;
}

static void count(void *state, double number) {
    Counts *counts = state;
    float narrow = (float)number;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    bits &= 0x7fffffff;
    counts->buckets[bucket_of((int)(bits >> 23))] += bits != 0;
    counts->outside += number <= counts->low || number >= counts->high;
}

int64_t count_drawn(const View *view, Drawn *drawn) {
    Counts counts = {.low = drawn->low, .high = drawn->high};
    int64_t n = draw(view, DRAWN, count, &counts);
    for (int b = 0; b < BUCKETS; b++) drawn->buckets[b] = (uint16_t)(drawn->buckets[b] + counts.buckets[b]);
    drawn->outside += counts.outside;
    return n;
}

size_t encode_buckets(const uint16_t buckets[BUCKETS], unsigned char content[1 + 2 * BUCKETS]) {
    int first = 0, end = BUCKETS;
    while (first < BUCKETS && !buckets[first]) first++;
    while (end > first && !buckets[end - 1]) end--;
    if (first == BUCKETS) return 0;
    content[0] = (unsigned char)first;
    for (int b = first; b < end; b++) {
        content[1 + 2 * (b - first)] = (unsigned char)(buckets[b] & 0xff);
        content[2 + 2 * (b - first)] = (unsigned char)(buckets[b] >> 8);
    }
    return (size_t)(1 + 2 * (end - first));
}
