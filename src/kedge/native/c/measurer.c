#include "measurer.h"

#include "device.h"
#include "tensors.h"

/* A value that was measured in this step. */
typedef struct {
    PyObject *tensor; /* where it was, which alone does not tell that it is the same; NULL: nothing is here */
    PyObject *ref;    /* a weak reference to it */
    long long version;
    int64_t row;
    long source; /* the number of the site whose output it is; -1 for none */
} Seen;

/* What is known of a site. */
typedef struct {
    long source;      /* where its last input came from, plus 2; 0 for one that has had none */
    double low, high; /* outputs that are not above the one, or not below the other, are saturated; NaN: no output is */
    bool is_plain;    /* whether statistics and drawn numbers are all that its values need; see Note [The short way] */
} Known;

/* How the values of the present step are measured; see Note [The short way]. */
typedef struct {
    long step, what; /* NO_STEP: not by the short way */
    bool draws, forwards, gradients;
    long long measured; /* how many values came by the short way, in all steps */
} Now;

typedef struct {
    PyObject_HEAD
    Py_buffer rows, sampled, buckets, there;  /* of each value */
    Py_buffer sites, at, saturated, used;     /* of each place; how many values and places there are */
    Seen *seen;
    size_t room, met; /* places in `seen`, a power of two; how many of them are taken */
    Known *known;     /* of each site by its number */
    long sites_known; /* how many of them there are */
    long source;      /* the last source that was told of any */
    Now now;
    Device *devices;  /* MOST_DEVICES of them; NULL while no value was on one */
} Measurer;

enum { ROWS, PLACES, COUNTERS };
enum { REFUSED = 0, DONE = 1, FRESH = 2, NEW_SOURCE = 4, NO_ROOM = 8, NO_TABLE = 16, CAPTURED = 32, ACTIVE = 64 };
enum { THERE = 5 }; /* the columns of `there`: a device's index, and what `Launched` has; -1 for none */
enum { AS_VALUE, AS_OUTPUT, AS_INPUT, AS_LASTING };
enum { FIRST_ROOM = 256, MOST_SITES = 1 << 28 };
enum { NO_STEP = -1, ANY_STEP = -2 };

static PyObject *version_name, *requires_grad_name, *is_leaf_name, *no_leaf;

/* -- which values were seen ---------------------------------------------------------------------------------- */

/* How often a tensor was changed in place; -1 where PyTorch does not count it, -2 with an exception set. */
static long long version_of(PyObject *tensor) {
    PyObject *number = PyObject_GetAttr(tensor, version_name);
    if (!number) { /* a tensor of inference has none */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -2;
        PyErr_Clear();
        return -1;
    }
    long long version = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return version == -1 && PyErr_Occurred() ? -2 : version;
}

static int is_true(PyObject *tensor, PyObject *name) {
    PyObject *found = PyObject_GetAttr(tensor, name);
    int result = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return result;
}

/* Whether the program may swap a tensor within the step, which PyTorch refuses if there is a weak reference to it:
 * a parameter, its gradient, or an input that is a leaf. -1 with an exception set. */
static int may_be_swapped(PyObject *tensor, long role) {
    if (role != AS_INPUT) return role == AS_LASTING;
    int differentiable = is_true(tensor, requires_grad_name);
    return differentiable == 1 ? is_true(tensor, is_leaf_name) : differentiable;
}

/* The place of a tensor, or the free one where it belongs. */
static Seen *place_of(Seen *seen, size_t room, const PyObject *tensor) {
    size_t i = ((uintptr_t)tensor >> 4) * (size_t)0x9E3779B97F4A7C15u;
    for (i = (i ^ i >> 32) & (room - 1); seen[i].tensor && seen[i].tensor != tensor; i = (i + 1) & (room - 1)) {}
    return &seen[i];
}

static int grow(Measurer *self) {
    size_t room = self->room ? 2 * self->room : FIRST_ROOM;
    Seen *more = PyMem_Calloc(room, sizeof *more);
    if (!more) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < self->room; i++)
        if (self->seen[i].tensor) *place_of(more, room, self->seen[i].tensor) = self->seen[i];
    PyMem_Free(self->seen);
    self->seen = more;
    self->room = room;
    return 0;
}

/* Takes over a weak reference to a tensor, if it returns 0. */
static int remember(Measurer *self, PyObject *tensor, PyObject *ref, long long version, int64_t row, long source) {
    if (2 * self->met >= self->room && grow(self)) return -1;
    Seen *seen = place_of(self->seen, self->room, tensor);
    PyObject *before = seen->ref;
    self->met += !seen->tensor;
    *seen = (Seen){tensor, ref, version, row, source};
    Py_XDECREF(before);
    return 0;
}

static Seen *find(Measurer *self, PyObject *tensor, long long version) {
    if (!self->met || version < 0) return NULL;
    Seen *seen = place_of(self->seen, self->room, tensor);
    return seen->tensor && seen->version == version && PyWeakref_GetObject(seen->ref) == tensor ? seen : NULL;
}

static PyObject *forget(PyObject *object, PyObject *nothing) {
    (void)nothing;
    Measurer *self = (Measurer *)object;
    for (size_t i = 0; i < self->room && self->met; i++) {
        if (!self->seen[i].tensor) continue;
        PyObject *ref = self->seen[i].ref;
        self->seen[i] = (Seen){0};
        self->met--;
        Py_DECREF(ref);
    }
    Py_RETURN_NONE;
}

/* What is known of a site; NULL with an exception set. No Python runs meanwhile. */
static Known *site_of(Measurer *self, long site) {
    if (site < 0 || site > MOST_SITES) return PyErr_Format(PyExc_ValueError, "no site has the number %ld", site), NULL;
    if (site >= self->sites_known) {
        long sites = 2 * site + FIRST_ROOM;
        Known *more = PyMem_Realloc(self->known, (size_t)sites * sizeof *more);
        if (!more) return PyErr_NoMemory(), NULL;
        for (long i = self->sites_known; i < sites; i++) more[i] = (Known){0, NAN, NAN, false};
        self->known = more;
        self->sites_known = sites;
    }
    return &self->known[site];
}

static PyObject *saturates(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    long site;
    if (takes(given, 3, 3, "saturates(site, low, high)") || number_of(args, given, 0, 0, &site)) return NULL;
    double low = PyFloat_AsDouble(args[1]), high = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    Known *known = site_of((Measurer *)object, site);
    if (!known) return NULL;
    known->low = low;
    known->high = high;
    known->is_plain = false;
    Py_RETURN_NONE;
}

/* -- measuring ----------------------------------------------------------------------------------------------- */

/* # Note [When Python may run]
 *
 * To describe a tensor, to have its version or a reference to it may run code of the program's: a mode that sees every call of
 * PyTorch's, a signal's handler, what the garbage collector frees; and other threads run while a large value is read. Any
 * of them may measure values, end the step or bring larger arrays. So a value is measured into memory of our own first. Then the
 * arrays and counters are looked at, and written to without another call of Python's.
 */

/* A value that was measured, and has no row yet. */
typedef struct {
    View view;
    double row[COLUMNS];
    int device; /* -1: it is in this process's memory */
    Launched launched;
} Measured;

/* What is asked of a value. */
typedef struct {
    long site, what, dim; /* the dimension of its channels, -1 for none */
    bool draws;
} Asked;

/* Queues the measuring of a value that is on a device: a LAUNCH_ code. */
static int launch(Measurer *self, const Asked *asked, Extras *extras, Measured *value) {
    if (!self->devices) self->devices = PyMem_Calloc(MOST_DEVICES, sizeof *self->devices);
    if (!self->devices) return PyErr_NoMemory(), LAUNCH_FAILED;
    if (value->device >= MOST_DEVICES) return LAUNCH_REFUSED;
    for (size_t i = 0; i < COLUMNS; i++) value->row[i] = NAN;
    value->row[COLUMNS - 1] = (double)value->view.numbers * (double)value->view.repeats;
    return launch_on(&self->devices[value->device], value->device, &value->view, (int)asked->what, extras, &value->launched);
}

/* Measures a tensor: DONE, or a flag that says why not, or -1 with an exception set. */
static long read_tensor(Measurer *self, PyObject *tensor, const Asked *asked, Measured *value) {
    Extras extras;
    int64_t channels;
    int readable = open_anywhere(tensor, asked->dim, &value->view, &value->device, &channels, &extras.inner);
    if (readable != 1) return readable < 0 ? -1 : REFUSED;
    if (value->device < 0) return measure_view(&value->view, (int)asked->what, value->row) ? -1 : DONE;

    const Known *known = site_of(self, asked->site);
    if (!known) return -1;
    extras.draws = asked->draws;
    extras.low = known->low;
    extras.high = known->high;
    extras.channels = channels <= INT32_MAX ? (int32_t)channels : 0;
    switch (launch(self, asked, &extras, value)) {
    case LAUNCHED: return extras.channels ? DONE | ACTIVE : DONE;
    case LAUNCH_NO_TABLE: return NO_TABLE;
    case LAUNCH_CAPTURED: return CAPTURED;
    case LAUNCH_REFUSED: return REFUSED;
    default: return -1;
    }
}

/* Counts among some numbers of a value, for its row and for the place at which its site is noted. */
static void count_into(Measurer *self, const View *view, const Known *known, int64_t row, int64_t place) {
    uint16_t *buckets = (uint16_t *)self->buckets.buf + row * BUCKETS;
    Drawn drawn = {.buckets = buckets, .low = known->low, .high = known->high};
    ((int32_t *)self->sampled.buf)[row] = (int32_t)count_drawn(view, &drawn);
    if (!isnan(known->low)) ((int32_t *)self->saturated.buf)[place] = drawn.outside;
}

/* Notes where a value's rows are on its device, from which its numbers will come; drawn numbers are counted there. */
static void note_launched(Measurer *self, const Measured *value, const Known *known, int64_t row, int64_t place) {
    const Launched *launched = &value->launched;
    int64_t *there = (int64_t *)self->there.buf + row * THERE;
    there[0] = value->device;
    if (launched->row >= 0) there[1] = launched->row;
    if (launched->active >= 0) {
        there[3] = launched->active;
        there[4] = launched->channels;
    }
    if (launched->drawn < 0) return;
    there[2] = launched->drawn;
    ((int32_t *)self->sampled.buf)[row] = (int32_t)drawn_of(&value->view, DRAWN);
    if (!isnan(known->low)) ((int32_t *)self->saturated.buf)[place] = 0;
}

/* Takes the next row for a value; returns its number. */
static int64_t take_row(Measurer *self, const Measured *value, const Known *known, bool draws) {
    int64_t *used = self->used.buf, row = used[ROWS]++;
    memcpy((double *)self->rows.buf + row * (int64_t)COLUMNS, value->row, sizeof value->row);
    ((int32_t *)self->sampled.buf)[row] = -1;
    int64_t *there = (int64_t *)self->there.buf + row * THERE;
    for (int i = 0; i < THERE; i++) there[i] = -1;
    if (value->device >= 0)
        note_launched(self, value, known, row, used[PLACES]);
    else if (draws)
        count_into(self, &value->view, known, row, used[PLACES]);
    return row;
}

static void take_place(Measurer *self, long site, int64_t row) {
    int64_t place = ((int64_t *)self->used.buf)[PLACES]++;
    ((int32_t *)self->sites.buf)[place] = (int32_t)site;
    ((int64_t *)self->at.buf)[place] = row;
}

/* Whether there are arrays to write to; else an exception is set. */
static bool is_open(const Measurer *self) {
    if (!self->used.obj) PyErr_SetString(PyExc_ValueError, "a measurer needs arrays; call use_arrays first");
    return self->used.obj != NULL;
}

static bool has_room(const Measurer *self) {
    const int64_t *used = self->used.buf;
    return used[ROWS] >= 0 && used[PLACES] >= 0 && used[ROWS] < self->rows.shape[0] && used[PLACES] < self->sites.shape[0];
}

/* Notes a value at a site, which was measured for that unless it was seen: flags, or -1 with an exception set.
 *
 * It takes over the reference if it remembers the value; no Python runs in it.
 */
static long note(Measurer *self, PyObject *tensor, long long version, const Measured *value, PyObject **ref, long site, long role, bool draws) {
    Known *known = site_of(self, site);
    if (!known || !is_open(self)) return -1;
    if (!has_room(self)) return NO_ROOM;
    const Seen *seen = find(self, tensor, version);
    long result = DONE, source = seen ? seen->source : -1;
    int64_t row = seen ? seen->row : take_row(self, value, known, draws);
    if (!seen) {
        if (*ref && remember(self, tensor, *ref, version, row, role == AS_OUTPUT ? site : -1)) return -1;
        *ref = NULL;
        result |= FRESH;
    }
    take_place(self, site, row);
    if (role == AS_INPUT && known->source != source + 2) {
        known->source = source + 2;
        self->source = source;
        result |= NEW_SOURCE;
    }
    return result;
}

/* Measures a value at a site, unless it was measured there or elsewhere in this step: flags, or -1 with an exception set.
 *
 * In no other step than this one, unless that is `ANY_STEP`; a value that comes too late is refused.
 */
static long observe_value(Measurer *self, PyObject *tensor, const Asked *asked, long role, long step) {
    if (!is_open(self)) return -1;
    if (!has_room(self)) return NO_ROOM;
    long long version = version_of(tensor);
    if (version == -2) return -1;
    Measured value; /* see Note [When Python may run] */
    PyObject *ref = NULL;
    long done = DONE;
    if (!find(self, tensor, version)) {
        done = read_tensor(self, tensor, asked, &value);
        if (done < 0 || !(done & DONE)) return done;
        int swapped = may_be_swapped(tensor, role);
        ref = swapped ? NULL : PyWeakref_NewRef(tensor, NULL);
        if (swapped < 0 || (!swapped && !ref)) return -1;
    }
    long result = REFUSED;
    if (step == ANY_STEP || step == self->now.step)
        result = note(self, tensor, version, &value, &ref, asked->site, role, asked->draws);
    Py_XDECREF(ref);
    return result > 0 && result & DONE ? result | done : result;
}

static PyObject *observe(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Asked asked;
    long role, draws;
    if (takes(given, 5, 6, "observe(tensor, site, role, what, draws, dim=-1)")) return NULL;
    if (number_of(args, given, 1, 0, &asked.site) || number_of(args, given, 2, 0, &role)) return NULL;
    if (number_of(args, given, 3, 0, &asked.what) || number_of(args, given, 4, 0, &draws)) return NULL;
    if (number_of(args, given, 5, -1, &asked.dim)) return NULL;
    asked.draws = draws != 0;
    long result = observe_value((Measurer *)object, args[0], &asked, role, ANY_STEP);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

/* Measures one of many values at a site: 1, or 0 if it is refused, or -1 with an exception set. */
static int observe_one(Measurer *self, PyObject *tensor, PyObject *number, int what, bool draws) {
    Measured value;
    Asked asked = {.site = PyLong_AsLong(number), .what = what, .dim = -1, .draws = draws};
    if (asked.site == -1 && PyErr_Occurred()) return -1;
    long done = read_tensor(self, tensor, &asked, &value);
    if (done != DONE) return done < 0 ? -1 : 0;
    const Known *known = site_of(self, asked.site);
    if (!known || !is_open(self)) return -1;
    if (!has_room(self)) return PyErr_SetString(PyExc_ValueError, "the table has no room for so many rows"), -1;
    take_place(self, asked.site, take_row(self, &value, known, draws));
    return 1;
}

static PyObject *observe_all(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Measurer *self = (Measurer *)object;
    long what, draws;
    if (takes(given, 4, 4, "observe_all(tensors, sites, what, draws)")) return NULL;
    if (number_of(args, given, 2, 0, &what) || number_of(args, given, 3, 0, &draws)) return NULL;
    PyObject *tensors = PySequence_Tuple(args[0]), *sites = tensors ? PySequence_Tuple(args[1]) : NULL;
    PyObject *refused = sites ? PyList_New(0) : NULL;
    Py_ssize_t n = refused ? PyTuple_Size(tensors) : 0;
    if (refused && n != PyTuple_Size(sites)) {
        PyErr_Format(PyExc_ValueError, "%zd tensors need as many sites", n);
        Py_CLEAR(refused);
    }
    for (Py_ssize_t i = 0; refused && i < n; i++) {
        int measured = observe_one(self, PyTuple_GetItem(tensors, i), PyTuple_GetItem(sites, i), (int)what, draws);
        PyObject *index = measured == 0 ? PyLong_FromSsize_t(i) : NULL;
        if (measured < 0 || (measured == 0 && (!index || PyList_Append(refused, index)))) Py_CLEAR(refused);
        Py_XDECREF(index);
    }
    Py_XDECREF(tensors);
    Py_XDECREF(sites);
    return refused;
}

static PyObject *draw_for_last(PyObject *object, PyObject *tensor) {
    Measurer *self = (Measurer *)object;
    Measured value;
    int64_t channels, distance;
    int readable = open_anywhere(tensor, -1, &value.view, &value.device, &channels, &distance);
    if (readable < 0 || !is_open(self)) return NULL;
    const int64_t *used = self->used.buf;
    if (used[ROWS] < 1 || used[PLACES] < 1) return PyErr_Format(PyExc_ValueError, "nothing was measured in this step");
    int64_t row = used[ROWS] - 1, place = used[PLACES] - 1;
    Known *known = site_of(self, ((int32_t *)self->sites.buf)[place]);
    if (!known) return NULL;
    if (!readable) return PyLong_FromLong(REFUSED);
    if (value.device < 0) {
        count_into(self, &value.view, known, row, place);
        return PyLong_FromLong(DONE);
    }
    Asked asked = {.what = ONLY_DRAW, .dim = -1, .draws = true};
    Extras extras = {.draws = true, .low = known->low, .high = known->high};
    int done = launch(self, &asked, &extras, &value);
    if (done == LAUNCH_FAILED) return NULL;
    if (done != LAUNCHED) return PyLong_FromLong(done == LAUNCH_NO_TABLE ? NO_TABLE : REFUSED);
    if (!is_open(self)) return NULL;
    used = self->used.buf; /* others ran meanwhile, and may have begun another step */
    if (used[ROWS] != row + 1 || used[PLACES] != place + 1) return PyLong_FromLong(REFUSED);
    known = site_of(self, ((int32_t *)self->sites.buf)[place]);
    if (!known) return NULL;
    note_launched(self, &value, known, row, place);
    return PyLong_FromLong(DONE);
}

/* -- the short way --------------------------------------------------------------------------------------------- */

/* # Note [The short way]
 *
 * Nearly every value that is measured goes the same way: its site and its step are known, it needs nothing but statistics and
 * drawn numbers, and one call does it. The hooks then call a function of C, `short_way`, which does that call or, if
 * anything is different, calls Python, the long way. The long way tells what the short one may do: it opens the present
 * step for it, and answers with a site's number if the site's values need no more. Whatever writes to the table or ends the
 * step closes it first, so that two threads never write side by side; the long way, which has waited for its turn, opens it
 * again.
 */
typedef struct {
    PyObject_HEAD
    Measurer *measurer;
    PyObject *long_way; /* (value, step, leaf, done): the site's number if its next values may go the short way, or None */
    PyObject *leaf;     /* the name that values had which the long way answered for; NULL for none */
    PyObject *is_under_jit;
    long site, role;
    bool is_gradient;
} ShortWay;

static PyTypeObject *short_way_type;

/* Whether a value may go the short way: 1 or 0, or -1 with an exception set. */
static int is_short(const ShortWay *self, PyObject *step, PyObject *leaf) {
    const Now *now = &self->measurer->now;
    if (!self->leaf || self->leaf != leaf || now->step == NO_STEP) return 0;
    if (!(self->is_gradient ? now->gradients : now->forwards) || !self->measurer->known[self->site].is_plain) return 0;
    long number = PyLong_AsLong(step);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (number != now->step) return 0;
    PyObject *under_jit = PyObject_CallNoArgs(self->is_under_jit);
    int is_traced = under_jit ? PyObject_IsTrue(under_jit) : -1;
    Py_XDECREF(under_jit);
    return is_traced < 0 ? -1 : !is_traced;
}

/* Has the long way measure a value, or complete what was `done`, and notes its answer. */
static PyObject *go_the_long_way(ShortWay *self, PyObject *value, PyObject *step, PyObject *leaf, long done) {
    PyObject *answer = PyObject_CallFunction(self->long_way, "OOOl", value, step, leaf, done);
    if (!answer || answer == Py_None) return answer;
    long site = PyLong_AsLong(answer);
    Known *known = site == -1 && PyErr_Occurred() ? NULL : site_of(self->measurer, site);
    Py_DECREF(answer);
    if (!known) return NULL;
    known->is_plain = true;
    self->site = site;
    PyObject *before = self->leaf;
    Py_INCREF(leaf);
    self->leaf = leaf;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *measure_value(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    ShortWay *self = (ShortWay *)object;
    Measurer *measurer = self->measurer;
    if (takes(given, 2, 3, "measure(value, step, leaf='')")) return NULL;
    PyObject *value = args[0], *step = args[1], *leaf = given == 3 ? args[2] : no_leaf;
    int is_one = is_short(self, step, leaf);
    if (is_one < 0) return NULL;
    if (!is_one) return go_the_long_way(self, value, step, leaf, REFUSED);
    Asked asked = {.site = self->site, .what = measurer->now.what, .dim = -1, .draws = measurer->now.draws};
    long done = observe_value(measurer, value, &asked, self->role, measurer->now.step);
    if (done < 0) return NULL;
    if (done != DONE && done != (DONE | FRESH)) return go_the_long_way(self, value, step, leaf, done);
    measurer->now.measured++;
    Py_RETURN_NONE;
}

static PyObject *short_way(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    static PyMethodDef measure = FAST(measure_value, "measure(value, step, leaf=''): measure a value at a site");
    long role, is_gradient;
    if (takes(given, 4, 4, "short_way(role, is_gradient, is_under_jit, long_way)")) return NULL;
    if (number_of(args, given, 0, 0, &role) || number_of(args, given, 1, 0, &is_gradient)) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(short_way_type, Py_tp_alloc);
    ShortWay *self = (ShortWay *)make(short_way_type, 0);
    if (!self) return NULL;
    Py_INCREF(object);
    Py_INCREF(args[2]);
    Py_INCREF(args[3]);
    self->measurer = (Measurer *)object;
    self->is_under_jit = args[2];
    self->long_way = args[3];
    self->role = role;
    self->is_gradient = is_gradient != 0;
    PyObject *function = PyCFunction_NewEx(&measure, (PyObject *)self, NULL);
    Py_DECREF(self);
    return function;
}

/* Opens the present step for the short way; -1 closes it. */
static PyObject *open_step(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Now *now = &((Measurer *)object)->now;
    long step, what = 0, draws = 0, forwards = 0, gradients = 0;
    if (takes(given, 1, 5, "open_step(step, what, draws, forwards, gradients)")) return NULL;
    if (number_of(args, given, 0, 0, &step) || number_of(args, given, 1, 0, &what) || number_of(args, given, 2, 0, &draws)) return NULL;
    if (number_of(args, given, 3, 0, &forwards) || number_of(args, given, 4, 0, &gradients)) return NULL;
    *now = (Now){step, what, draws != 0, forwards != 0, gradients != 0, now->measured};
    Py_RETURN_NONE;
}

static PyObject *measured_of(PyObject *object, void *nothing) {
    (void)nothing;
    return PyLong_FromLongLong(((Measurer *)object)->now.measured);
}

static int visit_short_way(PyObject *object, visitproc visit, void *arg) {
    ShortWay *self = (ShortWay *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->long_way);
    Py_VISIT(self->is_under_jit);
    return 0;
}

static int clear_short_way(PyObject *object) {
    ShortWay *self = (ShortWay *)object;
    Py_CLEAR(self->leaf);
    Py_CLEAR(self->long_way);
    Py_CLEAR(self->is_under_jit);
    return 0;
}

static void end_short_way(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_short_way(object);
    Py_XDECREF((PyObject *)((ShortWay *)object)->measurer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot short_way_slots[] = {
    {Py_tp_traverse, visit_short_way},
    {Py_tp_clear, clear_short_way},
    {Py_tp_dealloc, end_short_way},
    {0, NULL},
};

static PyType_Spec short_way_spec = {.name = "kedge.native._native.ShortWay",
                                     .basicsize = sizeof(ShortWay),
                                     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                     .slots = short_way_slots};

/* -- devices ------------------------------------------------------------------------------------------------- */

static PyObject *use_device(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Measurer *self = (Measurer *)object;
    long index;
    if (takes(given, 10, 10, "use_device(index, place, tick, kernels, rows, arrived, parts, first, room, parts_room)")) return NULL;
    if (number_of(args, given, 0, 0, &index)) return NULL;
    if (index < 0 || index >= MOST_DEVICES) return PyErr_Format(PyExc_ValueError, "no device has the index %ld", index);
    if (!self->devices) self->devices = PyMem_Calloc(MOST_DEVICES, sizeof *self->devices);
    if (!self->devices) return PyErr_NoMemory();
    if (open_device(&self->devices[index], args + 1, given - 1)) return NULL;
    Py_RETURN_NONE;
}

/* Whether the current stream of a device is one that values were not measured on since `use_device`; from now on they may be. */
static PyObject *take_current_stream(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Measurer *self = (Measurer *)object;
    long index;
    if (takes(given, 1, 1, "take_stream(index)") || number_of(args, given, 0, 0, &index)) return NULL;
    if (!self->devices || index < 0 || index >= MOST_DEVICES || !driver_kind()) Py_RETURN_FALSE;
    int taken = take_stream(&self->devices[index], (int)index);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

/* The number of the next row of a device's table. */
static PyObject *rows_used(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Measurer *self = (Measurer *)object;
    long index;
    if (takes(given, 1, 1, "rows_used(index)") || number_of(args, given, 0, 0, &index)) return NULL;
    if (!self->devices || index < 0 || index >= MOST_DEVICES) return PyLong_FromLong(0);
    return PyLong_FromLongLong(self->devices[index].used);
}

/* Takes the next rows of a device for values whose rows are written by others, at some sites: the first. */
static PyObject *take_device_rows(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Measurer *self = (Measurer *)object;
    long index, rows;
    if (takes(given, 2, 2, "take_rows(index, rows)")) return NULL;
    if (number_of(args, given, 0, 0, &index) || number_of(args, given, 1, 0, &rows)) return NULL;
    if (!self->devices || index < 0 || index >= MOST_DEVICES || rows < 0) return PyLong_FromLong(-1);
    Device *device = &self->devices[index];
    if (device->used + rows > device->room) return PyLong_FromLong(-1);
    device->used += rows;
    return PyLong_FromLongLong(device->used - rows);
}

static PyObject *source_of(PyObject *object, void *nothing) {
    (void)nothing;
    long source = ((Measurer *)object)->source;
    if (source < 0) Py_RETURN_NONE;
    return PyLong_FromLong(source);
}

/* -- the type ------------------------------------------------------------------------------------------------ */

static void let_go(Measurer *self) {
    Py_buffer *all[] = {&self->rows,  &self->sampled, &self->buckets,   &self->there,
                        &self->sites, &self->at,      &self->saturated, &self->used};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->obj) PyBuffer_Release(all[i]);
}

static int open_all(Measurer *self, PyObject *const *arrays) {
    if (open_array(arrays[0], 'd', 2, &self->rows) || open_array(arrays[1], 'i', 1, &self->sampled)) return -1;
    if (open_array(arrays[2], 'H', 2, &self->buckets) || open_array(arrays[3], 'q', 2, &self->there)) return -1;
    if (open_array(arrays[4], 'i', 1, &self->sites) || open_array(arrays[5], 'q', 1, &self->at)) return -1;
    if (open_array(arrays[6], 'i', 1, &self->saturated) || open_array(arrays[7], 'q', 1, &self->used)) return -1;
    Py_ssize_t rows = self->rows.shape[0], places = self->sites.shape[0];
    if (self->rows.shape[1] == COLUMNS && self->sampled.shape[0] == rows && self->buckets.shape[0] == rows &&
        self->buckets.shape[1] == BUCKETS && self->there.shape[0] == rows && self->there.shape[1] == THERE && self->at.shape[0] == places && self->saturated.shape[0] == places &&
        self->used.shape[0] == COUNTERS)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the arrays of a table do not belong together");
    return -1;
}

/* Writes to these arrays from now on; what was seen in the step is known as before. */
static PyObject *use_arrays(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    if (takes(given, 8, 8, "use_arrays(rows, sampled, buckets, there, sites, at, saturated, used)")) return NULL;
    let_go((Measurer *)object);
    if (!open_all((Measurer *)object, args)) Py_RETURN_NONE;
    let_go((Measurer *)object);
    return NULL;
}

static void dealloc(PyObject *object) {
    Measurer *self = (Measurer *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(forget(object, NULL));
    let_go(self);
    PyMem_Free(self->seen);
    PyMem_Free(self->known);
    PyMem_Free(self->devices);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    FAST(use_arrays, "use_arrays(rows, sampled, buckets, there, sites, at, saturated, used): write to these from now on"),
    FAST(saturates, "saturates(site, low, high): outputs that are not above low, or not below high, are saturated"),
    FAST(observe, "observe(tensor, site, role, what, draws, dim=-1): what was done, as flags; 0: refused"),
    FAST(observe_all, "observe_all(tensors, sites, what, draws): the indices of those refused"),
    {"draw_for_last", draw_for_last, METH_O, "draw_for_last(tensor): count among its numbers, for what was measured last; flags"},
    FAST(use_device, "use_device(index, place, tick, kernels, rows, arrived, parts, first, room, parts_room): measure on a device"),
    {"take_stream", (PyCFunction)(void (*)(void))take_current_stream, METH_FASTCALL, "take_stream(index): whether a device's current stream is new to its table; it is not from now on"},
    FAST(rows_used, "rows_used(index): the number of the next row of a device's table"),
    {"take_rows", (PyCFunction)(void (*)(void))take_device_rows, METH_FASTCALL, "take_rows(index, rows): the first of so many rows of a device's table; -1: there is no room"},
    FAST(short_way, "short_way(role, is_gradient, is_under_jit, long_way): a function that measures the values of a site"),
    FAST(open_step, "open_step(step, what=0, draws=0, forwards=0, gradients=0): let values go the short way; -1: none may"),
    {"forget", forget, METH_NOARGS, "forget(): the step is over, and values that come were not seen"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"source", source_of, NULL, "the number of the site whose output the input was that had a new source; None for none", NULL},
    {"measured", measured_of, NULL, "how many values came by the short way, in all steps", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Measurer(): measures the values of one step, each once however many sites it stands at"},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "kedge.native._native.Measurer", .basicsize = sizeof(Measurer), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};

int add_measurer(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } constants[] = {{"REFUSED", REFUSED}, {"DONE", DONE}, {"FRESH", FRESH}, {"NEW_SOURCE", NEW_SOURCE}, {"NO_ROOM", NO_ROOM}, {"NO_TABLE", NO_TABLE},
                     {"CAPTURED", CAPTURED}, {"ACTIVE", ACTIVE},
                     {"AS_VALUE", AS_VALUE}, {"AS_OUTPUT", AS_OUTPUT}, {"AS_INPUT", AS_INPUT}, {"AS_LASTING", AS_LASTING}};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) return -1;
    version_name = PyUnicode_InternFromString("_version");
    requires_grad_name = PyUnicode_InternFromString("requires_grad");
    is_leaf_name = PyUnicode_InternFromString("is_leaf");
    no_leaf = PyUnicode_InternFromString("");
    bool named = version_name && requires_grad_name && is_leaf_name && no_leaf;
    PyObject *type = named ? PyType_FromSpec(&spec) : NULL;
    short_way_type = type ? (PyTypeObject *)PyType_FromSpec(&short_way_spec) : NULL;
    int failed = !short_way_type || PyModule_AddObjectRef(module, "Measurer", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
