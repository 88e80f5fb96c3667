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
    """Return the names of modules with their types; those of one type whose paths differ only in numbers share a name."""
    folds = Folding[RecordedModule](lambda module: module.label, lambda module: module.type).fold(
        modules
    )
    return [
        f"{one.name} ({one.members[0].type})" if one.folded else name_of_module(one.members[0])
        for one in folds
    ]


def name_of_module(module: RecordedModule) -> str:
    """Return the name of a module with its type: ``fc1 (Linear)``, ``CrossEntropyLoss``."""
    return (
        module.label
        if module.type in ("", module.label.strip("()"))
        else f"{module.label} ({module.type})"
    )


def change_between(a: RecordedModule, b: RecordedModule) -> str:
    """Return the difference between two modules, one in the place of the other."""
    if a.type != b.type:
        return f"{a.label} is {a.type} in A, {b.label + ' is ' if b.path != a.path else ''}{b.type} in B"
    ones, others = dict(a.parameters), dict(b.parameters)
    held = [" and ".join(_held(name, side) for name in a.unlike(b)) for side in (ones, others)]
    return f"{name_of_module(a)} has {held[0]} in A, {held[1]} in B"


def _held(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return f"{name} {text_of_shape(shapes[name])}" if name in shapes else f"no {name}"
