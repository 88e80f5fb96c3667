/* PyTorch's tensors: which of them can be read, where their numbers are, and their statistics.
 *
 * Tensors are described by PyTorch through DLPack's table of C functions, without a call of Python's: where their numbers
 * are, of which format, in which layout. Whatever is not plain numbers in this process's memory is refused.
 */
#ifndef KEDGE_TENSORS_H
#define KEDGE_TENSORS_H

#include "python.h"
#include "view.h"

/* From how many numbers on other threads of Python run meanwhile. */
#define RELEASED (1 << 17)

enum { WHAT_FULL, WHAT_NORM, WHAT_FINITE, ONLY_DRAW };

/* The instruction set in use. */
extern const Kernels *kernels;

/* Takes in Tensor, Parameter, is_neg, is_conj and get_num_threads: 0, or -1 with an exception set. */
int connect_tensors(PyObject *const *args);

/* Where PyTorch's function is that tells a device's current stream; NULL for none. */
void *current_stream_function(void);

/* Opens a tensor's numbers: 1, or 0 if it is none that can be read, or -1 with an exception set. */
int open_view(PyObject *tensor, View *view);

/* Opens a tensor's numbers, also on a device of the driver's, whose index is set; -1 for this process's memory. As open_view.
 *
 * On a device the channels of a dimension, unless that is -1, are counted and their distance is set, and a tensor is refused
 * that has no such dimension or whose numbers are not one after another.
 */
int open_anywhere(PyObject *tensor, long dim, View *view, int *device, int64_t *channels, int64_t *distance);

/* Opens the numbers of the first channel of a tensor, with how many channels there are and their distance; as open_view. */
int open_channels(PyObject *tensor, long dim, View *first, int64_t *channels, int64_t *distance);

/* Measures a view into a row of COLUMNS numbers: 0, or -1 with an exception set. */
int measure_view(const View *view, int what, double *row);

/* Measures a tensor into a row; as open_view. */
int measure(PyObject *tensor, int what, double *row);

#endif
