#include "device.h"

#include "dlpack.h"
#include "tensors.h"

/* The functions of CUDA's driver or of HIP's runtime, whose signatures are the same but for places: where a thread's calls go
 * is a context to the one, and the number of a device, an int, to the other. An int is passed as an intptr_t is, and written to
 * the lower half of one that was 0. Each function returns 0 where it has done what it was asked for. */
static struct {
    int kind;
    int (*launch)(void *kernel, unsigned x, unsigned y, unsigned z, unsigned wide, unsigned high, unsigned deep,
                  unsigned shared, void *stream, void **arguments, void **extra);
    int (*fill_bytes)(uint64_t address, unsigned char byte, size_t bytes, void *stream);
    int (*current_place)(intptr_t *place);
    int (*go_to)(intptr_t place);
    int (*capturing)(void *stream, int *status);
    int (*current_stream)(int kind, int32_t index, void **stream); /* PyTorch's, unless a test has its own */
} driver;

enum { THREADS = 256 };

int driver_kind(void) {
    return driver.kind;
}

int connect_driver(PyObject *const *args, Py_ssize_t given) {
    void *found[6];
    long kind;
    if (takes(given, 7, 7, "connect_driver(kind, launch, fill_bytes, current_place, go_to, capturing, current_stream)"))
        return -1;
    if (number_of(args, given, 0, 0, &kind)) return -1;
    for (int i = 0; i < 6; i++) {
        found[i] = PyLong_AsVoidPtr(args[i + 1]);
        if (PyErr_Occurred()) return -1;
    }
    void *functions[] = {&driver.launch, &driver.fill_bytes, &driver.current_place,
                         &driver.go_to,  &driver.capturing,  &driver.current_stream};
    for (int i = 0; i < 6; i++) memcpy(functions[i], &found[i], sizeof found[i]);
    driver.kind = (int)kind;
    return 0;
}

/* The arguments of `use_device` without the first. */
int open_device(Device *device, PyObject *const *args, Py_ssize_t given) {
    if (takes(given, 9, 9, "use_device(index, place, tick, kernels, rows, arrived, parts, first, room, parts_room)")) return -1;
    Device opened = {.place = (intptr_t)PyLong_AsVoidPtr(args[0])};
    if (!PyErr_Occurred()) opened.tick = PyFloat_AsDouble(args[1]);
    for (int kind = 0; !PyErr_Occurred() && kind < KINDS; kind++) {
        PyObject *kernel = PyTuple_GetItem(args[2], kind);
        if (kernel) opened.kernels[kind] = PyLong_AsVoidPtr(kernel);
    }
    if (!PyErr_Occurred()) opened.rows = PyLong_AsVoidPtr(args[3]);
    if (!PyErr_Occurred()) opened.arrived = PyLong_AsVoidPtr(args[4]);
    if (!PyErr_Occurred()) opened.parts = PyLong_AsVoidPtr(args[5]);
    if (!PyErr_Occurred()) opened.used = PyLong_AsLongLong(args[6]);
    if (!PyErr_Occurred()) opened.room = PyLong_AsLongLong(args[7]);
    if (!PyErr_Occurred()) opened.parts_room = PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred()) return -1;
    *device = opened;
    return 0;
}

static bool knows_stream(const Device *device, const void *stream) {
    for (int i = 0; i < MOST_STREAMS && i < device->streams_taken; i++)
        if (device->streams[i] == stream) return true;
    return false;
}

int take_stream(Device *device, int index) {
    void *stream = NULL;
    if (driver.current_stream(driver.kind, index, &stream)) return -1;
    if (knows_stream(device, stream)) return 0;
    device->streams[device->streams_taken++ % MOST_STREAMS] = stream;
    return 1;
}

/* How many blocks of threads read a value: as many as there are pieces of it, up to a limit. */
static int64_t blocks_for(const View *view) {
    int64_t pieces = (view->numbers * (int64_t)size_of(view->kind) + CHUNK_BYTES - 1) / CHUNK_BYTES;
    return pieces < MOST_PARTS ? pieces : MOST_PARTS;
}

/* Takes the rows that a value needs: a LAUNCH_ code. */
static int take_rows(Device *device, const Work *work, int64_t blocks, const Extras *extras, Launched *launched) {
    int64_t parts = blocks > 1 ? blocks : 0, active = (extras->channels + (int)sizeof(double) * ROW - 1) / ((int)sizeof(double) * ROW);
    int64_t next = device->used;
    *launched = (Launched){-1, -1, -1, extras->channels};
    if (work->what != ONLY_DRAW) launched->row = next++;
    if (extras->draws) {
        launched->drawn = next;
        next += DRAWN_ROWS;
    }
    if (extras->channels) {
        launched->active = next;
        next += active;
    }
    if (next > device->room || device->parts_used + parts > device->parts_room) return LAUNCH_NO_TABLE;
    device->used = next;
    device->parts_used += parts;
    return LAUNCHED;
}

/* Launches a value's kernel at the place of its device. */
static int queue(const Device *device, Work *work, int64_t blocks, int kind, int64_t active_rows, void *stream) {
    void *arguments[] = {work};
    intptr_t before = 0;
    if (driver.current_place(&before)) return -1;
    bool elsewhere = before != device->place;
    if (elsewhere && driver.go_to(device->place)) return -1;
    int failed = 0;
    if (work->active) failed = driver.fill_bytes((uint64_t)(uintptr_t)work->active, 0, (size_t)active_rows * ROW * sizeof(double), stream);
    if (!failed) failed = driver.launch(device->kernels[kind], (unsigned)blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL);
    if (elsewhere) driver.go_to(before);
    return failed;
}

int launch_on(Device *device, int index, const View *view, int what, const Extras *extras, Launched *launched) {
    if (view->dims > DEVICE_DIMS) return LAUNCH_REFUSED;
    void *stream = NULL;
    int capturing = 0;
    if (driver.current_stream(driver.kind, index, &stream)) return LAUNCH_FAILED;
    if (driver.capturing(stream, &capturing)) return LAUNCH_REFUSED;
    if (capturing) return LAUNCH_CAPTURED;
    if (!device->kernels[0] || !knows_stream(device, stream)) return LAUNCH_NO_TABLE;

    int64_t blocks = what == ONLY_DRAW ? 1 : blocks_for(view);
    Work work = {.numbers = view->data,
                 .count = view->numbers,
                 .repeats = view->repeats,
                 .distance = spacing(view->numbers, DRAWN),
                 .low = extras->low,
                 .high = extras->high,
                 .tick = device->tick,
                 .inner = extras->inner,
                 .channels = extras->channels,
                 .what = what,
                 .dims = is_dense(view) ? 0 : view->dims};
    for (int d = 0; d < work.dims; d++) {
        work.size[d] = view->size[d];
        work.stride[d] = view->stride[d];
    }
    work.parts = device->parts + device->parts_used * ROW;
    int taken = take_rows(device, &work, blocks, extras, launched);
    if (taken != LAUNCHED) return taken;
    if (launched->row >= 0) {
        work.row = device->rows + launched->row * ROW;
        work.arrived = device->arrived + launched->row;
    }
    if (launched->drawn >= 0) work.drawn = (unsigned short *)(device->rows + launched->drawn * ROW);
    if (launched->active >= 0) work.active = (unsigned char *)(device->rows + launched->active * ROW);

    const Device opened = *device; /* others may give it another table meanwhile */
    int64_t active_rows = device->used - launched->active;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = queue(&opened, &work, blocks, view->kind, active_rows, stream);
    Py_END_ALLOW_THREADS
    return failed ? LAUNCH_REFUSED : LAUNCHED;
}
