"""The parts of a model that the ranks of a pipeline hold, put together to one model.

# Note [Stages]
In a pipeline each rank has the modules of its stage, and calls a root of the same name as the
others. The stages' modules have different paths, by which they are recognized, and stand in the
order of the lowest rank that holds each. The values of a root's own sites differ from stage to
stage: its input is that of the first stage, and its output that of the last. What a stage receives
from the one before it was made by the last module there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kedge.store.sites import Root, SiteInfo

_SHARED = 0.5
"""Stages may have less than this share of their modules in common.

An embedding may be used at both ends.
"""


@dataclass(frozen=True)
class Stage:
    """The place of one rank's root in its pipeline.

    Attributes:
        number: The number of the stage, in the order of the pipeline.
        last: The number of the last stage.
    """

    number: int
    last: int

    def has(self, kind: str) -> bool:
        """Whether the root's own site of a kind is that of the whole model."""
        if kind == "in":
            return self.number == 0
        if kind in ("out", "out.grad"):
            return self.number == self.last
        return True


def stages_of(roots: Sequence[Sequence[Root]]) -> list[dict[str, Stage]]:
    """Return for each rank its stages, by the prefixes of their roots.

    Without a pipeline there are none.
    """
    by_prefix: dict[str, dict[int, frozenset[str]]] = {}
    for rank, own in enumerate(roots):
        for root in own:
            by_prefix.setdefault(root.prefix, {}).setdefault(rank, _leaves(root))

    found: list[dict[str, Stage]] = [{} for _ in roots]
    for prefix, held in by_prefix.items():
        parts = list(dict.fromkeys(filter(None, held.values())))
        pairs = combinations(parts, 2)
        if len(parts) > 1 and all(_are_apart(one, other) for one, other in pairs):
            for rank, leaves in held.items():
                if leaves:
                    found[rank][prefix] = Stage(parts.index(leaves), len(parts) - 1)
    return found


def together(known: Root, part: Root) -> Root:
    """Return a root with the modules of one more stage."""
    paths = {module["path"] for module in known.modules}
    more = tuple(module for module in part.modules if module["path"] not in paths)
    parameters = known.parameters + part.parameters
    return replace(known, modules=known.modules + more, parameters=parameters)


def last_output(sites: Mapping[str, SiteInfo], prefix: str) -> int | None:
    """Return the number of the site of a root's modules that returned last so far, if any."""
    last = None
    for site in sites.values():
        if site.kind == "out" and site.path != prefix:
            last = site.id
    return last


def _leaves(root: Root) -> frozenset[str]:
    """Return the paths of the modules that hold no others."""
    paths = {str(module["path"]) for module in root.modules} - {root.prefix}
    return frozenset(paths - {path.rpartition(".")[0] for path in paths})


def _are_apart(a: frozenset[str], b: frozenset[str]) -> bool:
    return len(a & b) < _SHARED * min(len(a), len(b))
