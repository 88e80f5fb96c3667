/* Numbers in memory, in any layout. */
#ifndef KEDGE_VIEW_H
#define KEDGE_VIEW_H

#include <stdbool.h>

#include "totals.h"

#define MOST_DIMS 32

/* Each dimension has a size above 1; their order, outermost first, is one that reads memory forwards.
 *
 * A dimension of stride 0 is none of the view's: its numbers are read once, and counted `repeats` times.
 */
typedef struct {
    const char *data;
    Kind kind;
    int dims;
    int64_t size[MOST_DIMS], stride[MOST_DIMS]; /* strides in numbers */
    int64_t numbers;                            /* without repeats */
    int64_t repeats;
} View;

/* Whether the view fills its memory without gaps. */
static inline bool is_dense(const View *view) {
    return view->dims == 0 || (view->dims == 1 && view->stride[0] == 1);
}

/* Appends a dimension. */
void add_dim(View *view, int64_t size, int64_t stride);

/* Sorts the dimensions of a view by their stride, and joins those that can be read as one. */
void simplify(View *view);

/* The place of a number in a view. */
typedef struct {
    int64_t index[MOST_DIMS];
    const char *at; /* the first number of the innermost dimension */
} Cursor;

void seek(const View *view, Cursor *cursor, int64_t number);

/* Moves to the next run of the innermost dimension; past the last one back to the first. */
void next_run(const View *view, Cursor *cursor, size_t width);

/* Where the number is at which the cursor stands. */
static inline const char *place(const View *view, const Cursor *cursor, size_t width) {
    if (!view->dims) return cursor->at;
    return cursor->at + cursor->index[view->dims - 1] * view->stride[view->dims - 1] * (int64_t)width;
}

/* Moves to the next number. */
static inline void step(const View *view, Cursor *cursor, size_t width) {
    if (view->dims && ++cursor->index[view->dims - 1] == view->size[view->dims - 1]) next_run(view, cursor, width);
}

/* Copies the next n numbers, one after another. */
void gather(const View *view, Cursor *cursor, size_t n, void *to);

#endif
