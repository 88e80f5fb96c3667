"""The roots of a recording: models that the program calls by themselves, and the paths inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kedge.short_text import told_apart
from kedge.store.recording import Recording, Root

T = TypeVar("T")


def root_path(recording: Recording, root: int) -> str:
    """Return the path of a root; empty for the first one, and for an unknown one."""
    if 0 <= root < len(recording.roots):
        return recording.roots[root].prefix
    return ""


def root_paths(recording: Recording) -> frozenset[str]:
    """Return the paths of all roots; a recording that lists none has one, the empty path."""
    return frozenset(root.prefix for root in recording.roots) or frozenset({""})


def root_of(recording: Recording, path: str) -> int:
    """Return the root that holds a path: the one with the longest prefix of it; -1 if none holds it."""
    if not recording.roots:
        return 0
    fitting = [i for i, root in enumerate(recording.roots) if within(path, root.prefix)]
    found = max(fitting, key=lambda i: len(recording.roots[i].prefix), default=-1)
    if found >= 0 and _holds(recording.roots[found], path):
        return found
    return -1


def root_names(recording: Recording) -> tuple[str, ...]:
    """Return a name for each root that no other one has."""
    return told_apart([root.name for root in recording.roots])


def root_titles(recording: Recording) -> tuple[str, ...]:
    """Return a name with the class for each root, ``G (Sequential)``, that no other one has."""
    return told_apart([root.title for root in recording.roots])


def names_of(recording: Recording, roots: Iterable[int]) -> str:
    """Return the names of some roots, with commas between; "the model" if none is known."""
    names = root_names(recording)
    known = [names[root] for root in roots if 0 <= root < len(names)]
    return ", ".join(known) or "the model"


def by_root(items: Iterable[T], root: Callable[[T], int]) -> list[tuple[int, list[T]]]:
    """Group items by their root, in the order of the roots; the items of a root keep their order."""
    groups: dict[int, list[T]] = {}
    for item in items:
        groups.setdefault(root(item), []).append(item)
    return sorted(groups.items(), key=lambda group: group[0])


def _holds(root: Root, path: str) -> bool:
    """Whether a root has a child that a path begins with, as far as its modules are described."""
    prefix = root.prefix
    child, _, rest = path[len(prefix) :].lstrip(".").partition(".")
    children = set()
    for module in root.modules:
        inside = str(module["path"])[len(prefix) :].lstrip(".")
        children.add(inside.partition(".")[0])
    # A path without a dot is a parameter or a child of the root itself, which may have got it
    # later.
    return not rest or not root.modules or child in children


def within(path: str, holder: str) -> bool:
    """Whether a path is another one or inside it."""
    return not holder or path == holder or path.startswith(f"{holder}.")
