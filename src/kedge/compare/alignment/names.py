"""Modules of two recordings with the same name, complete or without the names of wrappers.

# Note [Numbered names]
A name in a container such as ``Sequential`` is a place: one more layer gives all that follow
another name. So the names in a numbered container count only if its children have the same types
one after another, as far as both go. The children of other numbered containers are aligned by
structure instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kedge.compare.alignment.modules import RecordedModule
from kedge.store.recording import Root

#: The attributes under which wrappers of PyTorch and of libraries hold the wrapped module.
WRAPPERS = frozenset(
    {
        "module",
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_forward_module",
        "_original_module",
    }
)

#: One module alone may have the name and the type of another by chance.
LEAST_VOTES = 2

Name = tuple[str, ...]
Named = Mapping[Name, RecordedModule]
Pair = tuple[RecordedModule, RecordedModule]


def plain(modules: Iterable[RecordedModule]) -> dict[Name, RecordedModule]:
    """Return modules by their paths."""
    return {module.segments: module for module in modules}


def unwrapped(modules: Iterable[RecordedModule]) -> dict[Name, RecordedModule]:
    """Return modules by their paths without the segments that wrappers add.

    Of two modules with the same name the inner one keeps it: the outer one is the wrapper.
    """
    found = {}
    for module in modules:
        name = tuple(part for part in module.segments if part not in WRAPPERS)
        found[name] = module
    return found


def without(
    modules: Iterable[RecordedModule],
    prefix: Name,
) -> dict[Name, RecordedModule]:
    """Return the modules whose paths begin with a prefix, by the rest of their paths."""
    long = len(prefix)
    found = {}
    for module in modules:
        if module.segments[:long] == prefix:
            found[module.segments[long:]] = module
    return found


def same_roots(a: Sequence[Root], b: Sequence[Root]) -> dict[int, int]:
    """Return the numbers of the roots in B that are the same models as those in A.

    They have prefix and class in common. Of the others, whose variables have other names, or of
    which one has the plain names in one recording alone, those of one class are the same in their
    order if both recordings have equally many.
    """
    numbers_in_b = {(root.prefix, root.type): number for number, root in enumerate(b)}
    same = {}
    left_a: dict[str, list[int]] = {}
    for number, root in enumerate(a):
        other = numbers_in_b.pop((root.prefix, root.type), None)
        if other is None:
            left_a.setdefault(root.type, []).append(number)
        else:
            same[number] = other
    left_b: dict[str, list[int]] = {}
    for (_, kind), number in numbers_in_b.items():
        left_b.setdefault(kind, []).append(number)
    for kind, numbers in left_a.items():
        others = left_b.get(kind, [])
        if len(numbers) == len(others):
            same |= zip(numbers, others, strict=True)
    return same


def in_roots(
    modules: Iterable[RecordedModule], roots: Sequence[Root], names: Mapping[int, str]
) -> dict[Name, RecordedModule]:
    """Return modules by names of their roots and their paths in these.

    Args:
        modules: The modules.
        roots: The roots.
        names: A name for each root, by its number; modules of others are left out.
    """
    found = {}
    for module in modules:
        root = module.sites[0].root
        if root in names:
            prefix = [part for part in roots[root].prefix.split(".") if part]
            found[names[root], *module.segments[len(prefix) :]] = module
    return found


def by_name(a: Named, b: Named) -> Iterator[Pair]:
    """Yield pairs of modules of the same name and type; see Note [Numbered names]."""
    moved = _moved(a, b)
    for name, module in a.items():
        other = b.get(name)
        if other is not None and other.type == module.type and not _inside(name, moved):
            yield module, other


def _moved(a: Named, b: Named) -> set[Name]:
    """Return the numbered containers whose children differ in type where both have one."""
    children = _numbered(a)
    others = _numbered(b)
    found = set()
    for name in children.keys() & others.keys():
        both = zip(children[name], others[name], strict=False)
        if any(one != other for one, other in both):
            found.add(name)
    return found


def _numbered(named: Named) -> dict[Name, list[str]]:
    """Return the types of the numbered children of every container, in the order of the numbers."""
    found: dict[Name, list[tuple[int, str]]] = {}
    for name, module in named.items():
        if name and name[-1].isdecimal():
            found.setdefault(name[:-1], []).append((int(name[-1]), module.type))
    return {name: [kind for _, kind in sorted(children)] for name, children in found.items()}


def _inside(name: Name, containers: set[Name]) -> bool:
    return any(name[:i] in containers and name[i].isdecimal() for i in range(len(name)))


def prefixes(
    a: Sequence[RecordedModule],
    b: Sequence[RecordedModule],
) -> tuple[Name, Name] | None:
    """Return the prefix to leave out of the paths of one side so that most names are the same.

    Returns:
        The prefixes of either side, one of them empty; None if leaving out any prefix makes fewer
        than two pairs.
    """
    votes: dict[tuple[Name, Name], int] = {}
    for prefix, number in _votes(a, b).items():
        votes[(), prefix] = number
    for prefix, number in _votes(b, a).items():
        votes[prefix, ()] = number
    most = max(votes.values(), default=0)
    if most < LEAST_VOTES:
        return None
    return min(pair for pair, number in votes.items() if number == most)


def _votes(a: Sequence[RecordedModule], b: Sequence[RecordedModule]) -> Counter[Name]:
    """Return the beginnings of paths in ``b`` without which they name a module of ``a``.

    Each is counted with the paths that it stands before.
    """
    types = {module.segments: module.type for module in a}
    votes: Counter[Name] = Counter()
    for module in b:
        for end in range(1, len(module.segments) + 1):
            if types.get(module.segments[end:]) == module.type:
                votes[module.segments[:end]] += 1
    return votes
