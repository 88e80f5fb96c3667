/* The statistics of a view. */
#ifndef KEDGE_REDUCE_H
#define KEDGE_REDUCE_H

#include "view.h"

/* The instruction sets of this processor, the best last, ended by NULL. */
const Kernels *const *instruction_sets(void);

/* Returns 0, or -1 where there is no memory.
 *
 * The result does not depend on the number of threads.
 */
int reduce(const View *view, const Kernels *kernels, Pass pass, int threads, Totals *out);

/* From how many numbers on further threads help. */
#define SHARED (1 << 21)

#endif
