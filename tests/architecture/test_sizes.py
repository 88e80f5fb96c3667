"""Small files, small functions, few parameters."""

from __future__ import annotations

import ast
import collections
import re
import statistics

FILE = 600
FUNCTION = 60
MEDIAN = 8
PARAMETERS = 7
FIRST_READING = 350
FILES = 12
OF_A_KIND = re.compile(r"one \w+ a file|one file for each")


def _length(function):
    """Count a function's lines, its docstring left out."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def _parameters(function):
    """Count a function's parameters, ``self`` and ``cls`` left out."""
    args = function.args
    named = [a.arg for a in (*args.posonlyargs, *args.args)]
    if named and named[0] in ("self", "cls"):
        named.pop(0)
    return len(named) + len(args.kwonlyargs) + (args.vararg is not None) + (args.kwarg is not None)


def test_no_file_is_long(sources):
    """A file is read in one sitting."""
    long = {source.name: len(source.lines) for source in sources if len(source.lines) > FILE}

    assert long == {}


def test_no_function_is_long(sources):
    """A function fits on a screen."""
    long = {source.at(f): _length(f) for source in sources for f in source.functions() if _length(f) > FUNCTION}

    assert long == {}


def test_the_usual_function_is_a_few_lines(sources):
    """Half of all functions are shorter than eight lines."""
    assert statistics.median(_length(f) for source in sources for f in source.functions()) < MEDIAN


def test_no_function_takes_many_parameters(sources):
    """What is new enters as a small object, not as one more parameter."""
    many = {
        source.at(f): _parameters(f) for source in sources for f in source.functions() if _parameters(f) > PARAMETERS
    }

    assert many == {}


def test_what_is_read_first_is_short(sources):
    """The event, the loop and the session explain Kedge, together in 350 lines."""
    first = {s.name: len(s.lines) for s in sources if s.name in {"flow.py", "hooks/firing/fire.py", "hooks/session.py"}}

    assert len(first) == 3
    assert sum(first.values()) <= FIRST_READING, first


def test_no_folder_has_many_files(sources):
    """A folder is one subject in a dozen files, or has one file for each thing of a kind, as its docstring then says."""
    files = collections.Counter(source.name.rpartition("/")[0] for source in sources)
    docstring = {source.name: ast.get_docstring(source.tree) or "" for source in sources}
    many = {
        folder: count - 1
        for folder, count in files.items()
        if count - 1 > FILES and not OF_A_KIND.search(docstring.get(f"{folder}/__init__.py", ""))
    }

    assert many == {}
