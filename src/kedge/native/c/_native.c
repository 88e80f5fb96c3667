/* The Python face: `kedge.native._native`, for every CPython from 3.11 on.
 *
 * Tensors are described by PyTorch through DLPack's table of C functions, without a call of Python's: where their numbers
 * are, of which format, in which layout. Whatever is not plain numbers in this process's memory is refused.
 */
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "channels.h"
#include "dlpack.h"
#include "reduce.h"

/* From how many numbers on other threads of Python run meanwhile. */
#define RELEASED (1 << 17)
#define DRAWN 256

static const Kernels *kernels;
static PyObject *plain[2]; /* torch.Tensor and torch.nn.Parameter; subclasses may mean something else */
static const DLPackExchange *exchange;
static PyObject *is_neg, *is_conj, *get_num_threads;

/* -- what a tensor is --------------------------------------------------------------------------------------- */

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
static int describe(PyObject *tensor, DLTensor *dl, Kind *kind, bool *is_complex) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if ((type != plain[0] && type != plain[1]) || !exchange) return 0;
    if (exchange->describe(tensor, dl) != 0) { /* no storage: sparse, nested, or of a transform */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return -1;
        PyErr_Clear();
        return 0;
    }
    if (dl->device_type != DLPACK_CPU || !dl->data || dl->ndim >= MOST_DIMS || !kind_of(dl, kind, is_complex)) return 0;
    if ((uintptr_t)((const char *)dl->data + dl->byte_offset) % size_of(*kind)) return 0;
    for (int d = 0; d < dl->ndim; d++)
        if (dl->shape[d] < 1 || (dl->strides && dl->strides[d] < 0)) return 0;
    int lazy = is_true(is_neg, tensor); /* a bit says that the numbers are meant with the other sign */
    if (lazy == 0 && *is_complex) lazy = is_true(is_conj, tensor);
    return lazy < 0 ? -1 : !lazy;
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

static int open_view(PyObject *tensor, View *view) {
    DLTensor dl;
    Kind kind;
    bool is_complex;
    int readable = describe(tensor, &dl, &kind, &is_complex);
    if (readable == 1) view_of(&dl, kind, is_complex, -1, view);
    return readable;
}

/* -- statistics --------------------------------------------------------------------------------------------- */

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

enum { WHAT_FULL, WHAT_NORM, WHAT_FINITE };

/* Measures a tensor into a row: 1, or 0 if it is refused, or -1 with an exception set. */
static int measure(PyObject *tensor, int what, double *row, double *count) {
    View view;
    Totals t;
    int readable = open_view(tensor, &view);
    if (readable != 1) return readable;
    bool single = view.numbers == 1 && view.repeats == 1; /* such as a loss: its norm alone would lose the sign */
    if (compute(&view, what == WHAT_NORM && !single ? NORM : FULL, &t)) return -1;
    if (what == WHAT_NORM) t.min = t.max = t.nonzero = NAN;
    if (what == WHAT_NORM && !single) t.sum = NAN;
    if (what == WHAT_FINITE) t.sumsq = t.min = t.max = t.nonzero = t.nonfinite = NAN;
    double columns[COLUMNS] = {t.sum, t.sumsq, t.min, t.max, t.nonzero, t.nonfinite, t.count};
    for (size_t i = 0; i < COLUMNS; i++) row[i] = columns[i];
    *count = t.count;
    return 1;
}

/* Opens a table of doubles, and checks that it has some rows. */
static int open_table(PyObject *table, Py_ssize_t first, Py_ssize_t rows, Py_buffer *buffer) {
    if (PyObject_GetBuffer(table, buffer, PyBUF_WRITABLE | PyBUF_ND | PyBUF_FORMAT)) return -1;
    bool fits = buffer->ndim == 2 && buffer->itemsize == sizeof(double) && buffer->format && buffer->format[0] == 'd' &&
                !buffer->format[1] && buffer->shape[1] == COLUMNS && first >= 0 && rows <= buffer->shape[0] - first;
    if (fits) return 0;
    PyBuffer_Release(buffer);
    PyErr_Format(PyExc_ValueError, "the table has to be of float64, C-contiguous, of %d columns, and to have rows %zd to %zd",
                 (int)COLUMNS, first, first + rows - 1);
    return -1;
}

static int number_of(PyObject *const *args, Py_ssize_t given, Py_ssize_t at, long otherwise, long *out) {
    *out = at < given ? PyLong_AsLong(args[at]) : otherwise;
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

static int takes(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most, const char *signature) {
    if (least <= given && given <= most) return 0;
    PyErr_Format(PyExc_TypeError, "%s was called with %zd arguments", signature, given);
    return -1;
}

static PyObject *measure_into(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long row, what;
    Py_buffer table;
    if (takes(given, 3, 4, "measure_into(table, row, tensor, what=FULL)")) return NULL;
    if (number_of(args, given, 1, 0, &row) || number_of(args, given, 3, WHAT_FULL, &what)) return NULL;
    if (open_table(args[0], row, 1, &table)) return NULL;
    double count = 0;
    int done = measure(args[2], (int)what, (double *)table.buf + row * (Py_ssize_t)COLUMNS, &count);
    PyBuffer_Release(&table);
    return done < 0 ? NULL : PyLong_FromLongLong(done ? (long long)count : 0);
}

static int append_number(PyObject *list, Py_ssize_t number) {
    PyObject *item = PyLong_FromSsize_t(number);
    int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

static PyObject *measure_many(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long first, what;
    Py_buffer table;
    if (takes(given, 3, 4, "measure_many(table, first_row, tensors, what=FULL)")) return NULL;
    if (number_of(args, given, 1, 0, &first) || number_of(args, given, 3, WHAT_FULL, &what)) return NULL;
    PyObject *tensors = PySequence_Tuple(args[2]), *refused = NULL;
    if (!tensors) return NULL;
    Py_ssize_t n = PyTuple_Size(tensors);
    if (open_table(args[0], first, n, &table)) {
        Py_DECREF(tensors);
        return NULL;
    }
    refused = PyList_New(0);
    for (Py_ssize_t i = 0; refused && i < n; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        double count;
        if (tensor == Py_None) continue;
        int done = measure(tensor, (int)what, (double *)table.buf + (first + i) * (Py_ssize_t)COLUMNS, &count);
        if (done < 0 || (done == 0 && append_number(refused, i))) Py_CLEAR(refused);
    }
    PyBuffer_Release(&table);
    Py_DECREF(tensors);
    return refused;
}

static PyObject *squares_and_nonfinite(PyObject *module, PyObject *sequence) {
    (void)module;
    PyObject *tensors = PySequence_Tuple(sequence), *refused = PyList_New(0), *result = NULL;
    double sumsq = 0, nonfinite = 0;
    Py_ssize_t n = tensors ? PyTuple_Size(tensors) : 0;
    bool failed = !tensors || !refused;
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        double row[COLUMNS], count;
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        if (tensor == Py_None) continue;
        int done = measure(tensor, WHAT_NORM, row, &count);
        if (done == 1) {
            sumsq += row[1];
            nonfinite += row[5];
        }
        failed = done < 0 || (done == 0 && append_number(refused, i));
    }
    if (!failed) result = Py_BuildValue("(dLO)", sumsq, (long long)nonfinite, refused);
    Py_XDECREF(tensors);
    Py_XDECREF(refused);
    return result;
}

/* -- channels and drawn numbers ----------------------------------------------------------------------------- */

static PyObject *packed(const uint8_t *active, int64_t channels) {
    Py_ssize_t size = (Py_ssize_t)((channels + 7) / 8);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (!bytes) return NULL;
    char *bits = PyBytes_AsString(bytes);
    for (Py_ssize_t i = 0; i < size; i++) bits[i] = 0;
    for (int64_t c = 0; c < channels; c++)
        if (active[c]) bits[c / 8] = (char)(bits[c / 8] | 0x80 >> c % 8);
    return bytes;
}

static PyObject *channels_above_zero(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long dim;
    DLTensor dl;
    Kind kind;
    bool is_complex;
    if (takes(given, 2, 2, "channels_above_zero(tensor, dim)") || number_of(args, given, 1, 0, &dim)) return NULL;
    int readable = describe(args[0], &dl, &kind, &is_complex);
    if (readable < 0) return NULL;
    if (!readable || is_complex || dim < 0 || dim >= dl.ndim) Py_RETURN_NONE;
    int64_t channels = dl.shape[dim], stride = stride_of(&dl, (int)dim);
    View others;
    view_of(&dl, kind, false, (int)dim, &others);
    uint8_t *active = PyMem_Malloc((size_t)channels);
    int64_t *open = PyMem_Malloc((size_t)channels * sizeof *open);
    PyObject *result = NULL;
    if (!active || !open) {
        PyErr_NoMemory();
    } else {
        if (others.numbers * channels < RELEASED) {
            active_channels(&others, channels, stride, active, open);
        } else {
            Py_BEGIN_ALLOW_THREADS
            active_channels(&others, channels, stride, active, open);
            Py_END_ALLOW_THREADS
        }
        result = packed(active, channels);
    }
    PyMem_Free(active);
    PyMem_Free(open);
    return result;
}

static int64_t common_factor(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static double to_double(const char *at, Kind kind) {
    switch (kind) {
    case FLOAT32: return *(const float *)at;
    case FLOAT64: return *(const double *)at;
    case FLOAT16: return from_float16(*(const uint16_t *)at);
    default: return from_bfloat16(*(const uint16_t *)at);
    }
}

/* Takes numbers at a distance that has no factor in common with how many there are, as `kedge.store.exponents.spacing` has it. */
static int64_t spacing(int64_t n, int64_t most) {
    int64_t distance = (n + most - 1) / most;
    while (common_factor(distance, n) > 1) distance++;
    return distance;
}

/* Writes floats, or doubles where there is room for them instead. */
static int64_t draw(const View *view, int64_t most, float *floats, double *doubles) {
    int64_t n = view->numbers, distance = spacing(n, most), drawn = 0;
    size_t width = size_of(view->kind);
    Cursor cursor;
    if (is_dense(view) && view->kind == FLOAT32) { /* nearly all are, and this takes a fifth of the time */
        const float *from = (const float *)view->data;
        if (doubles)
            for (int64_t i = 0; i < n; i += distance) doubles[drawn++] = from[i];
        else
            for (int64_t i = 0; i < n; i += distance) floats[drawn++] = from[i];
        return drawn;
    }
    for (int64_t i = 0; i < n; i += distance) {
        const char *at = view->data + (size_t)i * width;
        if (!is_dense(view)) {
            seek(view, &cursor, i);
            at = place(view, &cursor, width);
        }
        if (doubles)
            doubles[drawn++] = to_double(at, view->kind);
        else
            floats[drawn++] = (float)to_double(at, view->kind);
    }
    return drawn;
}

static PyObject *draw_into(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long start;
    View view;
    Py_buffer out;
    if (takes(given, 3, 3, "draw_into(numbers, start, tensor)") || number_of(args, given, 1, 0, &start)) return NULL;
    int readable = open_view(args[2], &view);
    if (readable < 0) return NULL;
    if (!readable) return PyLong_FromLong(0);
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE | PyBUF_ND | PyBUF_FORMAT)) return NULL;
    bool fits = out.ndim == 1 && out.itemsize == sizeof(float) && out.format && out.format[0] == 'f' && start >= 0 &&
                out.shape[0] - start >= DRAWN;
    int64_t drawn = fits ? draw(&view, DRAWN, (float *)out.buf + start, NULL) : 0;
    PyBuffer_Release(&out);
    if (fits) return PyLong_FromLongLong(drawn);
    PyErr_Format(PyExc_ValueError, "drawn numbers need room for %d of float32, C-contiguous, from %ld on", DRAWN, start);
    return NULL;
}

/* Draws from many tensors into an array of doubles, one after another; of those refused nothing is drawn. */
static PyObject *draw_many(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long most;
    Py_buffer out;
    if (takes(given, 3, 3, "draw_many(numbers, tensors, most)") || number_of(args, given, 2, 0, &most)) return NULL;
    PyObject *tensors = PySequence_Tuple(args[1]), *counts = NULL;
    if (!tensors) return NULL;
    Py_ssize_t n = PyTuple_Size(tensors);
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE | PyBUF_ND | PyBUF_FORMAT)) {
        Py_DECREF(tensors);
        return NULL;
    }
    if (most < 1 || out.ndim != 1 || out.itemsize != sizeof(double) || !out.format || out.format[0] != 'd' || out.shape[0] / most < n)
        PyErr_Format(PyExc_ValueError, "drawn numbers need room for %zd times %ld of float64, C-contiguous", n, most);
    else
        counts = PyList_New(0);
    int64_t used = 0;
    for (Py_ssize_t i = 0; counts && i < n; i++) {
        View view;
        int readable = open_view(PyTuple_GetItem(tensors, i), &view);
        int64_t drawn = readable == 1 ? draw(&view, most, NULL, (double *)out.buf + used) : 0;
        used += drawn;
        if (readable < 0 || append_number(counts, (Py_ssize_t)drawn)) Py_CLEAR(counts);
    }
    PyBuffer_Release(&out);
    Py_DECREF(tensors);
    return counts;
}

/* How many numbers have which power of two, see Note [Exponents] in `kedge.store.exponents`, as that writes it down. */
#define LOWEST (-48)
#define BUCKETS 83

static PyObject *histogram(const float *numbers, int64_t n) {
    uint32_t counts[BUCKETS] = {0};
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        bits &= 0x7fffffff;
        int exponent = (int)(bits >> 23), bucket = exponent - 127 - LOWEST + 2;
        if (bits == 0 || exponent == 255) continue;
        bucket = bucket < 1 ? 1 : bucket >= BUCKETS ? BUCKETS - 1 : bucket;
        counts[exponent == 0 ? 0 : bucket]++;
    }
    int first = 0, end = BUCKETS;
    while (first < BUCKETS && !counts[first]) first++;
    while (end > first && !counts[end - 1]) end--;
    if (first == BUCKETS) return PyBytes_FromStringAndSize(NULL, 0);
    unsigned char content[1 + 2 * BUCKETS] = {(unsigned char)first};
    for (int b = first; b < end; b++) {
        content[1 + 2 * (b - first)] = (unsigned char)(counts[b] & 0xff);
        content[2 + 2 * (b - first)] = (unsigned char)(counts[b] >> 8);
    }
    return PyBytes_FromStringAndSize((const char *)content, 1 + 2 * (end - first));
}

static PyObject *histograms(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    Py_buffer numbers;
    if (takes(given, 2, 2, "histograms(numbers, ends)")) return NULL;
    PyObject *ends = PySequence_Tuple(args[1]), *found = NULL;
    if (!ends) return NULL;
    if (PyObject_GetBuffer(args[0], &numbers, PyBUF_ND | PyBUF_FORMAT)) {
        Py_DECREF(ends);
        return NULL;
    }
    if (numbers.ndim == 1 && numbers.itemsize == sizeof(float) && numbers.format && numbers.format[0] == 'f')
        found = PyList_New(0);
    else
        PyErr_SetString(PyExc_ValueError, "the numbers have to be of float32, C-contiguous, of one dimension");
    int64_t start = 0;
    for (Py_ssize_t i = 0; found && i < PyTuple_Size(ends); i++) {
        int64_t end = PyLong_AsLongLong(PyTuple_GetItem(ends, i));
        if (!PyErr_Occurred() && (end < start || end > numbers.shape[0] || end - start > UINT16_MAX))
            PyErr_Format(PyExc_ValueError, "run %zd of the numbers ends at %lld", i, (long long)end);
        PyObject *content = PyErr_Occurred() ? NULL : histogram((const float *)numbers.buf + start, end - start);
        if (!content || PyList_Append(found, content)) Py_CLEAR(found);
        Py_XDECREF(content);
        start = end;
    }
    PyBuffer_Release(&numbers);
    Py_DECREF(ends);
    return found;
}

/* -- the module --------------------------------------------------------------------------------------------- */

static PyObject *instruction_sets_of(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    PyObject *names = PyList_New(0);
    for (const Kernels *const *set = instruction_sets(); names && *set; set++) {
        PyObject *name = PyUnicode_FromString((*set)->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *use(PyObject *module, PyObject *name) {
    (void)module;
    for (const Kernels *const *set = instruction_sets(); *set; set++) {
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, (*set)->name) == 0) {
            PyObject *before = PyUnicode_FromString(kernels->name);
            if (before) kernels = *set;
            return before;
        }
    }
    PyErr_Format(PyExc_ValueError, "this processor has no instruction set %R", name);
    return NULL;
}

static PyObject *connect(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (takes(given, 5, 5, "connect(Tensor, Parameter, is_neg, is_conj, get_num_threads)")) return NULL;
    PyObject *capsule = PyObject_GetAttrString(args[0], DLPACK_ATTRIBUTE);
    if (!capsule) return NULL;
    const DLPackExchange *table = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
    Py_DECREF(capsule);
    if (!table) return NULL;
    if (table->major != DLPACK_MAJOR || !table->describe) {
        PyErr_Format(PyExc_RuntimeError, "this PyTorch describes its tensors by DLPack %u, not 1", (unsigned)table->major);
        return NULL;
    }
    PyObject **kept[] = {&plain[0], &plain[1], &is_neg, &is_conj, &get_num_threads};
    for (int i = 0; i < 5; i++) {
        PyObject *before = *kept[i];
        Py_INCREF(args[i]);
        *kept[i] = args[i];
        Py_XDECREF(before);
    }
    exchange = table;
    Py_RETURN_NONE;
}

#define FAST(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, doc}

static PyMethodDef methods[] = {
    FAST(connect, "connect(Tensor, Parameter, is_neg, is_conj, get_num_threads): say what a tensor is; comes first"),
    FAST(measure_into, "measure_into(table, row, tensor, what=FULL): how many numbers were measured; 0: refused"),
    FAST(measure_many, "measure_many(table, first_row, tensors, what=FULL): the indices of those refused"),
    {"squares_and_nonfinite", squares_and_nonfinite, METH_O,
     "squares_and_nonfinite(tensors): the sum of squares, the number not finite, the indices of those refused"},
    FAST(channels_above_zero, "channels_above_zero(tensor, dim): a bit a channel, or None: refused"),
    FAST(draw_into, "draw_into(numbers, start, tensor): how many numbers were drawn; 0: refused"),
    FAST(histograms, "histograms(numbers, ends): a histogram of magnitudes for each run of numbers, as bytes"),
    FAST(draw_many, "draw_many(numbers, tensors, most): how many numbers of each were drawn; 0: refused"),
    {"instruction_sets", instruction_sets_of, METH_NOARGS, "instruction_sets(): those of this processor, the best last"},
    {"use", use, METH_O, "use(instruction_set): returns the one in use before"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "kedge.native._native", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    for (const Kernels *const *set = instruction_sets(); *set; set++) kernels = *set;
    if (PyModule_AddIntConstant(module, "COLUMNS", (long)COLUMNS) || PyModule_AddIntConstant(module, "DRAWN", DRAWN) ||
        PyModule_AddIntConstant(module, "FULL", WHAT_FULL) || PyModule_AddIntConstant(module, "NORM", WHAT_NORM) ||
        PyModule_AddIntConstant(module, "FINITE", WHAT_FINITE) || PyModule_AddIntConstant(module, "SHARED", SHARED) ||
        PyModule_AddIntConstant(module, "RELEASED", RELEASED)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
