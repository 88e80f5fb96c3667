/* CPython as every file here sees it: its stable ABI from 3.11 on, which a Python without the GIL does not have yet. */
#ifndef KEDGE_PYTHON_H
#define KEDGE_PYTHON_H

#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <string.h>

/* A method that is given its arguments as an array. */
#define FAST(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, doc}

/* Checks how many arguments were given: 0, or -1 with an exception set. */
static inline int takes(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most, const char *signature) {
    if (least <= given && given <= most) return 0;
    PyErr_Format(PyExc_TypeError, "%s was called with %zd arguments", signature, given);
    return -1;
}

/* Reads an argument that is a whole number: 0, or -1 with an exception set. */
static inline int number_of(PyObject *const *args, Py_ssize_t given, Py_ssize_t at, long otherwise, long *out) {
    *out = at < given ? PyLong_AsLong(args[at]) : otherwise;
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Opens an array to write to: 0, or -1 with an exception set.
 *
 * The format is one of `struct`'s: 'd' and 'f', or 'i' and 'q', which stand for whole numbers of 4 and of 8 bytes.
 */
static inline int open_array(PyObject *array, char format, int dims, Py_buffer *out) {
    if (PyObject_GetBuffer(array, out, PyBUF_WRITABLE | PyBUF_ND | PyBUF_FORMAT)) return -1;
    const char *is = out->format ? out->format : "B";
    bool whole = format == 'i' || format == 'q';
    bool same = whole ? is[0] && strchr("ilq", is[0]) && out->itemsize == (format == 'i' ? 4 : 8) : is[0] == format;
    if (same && !is[1] && out->ndim == dims) return 0;
    PyErr_Format(PyExc_ValueError, "the array has to be C-contiguous, of the format %c and of %d dimension(s); it is of %s and %d",
                 format, dims, is, out->ndim);
    PyBuffer_Release(out);
    return -1;
}

#endif
