"""What a function takes from around it."""

from __future__ import annotations

import functools

from kedge.calls.closure import defaults, enclosed, names_in


def test_enclosed_variables_have_their_names():
    """They come from the functions around, in any number of levels."""
    scale, shift = 2, 3

    def outer():
        return lambda value: scale * value + shift

    assert enclosed(outer()) == {"scale": 2, "shift": 3}


def test_a_variable_without_a_value_is_none():
    """A function may be looked at before the program has given its variables their values."""

    def looks_ahead():
        return later

    before = enclosed(looks_ahead)
    later = 1

    assert before == {"later": None}
    assert enclosed(looks_ahead) == {"later": later}


def test_what_is_no_function_encloses_nothing():
    """A builtin, a partial function and an object have no closure."""
    assert [enclosed(one) for one in (len, functools.partial(len), object())] == [{}, {}, {}]


def test_defaults_have_the_names_of_their_parameters():
    """Positional ones belong to the last parameters, and keywords to their own."""

    def function(first, second=2, /, third=3, *rest, fourth, fifth=5, **more):
        return first, second, third, rest, fourth, fifth, more

    assert defaults(function) == {"second": 2, "third": 3, "fifth": 5}
    assert defaults(test_defaults_have_the_names_of_their_parameters) == {}


def test_names_are_those_of_inner_functions_too():
    """A comprehension and a lambda use what the function around them uses."""

    def function(values):
        return [len(value) for value in values], lambda: sum(values.shape)

    assert {"len", "sum", "shape"} <= set(names_in(function.__code__))
