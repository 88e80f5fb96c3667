/* All kernels of one instruction set, from what it calls its operations; included once by each.
 *
 * Expects: NAMED(x) makes a name of this set; LANES floats, LANES / 2 doubles in a vector; FLOATS, DOUBLES, INTS, LONGS the
 * vector types; SUMS_OF_FLOATS, ADD_FLOATS(sums, x), ADD_SQUARES_OF_FLOATS(sums, x); and LOAD_, MIN_, MAX_, COUNT_EQUAL_.
 */

#define IDENTITY(x) ((double)(x))
#define FROM_FLOAT16(x) ((double)from_float16(x))
#define FROM_BFLOAT16(x) ((double)from_bfloat16(x))

#define VECTOR FLOATS
#define REAL float
#define WIDTH LANES
#define COUNTS INTS
#define COUNTER INT
#define MIN MIN_FLOATS
#define MAX MAX_FLOATS
#define COUNT_EQUAL COUNT_EQUAL_FLOATS
#define SUMS SUMS_OF_FLOATS
#define ADD_WIDE ADD_FLOATS
#define ADD_SQUARES ADD_SQUARES_OF_FLOATS
#define WIDE_IS_SAME 0

#define KERNEL(x) NAMED(float32_##x)
#define ELEMENT float
#define LOAD LOAD_FLOAT32
#define TO_DOUBLE IDENTITY
#include "kernel.h"

#define KERNEL(x) NAMED(float16_##x)
#define ELEMENT uint16_t
#define LOAD LOAD_FLOAT16
#define TO_DOUBLE FROM_FLOAT16
#include "kernel.h"

#define KERNEL(x) NAMED(bfloat16_##x)
#define ELEMENT uint16_t
#define LOAD LOAD_BFLOAT16
#define TO_DOUBLE FROM_BFLOAT16
#include "kernel.h"

#undef VECTOR
#undef REAL
#undef WIDTH
#undef COUNTS
#undef COUNTER
#undef MIN
#undef MAX
#undef COUNT_EQUAL
#undef SUMS
#undef ADD_WIDE
#undef ADD_SQUARES
#undef WIDE_IS_SAME

#define VECTOR DOUBLES
#define REAL double
#define WIDTH WIDTH_OF_DOUBLES
#define COUNTS LONGS
#define COUNTER LONG
#define MIN MIN_DOUBLES
#define MAX MAX_DOUBLES
#define COUNT_EQUAL COUNT_EQUAL_DOUBLES
#define SUMS DOUBLES
#define ADD_WIDE(sums, x) sums += (x)
#define ADD_SQUARES(sums, x) sums += (x) * (x)
#define WIDE_IS_SAME 1
#define KERNEL(x) NAMED(float64_##x)
#define ELEMENT double
#define LOAD LOAD_FLOAT64
#define TO_DOUBLE IDENTITY
#include "kernel.h"

#define KERNELS(label)                                                                      \
    {                                                                                       \
        label, {                                                                            \
            {NAMED(float32_full), NAMED(float64_full), NAMED(float16_full), NAMED(bfloat16_full)}, \
            {NAMED(float32_norm), NAMED(float64_norm), NAMED(float16_norm), NAMED(bfloat16_norm)}, \
        }                                                                                   \
    }
