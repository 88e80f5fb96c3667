/* `Measurer`: measures the values of one step into the arrays of a table, each value once however many sites it stands at. */
#ifndef KEDGE_MEASURER_H
#define KEDGE_MEASURER_H

#include "python.h"

/* Adds the type and its constants to the module: 0, or -1 with an exception set. */
int add_measurer(PyObject *module);

#endif
