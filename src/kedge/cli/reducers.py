"""Reducers on the command line: NAME=HOW, where HOW is a name, with its arguments in parentheses."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterable
from typing import Any

from kedge.cli.factory import named
from kedge.errors import KedgeError, ScriptError

_CALL = re.compile(r"([^()]+)(\(.*\))?", re.DOTALL)
_KNOWN = ("Mean", "Covariance", "Histogram", "Quantiles", "TopK")


def pair(text: str, option: str, value: str) -> tuple[str, str]:
    """Return the two parts of NAME=VALUE.

    Raises:
        ScriptError: The text has another form.
    """
    name, equals, rest = text.partition("=")
    if not (name and equals and rest):
        raise ScriptError(f"{option} {text}: write NAME={value}")
    return name, rest


def failed(what: str, error: Exception) -> Exception:
    """Return the error to raise when a user's function raised one, with its place.

    Kedge's own errors stay as they are.
    """
    if isinstance(error, KedgeError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    first_line = str(error).strip().partition("\n")[0]
    return ScriptError(
        f"{what} raised {type(error).__name__}: "
        f"{first_line} ({last.filename}, line {last.lineno}); fix it"
    )


def function(text: str, option: str, known: Iterable[str]) -> Any:
    """Return a function by name, for a word that is not a known one.

    Raises:
        ScriptError: The word does not name a function.
    """
    if ":" not in text:
        raise ScriptError(f"{option} {text}: use {', '.join(known)}, or MODULE:NAME of your own")
    return named(text)


def reducers(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Return the reducers of each value, in the order typed.

    Raises:
        ScriptError: One of them cannot be made.
    """
    made: dict[str, list[Any]] = {}
    for text in texts:
        name, how = pair(text, "--reduce", "HOW")
        made.setdefault(name, []).append(_reducer(name, how))
    return made


def _reducer(name: str, how: str) -> Any:
    from kedge.features import reduce

    shown = f"--reduce {name}={how}"
    found = _CALL.fullmatch(how)
    if found is None:
        raise ScriptError(f"{shown}: write HOW or HOW(ARGUMENT=VALUE, ...), such as topk(5)")
    word, call = found.groups()
    known: dict[str, Any] = {one.lower(): getattr(reduce, one) for one in _KNOWN}
    made = known.get(word) or function(word, "--reduce", known)
    args, kwargs = arguments(call or "()", shown)
    try:
        if call or callable(made):
            made = made(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ScriptError(f"{shown}: {error}; fix the arguments in parentheses") from error
    except Exception as error:
        raise failed(f"{shown}: {word}", error) from error
    if not hasattr(made, "update"):
        raise ScriptError(
            f"{shown}: {word} is a value of type {type(made).__name__}, not a reducer; "
            "name a reducer"
        )
    return made


def arguments(text: str, shown: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call: Python literals, and plain words as text.

    Raises:
        ScriptError: The text cannot be read as arguments.
    """
    try:
        # The text begins and ends like a call's arguments.
        call: Any = ast.parse(f"call{text}", mode="eval").body
        args = [_value(one) for one in call.args]
        kwargs = {str(one.arg): _value(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ScriptError(
            f"{shown}: {text} cannot be read; arguments are words, numbers and lists, "
            "such as (positions=mean) or ([0.5, 0.9])"
        ) from error
    return args, kwargs


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    return ast.literal_eval(node)
