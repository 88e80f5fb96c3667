/* Note [Active channels]
 *
 * A channel is active as soon as one number above zero is found, so healthy channels cost a few numbers each. Where
 * channels lie side by side, as in a batch of vectors, rows are read until every channel is active: while many are
 * not, all channels of a row are compared, which is fast; then those alone that are still open.
 *
 * A number is above zero if its bits, as an unsigned integer, lie between those of zero and of infinity: one comparison, the
 * same for every format, and false for NaN.
 */
#include "channels.h"

#include <string.h>

#define ROWS 16  /* of which all channels are compared before looking how many are left */
#define RUN 256  /* numbers that are compared before looking whether one was found */

#define DEFINE(WORD, HIGHEST, NAME)                                                                              \
    static inline int NAME##_above(WORD bits) { return (WORD)(bits - 1) < (WORD)(HIGHEST); }                     \
                                                                                                                 \
    static int NAME##_any(const WORD *at, int64_t n, int64_t stride) {                                           \
        for (int64_t i = 0; i < n; i += RUN) {                                                                   \
            int64_t end = n - i < RUN ? n : i + RUN;                                                             \
            int found = 0;                                                                                       \
            if (stride == 1)                                                                                     \
                for (int64_t k = i; k < end; k++) found |= NAME##_above(at[k]);                                  \
            else                                                                                                 \
                for (int64_t k = i; k < end; k++) found |= NAME##_above(at[k * stride]);                         \
            if (found) return 1;                                                                                 \
        }                                                                                                        \
        return 0;                                                                                                \
    }                                                                                                            \
                                                                                                                 \
    static uint8_t NAME##_one(const View *view) {                                                                \
        if (!view->dims) return (uint8_t)NAME##_above(*(const WORD *)view->data);                                \
        int inner = view->dims - 1;                                                                              \
        Cursor cursor;                                                                                           \
        seek(view, &cursor, 0);                                                                                  \
        for (int64_t done = 0; done < view->numbers; done += view->size[inner]) {                                \
            if (NAME##_any((const WORD *)cursor.at, view->size[inner], view->stride[inner])) return 1;           \
            next_run(view, &cursor, sizeof(WORD));                                                               \
        }                                                                                                        \
        return 0;                                                                                                \
    }                                                                                                            \
                                                                                                                 \
    static void NAME##_side_by_side(const View *rows, int64_t channels, uint8_t *active, int64_t *open) {        \
        int64_t left = channels;                                                                                 \
        Cursor cursor;                                                                                           \
        seek(rows, &cursor, 0);                                                                                  \
        for (int64_t row = 0; row < rows->numbers && left; row++) {                                              \
            const WORD *at = (const WORD *)place(rows, &cursor, sizeof(WORD));                                   \
            if (left * 4 > channels) {                                                                           \
                for (int64_t c = 0; c < channels; c++) active[c] |= (uint8_t)NAME##_above(at[c]);                \
                if (row % ROWS == ROWS - 1) left = still_open(active, channels, open);                           \
            } else {                                                                                             \
                int64_t kept = 0;                                                                                \
                for (int64_t i = 0; i < left; i++) {                                                             \
                    if (NAME##_above(at[open[i]]))                                                               \
                        active[open[i]] = 1;                                                                     \
                    else                                                                                         \
                        open[kept++] = open[i];                                                                  \
                }                                                                                                \
                left = kept;                                                                                     \
            }                                                                                                    \
            step(rows, &cursor, sizeof(WORD));                                                                   \
        }                                                                                                        \
    }                                                                                                            \
                                                                                                                 \
    static void NAME##_active(const View *others, int64_t channels, int64_t stride, uint8_t *active, int64_t *open) { \
        if (stride == 1 && (!others->dims || others->stride[others->dims - 1] != 1)) {                           \
            NAME##_side_by_side(others, channels, active, open);                                                 \
            return;                                                                                              \
        }                                                                                                        \
        View one = *others;                                                                                      \
        for (int64_t c = 0; c < channels; c++) {                                                                 \
            one.data = others->data + c * stride * (int64_t)sizeof(WORD);                                        \
            active[c] = NAME##_one(&one);                                                                        \
        }                                                                                                        \
    }

/* Lists the channels that are not active; returns how many. */
static int64_t still_open(const uint8_t *active, int64_t channels, int64_t *open) {
    int64_t n = 0;
    for (int64_t c = 0; c < channels; c++)
        if (!active[c]) open[n++] = c;
    return n;
}

DEFINE(uint32_t, 0x7f800000u, float32)
DEFINE(uint64_t, 0x7ff0000000000000u, float64)
DEFINE(uint16_t, 0x7c00u, float16)
DEFINE(uint16_t, 0x7f80u, bfloat16)

void active_channels(const View *others, int64_t channels, int64_t stride, uint8_t *active, int64_t *open) {
    memset(active, 0, (size_t)channels);
    switch (others->kind) {
    case FLOAT32: float32_active(others, channels, stride, active, open); return;
    case FLOAT64: float64_active(others, channels, stride, active, open); return;
    case FLOAT16: float16_active(others, channels, stride, active, open); return;
    default: bfloat16_active(others, channels, stride, active, open);
    }
}
