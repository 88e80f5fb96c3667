"""Words for modules and shapes."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.compare.alignment.modules import RecordedModule
from kedge.short_text import listed
from kedge.sites.folding import Folding

#: The number of modules that are named before the rest is counted.
NAMED = 3


def text_of_shape(shape: Sequence[int]) -> str:
    """Return a shape as text: ``32x64``."""
    return "x".join(map(str, shape)) or "a single number"


def names_of_modules(modules: Sequence[RecordedModule]) -> str:
    """Return the names of some modules with their types."""
    return listed(folded_modules(modules), NAMED)


def folded_modules(modules: Sequence[RecordedModule]) -> list[str]:
    """Return the names of modules with their types.

    Those of one type whose paths differ only in numbers share a name.
    """
    folding = Folding[RecordedModule](lambda module: module.label, lambda module: module.type)
    names = []
    for one in folding.fold(modules):
        first = one.members[0]
        if one.folded:
            names.append(f"{one.name} ({first.type})")
        else:
            names.append(name_of_module(first))
    return names


def name_of_module(module: RecordedModule) -> str:
    """Return the name of a module with its type: ``fc1 (Linear)``, ``CrossEntropyLoss``."""
    if module.type in ("", module.label.strip("()")):
        return module.label
    return f"{module.label} ({module.type})"


def change_between(a: RecordedModule, b: RecordedModule) -> str:
    """Return the difference between two modules, one in the place of the other."""
    if a.type != b.type and a.path == b.path:
        return f"{a.label} is {a.type} in A, {b.type} in B"
    if a.type != b.type:
        return f"{a.label} is {a.type} in A, {b.label} is {b.type} in B"
    names = a.unlike(b)
    return f"{name_of_module(a)} has {_held(names, a)} in A, {_held(names, b)} in B"


def _held(names: Sequence[str], module: RecordedModule) -> str:
    shapes = dict(module.parameters)
    held = []
    for name in names:
        if name in shapes:
            held.append(f"{name} {text_of_shape(shapes[name])}")
        else:
            held.append(f"no {name}")
    return " and ".join(held)
