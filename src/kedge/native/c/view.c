#include "view.h"

#include <string.h>

void add_dim(View *view, int64_t size, int64_t stride) {
    view->numbers *= size;
    if (size == 1) return;
    if (stride == 0) {
        view->numbers /= size;
        view->repeats *= size;
        return;
    }
    view->size[view->dims] = size;
    view->stride[view->dims++] = stride;
}

static void sort(View *view) {
    for (int i = 1; i < view->dims; i++) {
        int64_t size = view->size[i], stride = view->stride[i];
        int j = i;
        for (; j > 0 && view->stride[j - 1] < stride; j--) {
            view->size[j] = view->size[j - 1];
            view->stride[j] = view->stride[j - 1];
        }
        view->size[j] = size;
        view->stride[j] = stride;
    }
}

void simplify(View *view) {
    sort(view);
    int last = 0;
    for (int i = 1; i < view->dims; i++) {
        if (view->stride[last] == view->size[i] * view->stride[i]) {
            view->size[last] *= view->size[i];
            view->stride[last] = view->stride[i];
        } else {
            last++;
            view->size[last] = view->size[i];
            view->stride[last] = view->stride[i];
        }
    }
    if (view->dims) view->dims = last + 1;
}

void seek(const View *view, Cursor *cursor, int64_t number) {
    size_t width = size_of(view->kind);
    cursor->at = view->data;
    for (int d = view->dims - 1; d >= 0; d--) {
        cursor->index[d] = number % view->size[d];
        number /= view->size[d];
        if (d < view->dims - 1) cursor->at += cursor->index[d] * view->stride[d] * (int64_t)width;
    }
}

void next_run(const View *view, Cursor *cursor, size_t width) {
    cursor->index[view->dims - 1] = 0;
    for (int d = view->dims - 2; d >= 0; d--) {
        cursor->at += view->stride[d] * (int64_t)width;
        if (++cursor->index[d] < view->size[d]) return;
        cursor->index[d] = 0;
        cursor->at -= view->size[d] * view->stride[d] * (int64_t)width;
    }
}

#define COPY(TYPE)                                                        \
    {                                                                     \
        const TYPE *from = (const TYPE *)cursor->at + start * stride;     \
        TYPE *into = (TYPE *)to;                                          \
        for (size_t i = 0; i < run; i++) into[i] = from[(int64_t)i * stride]; \
    }

/* Copies a run of numbers; of a short one the last piece overlaps the one before. */
static inline void copy(char *to, const char *from, size_t bytes) {
    if (bytes >= 256) {
        memcpy(to, from, bytes);
    } else if (bytes >= 16) {
        for (size_t i = 0; i + 16 <= bytes; i += 16) memcpy(to + i, from + i, 16);
        memcpy(to + bytes - 16, from + bytes - 16, 16);
    } else if (bytes >= 8) {
        memcpy(to, from, 8);
        memcpy(to + bytes - 8, from + bytes - 8, 8);
    } else if (bytes >= 4) {
        memcpy(to, from, 4);
        memcpy(to + bytes - 4, from + bytes - 4, 4);
    } else {
        memcpy(to, from, 2);
    }
}

void gather(const View *view, Cursor *cursor, size_t n, void *to) {
    int inner = view->dims - 1;
    int64_t stride = view->stride[inner], size = view->size[inner];
    size_t width = size_of(view->kind);
    while (n) {
        int64_t start = cursor->index[inner];
        size_t run = (size_t)(size - start) < n ? (size_t)(size - start) : n;
        if (stride == 1)
            copy(to, cursor->at + start * (int64_t)width, run * width);
        else if (width == 4)
            COPY(uint32_t)
        else if (width == 8)
            COPY(uint64_t)
        else
            COPY(uint16_t)
        to = (char *)to + run * width;
        n -= run;
        cursor->index[inner] += (int64_t)run;
        if (cursor->index[inner] == size) next_run(view, cursor, width);
    }
}
