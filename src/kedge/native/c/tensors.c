#include "tensors.h"

#include "device.h"
#include "dlpack.h"
#include "reduce.h"

const Kernels *kernels;
static PyObject *plain[2]; /* torch.Tensor and torch.nn.Parameter; subclasses may mean something else */
static const DLPackExchange *exchange;
static PyObject *is_neg, *is_conj, *get_num_threads;

void *current_stream_function(void) {
    return exchange ? exchange->current_stream : NULL;
}

int connect_tensors(PyObject *const *args) {
    PyObject *capsule = PyObject_GetAttrString(args[0], DLPACK_ATTRIBUTE);
    if (!capsule) return -1;
    const DLPackExchange *table = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
    Py_DECREF(capsule);
    if (!table) return -1;
    if (table->major != DLPACK_MAJOR || !table->describe) {
        PyErr_Format(PyExc_RuntimeError, "this PyTorch describes its tensors by DLPack %u, not 1", (unsigned)table->major);
        return -1;
    }
    PyObject **kept[] = {&plain[0], &plain[1], &is_neg, &is_conj, &get_num_threads};
    for (int i = 0; i < 5; i++) {
        PyObject *before = *kept[i];
        Py_INCREF(args[i]);
        *kept[i] = args[i];
        Py_XDECREF(before);
    }
    exchange = table;
    return 0;
}

static int is_true(PyObject *method, PyObject *tensor) {
    PyObject *result = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    if (!result) return -1;
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

static int kind_of(const DLTensor *dl, Kind *kind, bool *is_complex) {
    *is_complex = dl->code == DLPACK_COMPLEX;
    int bits = *is_complex ? dl->bits / 2 : dl->bits;
    if (dl->lanes != 1) return 0;
    if (dl->code == DLPACK_BFLOAT && bits == 16) return *kind = BFLOAT16, 1;
    if (dl->code != DLPACK_FLOAT && !*is_complex) return 0;
    switch (bits) {
    case 16: return *kind = FLOAT16, 1;
    case 32: return *kind = FLOAT32, 1;
    case 64: return *kind = FLOAT64, 1;
    default: return 0;
    }
}

/* Describes a tensor: 1, or 0 if it is none whose numbers can be read, or -1 with an exception set. */
static int describe_any(PyObject *tensor, DLTensor *dl, Kind *kind, bool *is_complex) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if ((type != plain[0] && type != plain[1]) || !exchange) return 0;
    if (exchange->describe(tensor, dl) != 0) { /* no storage: sparse, nested, or of a transform */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return -1;
        PyErr_Clear();
        return 0;
    }
    if (dl->device_type != DLPACK_CPU && dl->device_type != driver_kind()) return 0;
    if (!dl->data || dl->ndim >= MOST_DIMS || !kind_of(dl, kind, is_complex)) return 0;
    if ((uintptr_t)((const char *)dl->data + dl->byte_offset) % size_of(*kind)) return 0;
    for (int d = 0; d < dl->ndim; d++)
        if (dl->shape[d] < 1 || (dl->strides && dl->strides[d] < 0)) return 0;
    int lazy = is_true(is_neg, tensor); /* a bit says that the numbers are meant with the other sign */
    if (lazy == 0 && *is_complex) lazy = is_true(is_conj, tensor);
    return lazy < 0 ? -1 : !lazy;
}

/* The same for tensors in this process's memory alone. */
static int describe(PyObject *tensor, DLTensor *dl, Kind *kind, bool *is_complex) {
    int readable = describe_any(tensor, dl, kind, is_complex);
    return readable == 1 && dl->device_type != DLPACK_CPU ? 0 : readable;
}

static int64_t stride_of(const DLTensor *dl, int dim) {
    if (dl->strides) return dl->strides[dim];
    int64_t stride = 1;
    for (int d = dl->ndim - 1; d > dim; d--) stride *= dl->shape[d];
    return stride;
}

/* The view of a tensor, of one dimension only the first element if `without` is not -1. */
static void view_of(const DLTensor *dl, Kind kind, bool is_complex, int without, View *view) {
    view->data = (const char *)dl->data + dl->byte_offset;
    view->kind = kind;
    view->dims = 0;
    view->numbers = view->repeats = 1;
    for (int d = 0; d < dl->ndim; d++)
        if (d != without) add_dim(view, dl->shape[d], stride_of(dl, d) * (is_complex ? 2 : 1));
    if (is_complex) add_dim(view, 2, 1);
    simplify(view);
}

int open_view(PyObject *tensor, View *view) {
    DLTensor dl;
    Kind kind;
    bool is_complex;
    int readable = describe(tensor, &dl, &kind, &is_complex);
    if (readable == 1) view_of(&dl, kind, is_complex, -1, view);
    return readable;
}

int open_anywhere(PyObject *tensor, long dim, View *view, int *device, int64_t *channels, int64_t *distance) {
    DLTensor dl;
    Kind kind;
    bool is_complex;
    int readable = describe_any(tensor, &dl, &kind, &is_complex);
    if (readable != 1) return readable;
    view_of(&dl, kind, is_complex, -1, view);
    *device = dl.device_type == DLPACK_CPU ? -1 : dl.device_id;
    *channels = *distance = 0;
    if (dim >= 0 && *device >= 0) {
        if (dim >= dl.ndim || is_complex || !is_dense(view) || view->repeats != 1) return 0;
        *channels = dl.shape[dim];
        *distance = dl.shape[dim] > 1 ? stride_of(&dl, (int)dim) : view->numbers;
    }
    return 1;
}

int open_channels(PyObject *tensor, long dim, View *first, int64_t *channels, int64_t *distance) {
    DLTensor dl;
    Kind kind;
    bool is_complex;
    int readable = describe(tensor, &dl, &kind, &is_complex);
    if (readable != 1) return readable;
    if (is_complex || dim < 0 || dim >= dl.ndim) return 0;
    *channels = dl.shape[dim];
    *distance = stride_of(&dl, (int)dim);
    view_of(&dl, kind, false, (int)dim, first);
    return 1;
}

static int compute(const View *view, Pass pass, Totals *totals) {
    int threads = 1, failed;
    if (view->numbers < RELEASED) {
        failed = reduce(view, kernels, pass, 1, totals);
    } else {
        if (view->numbers >= SHARED) {
            PyObject *number = PyObject_CallNoArgs(get_num_threads);
            if (!number) return -1;
            threads = (int)PyLong_AsLong(number);
            Py_DECREF(number);
            if (PyErr_Occurred()) return -1;
        }
        Py_BEGIN_ALLOW_THREADS
        failed = reduce(view, kernels, pass, threads, totals);
        Py_END_ALLOW_THREADS
    }
    if (failed) PyErr_NoMemory();
    return failed;
}

int measure_view(const View *view, int what, double *row) {
    Totals t;
    bool single = view->numbers == 1 && view->repeats == 1; /* such as a loss: its norm alone would lose the sign */
    if (compute(view, what == WHAT_NORM && !single ? NORM : FULL, &t)) return -1;
    if (what == WHAT_NORM) t.min = t.max = t.nonzero = NAN;
    if (what == WHAT_NORM && !single) t.sum = NAN;
    if (what == WHAT_FINITE) t.sumsq = t.min = t.max = t.nonzero = t.nonfinite = t.nan = NAN;
    double columns[COLUMNS] = {t.sum, t.sumsq, t.min, t.max, t.nonzero, t.nonfinite, t.nan, t.count};
    for (size_t i = 0; i < COLUMNS; i++) row[i] = columns[i];
    return 0;
}

int measure(PyObject *tensor, int what, double *row) {
    View view;
    int readable = open_view(tensor, &view);
    if (readable != 1) return readable;
    return measure_view(&view, what, row) ? -1 : 1;
}
