"""The variables of forwards that a selector names: ``block/hidden=``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from torch import nn

from kedge.errors import NoSiteMatched
from kedge.short_text import listed
from kedge.sites.language import Term, op_pattern
from kedge.sites.site import VARIABLE
from kedge.torch_internals.assigned_names import code_of, unseen_assignments, variables_of

_SHOWN = 8


def has_variable(module: nn.Module, pattern: str) -> bool:
    """Whether a module's forward assigns a variable that a pattern matches."""
    code = code_of(module.forward)
    if code is None:
        return False
    return any(op_pattern(pattern).fullmatch(f"{name}{VARIABLE}") for name in variables_of(code))


def check_variables(term: Term, modules: Iterable[nn.Module]) -> None:
    """Refuse variables that no forward has, or to which they assign only what is not seen.

    Args:
        term: The term that names them.
        modules: The modules that it selects.

    Raises:
        NoSiteMatched: If there is no such variable.
    """
    pattern = term.op[0] if term.op else ""
    bare = pattern.removesuffix(VARIABLE)
    names: dict[str, None] = {}
    arguments: set[str] = set()
    unseen: list[str] = []
    what = "none of these forwards"
    for module in modules:
        code: Any = code_of(module.forward)
        what = f"the forward of {type(module).__name__}"
        if code is None:
            continue
        what = f"{code.co_qualname}()"
        arguments.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        for name in variables_of(code):
            names[name] = None
            if not op_pattern(pattern).fullmatch(f"{name}{VARIABLE}"):
                continue
            others = unseen_assignments(code, name)
            if not others:
                return
            unseen += others
    if unseen:
        raise NoSiteMatched(
            f'"{term}": {what} assigns no result of an operation or a module to it: '
            f"{listed(unseen, _SHOWN)}; hook where that value is made"
        )
    advice = f"it assigns {listed(list(names), _SHOWN)}" if names else "it assigns none"
    near = difflib.get_close_matches(bare, names, 1)
    if bare in arguments:
        advice = f'it is an argument: hook ":in[{bare}]" of the module'
    elif near:
        advice = f'did you mean "{near[0]}{VARIABLE}"? {advice}'
    raise NoSiteMatched(f'"{term}": {what} has no such variable; {advice}')
