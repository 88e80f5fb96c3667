/* The part of DLPack 1.3 that is used: the layout of a tensor, and the table of functions that its type offers to C.
 *
 * What these structures hold, and in which order, is DLPack's contract with all who use it.
 */
#ifndef KEDGE_DLPACK_H
#define KEDGE_DLPACK_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1, DLPACK_CPU = 1 };
enum { DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_COMPLEX = 5 };

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* strides in elements; may be NULL: then the tensor is compact */
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *to_managed, *from_managed;
    /* Returns 0, or -1 with an exception set. What it fills in is the tensor's, and lives as long. */
    int (*describe)(void *tensor, DLTensor *out);
    void *current_stream;
} DLPackExchange;

#define DLPACK_CAPSULE "dlpack_exchange_api"
#define DLPACK_ATTRIBUTE "__dlpack_c_exchange_api__"

#endif
