/* One number at a time: for every processor. */
#include "totals.h"

#define NAMED(x) scalar_##x
#define LANES 1
#define WIDTH_OF_DOUBLES 1
#define INT int32_t
#define LONG int64_t
#define FLOATS float
#define DOUBLES double
#define INTS INT
#define LONGS LONG
#define LOAD_FLOAT32(p) (*(p))
#define LOAD_FLOAT64(p) (*(p))
#define LOAD_FLOAT16(p) from_float16(*(p))
#define LOAD_BFLOAT16(p) from_bfloat16(*(p))
#define MIN_FLOATS(a, b) ((b) < (a) ? (b) : (a))
#define MAX_FLOATS(a, b) ((b) > (a) ? (b) : (a))
#define MIN_DOUBLES MIN_FLOATS
#define MAX_DOUBLES MAX_FLOATS
#define COUNT_EQUAL_FLOATS(counts, x, y) counts += (x) == (y)
#define COUNT_EQUAL_DOUBLES COUNT_EQUAL_FLOATS
#define SUMS_OF_FLOATS double
#define ADD_FLOATS(sums, x) sums += (double)(x)
#define ADD_SQUARES_OF_FLOATS(sums, x) sums += (double)(x) * (double)(x)
#include "kinds.h"

const Kernels SCALAR = KERNELS("scalar");
