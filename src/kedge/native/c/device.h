/* Values on devices: one launch of the kernel in statistics.cu for each, on the program's stream, without a wait.
 *
 * The functions of a driver are looked up by `kedge.native.driver`, which also loads the kernel. Nothing of a vendor's is
 * needed to build this.
 */
#ifndef KEDGE_DEVICE_H
#define KEDGE_DEVICE_H

#include "draw.h"
#include "python.h"
#include "view.h"
#include "work.h"

#define MOST_DEVICES 64
#define MOST_STREAMS 8 /* that are known to run after a table was made ready; others are asked about again */

/* What is known of a device, and where its rows are. */
typedef struct {
    intptr_t place;        /* where the driver's calls have to go for it */
    void *kernels[KINDS];  /* NULL: it has not been opened */
    double tick;           /* the seconds between two readings of its clock */
    double *rows, *parts;  /* addresses on the device */
    unsigned *arrived;     /* one counter a row */
    int64_t room, used;    /* of rows */
    int64_t parts_room, parts_used;
    void *streams[MOST_STREAMS]; /* those on which values may be measured into this table */
    int64_t streams_taken;
} Device;

/* What is asked of a value beside its statistics. */
typedef struct {
    bool draws;
    double low, high; /* NaN: no drawn number is outside */
    int64_t inner;    /* how far apart channels are */
    int32_t channels; /* 0: none are asked for */
} Extras;

/* The rows of a value on its device; -1 for none. */
typedef struct {
    int64_t row, drawn, active, channels;
} Launched;

enum { LAUNCH_FAILED = -1, LAUNCH_REFUSED, LAUNCHED, LAUNCH_NO_TABLE, LAUNCH_CAPTURED };

/* The kind of devices that the driver is of, as DLPack numbers them; 0 while there is no driver. */
int driver_kind(void);

/* Takes in the driver's functions by their addresses: 0, or -1 with an exception set. */
int connect_driver(PyObject *const *args, Py_ssize_t given);

/* Opens a device, or gives it another table: 0, or -1 with an exception set. */
int open_device(Device *device, PyObject *const *args, Py_ssize_t given);

/* Lets values be measured on a device's current stream: 1, 0 if they may already, or -1 with an exception set. */
int take_stream(Device *device, int index);

/* Queues the measuring of a value on a device: a LAUNCH_ code; an exception is set where it is LAUNCH_FAILED.
 *
 * LAUNCH_NO_TABLE is also that of a stream that was not taken. See Note [Streams] in `kedge.actions.measure.launched`.
 * Other threads may run meanwhile; the rows are taken before.
 */
int launch_on(Device *device, int index, const View *view, int what, const Extras *extras, Launched *launched);

#endif
