/* The Python face: `kedge.native._native`. */
#include "channels.h"
#include "device.h"
#include "draw.h"
#include "measurer.h"
#include "reduce.h"
#include "tensors.h"

/* -- statistics --------------------------------------------------------------------------------------------- */

/* Opens a table of doubles, and checks that it has some rows. */
static int open_table(PyObject *table, Py_ssize_t first, Py_ssize_t rows, Py_buffer *out) {
    if (open_array(table, 'd', 2, out)) return -1;
    if (out->shape[1] == COLUMNS && first >= 0 && rows <= out->shape[0] - first) return 0;
    PyBuffer_Release(out);
    PyErr_Format(PyExc_ValueError, "the table has to have %d columns, and rows %zd to %zd", (int)COLUMNS, first, first + rows - 1);
    return -1;
}

static PyObject *measure_into(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long row, what;
    Py_buffer table;
    if (takes(given, 3, 4, "measure_into(table, row, tensor, what=FULL)")) return NULL;
    if (number_of(args, given, 1, 0, &row) || number_of(args, given, 3, WHAT_FULL, &what)) return NULL;
    if (open_table(args[0], row, 1, &table)) return NULL;
    double *into = (double *)table.buf + row * (Py_ssize_t)COLUMNS;
    int done = measure(args[2], (int)what, into);
    long long count = done == 1 ? (long long)into[COLUMNS - 1] : 0;
    PyBuffer_Release(&table);
    return done < 0 ? NULL : PyLong_FromLongLong(count);
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
        if (tensor == Py_None) continue;
        int done = measure(tensor, (int)what, (double *)table.buf + (first + i) * (Py_ssize_t)COLUMNS);
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
        double row[COLUMNS];
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        if (tensor == Py_None) continue;
        int done = measure(tensor, WHAT_NORM, row);
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
    View others;
    int64_t channels, stride;
    if (takes(given, 2, 2, "channels_above_zero(tensor, dim)") || number_of(args, given, 1, 0, &dim)) return NULL;
    int readable = open_channels(args[0], dim, &others, &channels, &stride);
    if (readable < 0) return NULL;
    if (!readable) Py_RETURN_NONE;
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

/* Numbers that are drawn from many tensors, one behind the other. */
typedef struct {
    Py_buffer array; /* of float32 or float64 */
    int64_t used;
    double squares;
} Numbers;

static void put(void *state, double number) {
    Numbers *numbers = state;
    if (numbers->array.itemsize == sizeof(float))
        ((float *)numbers->array.buf)[numbers->used++] = (float)number;
    else
        ((double *)numbers->array.buf)[numbers->used++] = number;
}

static void compare(void *state, double number) {
    Numbers *numbers = state;
    int64_t at = numbers->used++;
    bool narrow = numbers->array.itemsize == sizeof(float);
    double change = number - (narrow ? ((float *)numbers->array.buf)[at] : ((double *)numbers->array.buf)[at]);
    numbers->squares += change * change;
}

static int open_numbers(PyObject *array, Numbers *numbers) {
    numbers->used = 0;
    if (open_array(array, 'd', 1, &numbers->array) == 0) return 0;
    PyErr_Clear();
    return open_array(array, 'f', 1, &numbers->array);
}

/* How many numbers of each tensor are drawn at most: 0, or -1 with an exception set. */
static int most_of(PyObject *const *args, Py_ssize_t given, Py_ssize_t at, long *most) {
    if (number_of(args, given, at, 0, most)) return -1;
    if (*most >= 1 && *most <= INT32_MAX) return 0;
    PyErr_Format(PyExc_ValueError, "%ld numbers cannot be drawn", *most);
    return -1;
}

static PyObject *draw_many(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long most;
    Numbers numbers;
    if (takes(given, 3, 3, "draw_many(numbers, tensors, most)") || most_of(args, given, 2, &most)) return NULL;
    PyObject *tensors = PySequence_Tuple(args[1]), *counts = NULL;
    if (!tensors || open_numbers(args[0], &numbers)) {
        Py_XDECREF(tensors);
        return NULL;
    }
    Py_ssize_t n = PyTuple_Size(tensors);
    if (numbers.array.shape[0] / most < n)
        PyErr_Format(PyExc_ValueError, "drawn numbers need room for %zd times %ld", n, most);
    else
        counts = PyList_New(0);
    for (Py_ssize_t i = 0; counts && i < n; i++) {
        View view;
        int readable = open_view(PyTuple_GetItem(tensors, i), &view);
        int64_t drawn = readable == 1 ? draw(&view, most, put, &numbers) : 0;
        if (readable < 0 || append_number(counts, (Py_ssize_t)drawn)) Py_CLEAR(counts);
    }
    PyBuffer_Release(&numbers.array);
    Py_DECREF(tensors);
    return counts;
}

/* Compares a tensor with so many numbers that were drawn from it: 1, or 0 if it is another by now, or -1 with an exception set. */
static int compare_one(PyObject *tensor, long most, Py_ssize_t drawn, Numbers *numbers) {
    View view;
    int readable = open_view(tensor, &view);
    numbers->squares = NAN;
    if (readable != 1 || drawn_of(&view, most) != drawn) {
        numbers->used += drawn;
        return readable < 0 ? -1 : 0;
    }
    numbers->squares = 0;
    draw(&view, most, compare, numbers);
    return 1;
}

/* Adds what has changed of a tensor to two lists: 0, or -1 with an exception set. */
static int add_change(PyObject *tensor, PyObject *count, long most, Numbers *numbers, PyObject *counts, PyObject *sums) {
    Py_ssize_t drawn = PyLong_AsSsize_t(count);
    if (drawn == -1 && PyErr_Occurred()) return -1;
    if (drawn < 0 || drawn > numbers->array.shape[0] - numbers->used) {
        PyErr_SetString(PyExc_ValueError, "there are fewer numbers to compare with");
        return -1;
    }
    int same = compare_one(tensor, most, drawn, numbers);
    PyObject *sum = same < 0 ? NULL : PyFloat_FromDouble(numbers->squares);
    int failed = !sum || append_number(counts, same ? drawn : 0) || PyList_Append(sums, sum);
    Py_XDECREF(sum);
    return failed ? -1 : 0;
}

static PyObject *squared_changes(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long most;
    Numbers numbers;
    if (takes(given, 4, 4, "squared_changes(numbers, tensors, counts, most)") || most_of(args, given, 3, &most)) return NULL;
    PyObject *tensors = PySequence_Tuple(args[1]), *before = tensors ? PySequence_Tuple(args[2]) : NULL;
    PyObject *counts = PyList_New(0), *sums = PyList_New(0), *result = NULL;
    bool failed = !before || !counts || !sums;
    if (!failed && PyTuple_Size(tensors) != PyTuple_Size(before)) {
        PyErr_SetString(PyExc_ValueError, "each tensor needs the count of the numbers that were drawn from it");
        failed = true;
    }
    if (!failed && !(failed = open_numbers(args[0], &numbers) != 0)) {
        for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(tensors); i++)
            failed = add_change(PyTuple_GetItem(tensors, i), PyTuple_GetItem(before, i), most, &numbers, counts, sums) != 0;
        PyBuffer_Release(&numbers.array);
    }
    if (!failed) result = PyTuple_Pack(2, counts, sums);
    Py_XDECREF(tensors);
    Py_XDECREF(before);
    Py_XDECREF(counts);
    Py_XDECREF(sums);
    return result;
}

static PyObject *histograms(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    long rows;
    Py_buffer buckets;
    if (takes(given, 2, 2, "histograms(buckets, rows)") || number_of(args, given, 1, 0, &rows)) return NULL;
    if (open_array(args[0], 'H', 2, &buckets)) return NULL;
    bool fits = buckets.shape[1] == BUCKETS && 0 <= rows && rows <= buckets.shape[0];
    PyObject *found = fits ? PyList_New(rows) : PyErr_Format(PyExc_ValueError, "there are no %ld rows of %d buckets", rows, BUCKETS);
    for (Py_ssize_t i = 0; found && i < rows; i++) {
        unsigned char content[1 + 2 * BUCKETS];
        size_t size = encode_buckets((const uint16_t *)buckets.buf + i * BUCKETS, content);
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)content, (Py_ssize_t)size);
        if (!bytes || PyList_SetItem(found, i, bytes)) Py_CLEAR(found);
    }
    PyBuffer_Release(&buckets);
    return found;
}

/* -- dicts --------------------------------------------------------------------------------------------------- */

/* Compares what a dict has with the entries of lists from an index on: how many; -1 if they differ. No Python code runs meanwhile. */
static Py_ssize_t entries_from(PyObject *table, PyObject *names, PyObject *values, Py_ssize_t first) {
    Py_ssize_t n = PyList_Size(names), found = first, place = 0;
    PyObject *name, *value;
    while (PyDict_Next(table, &place, &name, &value)) {
        if (found >= n || PyList_GetItem(names, found) != name || PyList_GetItem(values, found) != value) return -1;
        found++;
    }
    return found - first;
}

static PyObject *same_entries(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (takes(given, 3, 3, "same_entries(tables, names, values)")) return NULL;
    for (int i = 0; i < 3; i++)
        if (!PyList_Check(args[i])) return PyErr_Format(PyExc_TypeError, "same_entries takes lists");
    Py_ssize_t n = PyList_Size(args[1]), done = 0;
    if (PyList_Size(args[2]) != n) return PyErr_Format(PyExc_ValueError, "each name needs a value");
    for (Py_ssize_t i = 0; i < PyList_Size(args[0]); i++) {
        PyObject *table = PyList_GetItem(args[0], i);
        if (!PyDict_Check(table)) return PyErr_Format(PyExc_TypeError, "same_entries compares dicts");
        Py_ssize_t found;
#ifdef Py_GIL_DISABLED
        Py_BEGIN_CRITICAL_SECTION(table);
#endif
        found = entries_from(table, args[1], args[2], done);
#ifdef Py_GIL_DISABLED
        Py_END_CRITICAL_SECTION();
#endif
        if (found < 0) Py_RETURN_FALSE;
        done += found;
    }
    return PyBool_FromLong(done == n);
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
    if (connect_tensors(args)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *connect_to_driver(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (connect_driver(args, given)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *stream_function(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    return PyLong_FromVoidPtr(current_stream_function());
}

static PyMethodDef methods[] = {
    FAST(connect, "connect(Tensor, Parameter, is_neg, is_conj, get_num_threads): say what a tensor is; comes first"),
    {"connect_driver", (PyCFunction)(void (*)(void))connect_to_driver, METH_FASTCALL,
     "connect_driver(kind, launch, fill_bytes, current_place, go_to, capturing, current_stream): addresses"},
    {"stream_function", stream_function, METH_NOARGS, "stream_function(): the address of PyTorch's function for current streams"},
    FAST(measure_into, "measure_into(table, row, tensor, what=FULL): how many numbers were measured; 0: refused"),
    FAST(measure_many, "measure_many(table, first_row, tensors, what=FULL): the indices of those refused"),
    {"squares_and_nonfinite", squares_and_nonfinite, METH_O,
     "squares_and_nonfinite(tensors): the sum of squares, the number not finite, the indices of those refused"},
    FAST(channels_above_zero, "channels_above_zero(tensor, dim): a bit a channel, or None: refused"),
    FAST(draw_many, "draw_many(numbers, tensors, most): how many numbers of each were drawn; 0: refused"),
    FAST(squared_changes, "squared_changes(numbers, tensors, counts, most): how many were drawn again, and the squares of what changed"),
    FAST(same_entries, "same_entries(tables, names, values): whether dicts have just these, one after the other"),
    FAST(histograms, "histograms(buckets, rows): the histogram of each row, as bytes"),
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
        PyModule_AddIntConstant(module, "BUCKETS", BUCKETS) ||
        PyModule_AddIntConstant(module, "FULL", WHAT_FULL) || PyModule_AddIntConstant(module, "NORM", WHAT_NORM) ||
        PyModule_AddIntConstant(module, "FINITE", WHAT_FINITE) || PyModule_AddIntConstant(module, "SHARED", SHARED) ||
        PyModule_AddIntConstant(module, "RELEASED", RELEASED) || add_measurer(module)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
