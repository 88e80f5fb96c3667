"""Alike blocks of a model, for the page: its tree of modules folds them, and its pictures compare them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from kedge.report.curves import KINDS
from kedge.report.module_lines import FoldedLine, folded, lines
from kedge.rules.recorded.optimizers import unheld_parameters
from kedge.rules.rule import Finding
from kedge.sites.folding import WHOLE, Folding, pattern
from kedge.store.recording import Recording, SiteInfo

Modules = Sequence[Mapping[str, Any]]


def owners_of(recording: Recording) -> dict[str, str]:
    """Return the module of each site; also of the parameters that no optimizer held, which have no site of their own."""
    unheld = {f"{path}:param": path.rpartition(".")[0] for path in unheld_parameters(recording)}
    return unheld | {site.site: site.owner for site in recording.sites if site.kind not in KINDS}


def groups_of(recording: Recording) -> list[int]:
    """Return a number for each site; alike sites of several blocks have the same."""
    folding = Folding[SiteInfo](
        lambda site: site.site, lambda site: (site.type, site.shape, site.dtype)
    )
    numbers = {
        site.id: number
        for number, one in enumerate(folding.fold(recording.sites))
        for site in one.members
    }
    return [numbers[site.id] for site in recording.sites]


def folds_of(
    recording: Recording, modules: Modules, findings: Sequence[Finding]
) -> list[dict[str, Any]]:
    """Return the blocks that the page's tree folds: the name of each fold, and the paths of its modules.

    Blocks fold if everything in them is alike, they have the same findings, and none is far from
    the others.
    """
    if len(modules) <= WHOLE:
        return []
    blocks = _Blocks(modules, _special(recording, findings))
    return [
        {"name": one.name, "paths": [module["path"] for module in one.members]}
        for siblings in blocks.held.values()
        for one in Folding(_path, blocks.structure, blocks.state).fold(siblings)
        if one.folded
    ]


def _path(module: Mapping[str, Any]) -> str:
    return str(module["path"])


def _special(recording: Recording, findings: Sequence[Finding]) -> dict[str, frozenset[str]]:
    """Return the codes of the findings of each module, and a mark for those far from others of their name."""
    owners = owners_of(recording)
    special: dict[str, frozenset[str]] = {}
    for finding in findings:
        path = owners.get(finding.site)
        if path is not None:
            special[path] = special.get(path, frozenset()) | {finding.code}
    made = folded(lines(recording), findings)
    names = {pattern(line.path) for line in made if isinstance(line, FoldedLine)}
    for line in made:
        if not isinstance(line, FoldedLine) and pattern(line.path) in names:
            special[line.path] = special.get(line.path, frozenset()) | {f"apart {line.path}"}
    return special


class _Blocks:
    """Modules with what is in them."""

    def __init__(self, modules: Modules, special: Mapping[str, frozenset[str]]) -> None:
        self.special = special
        self.held: dict[str, list[Mapping[str, Any]]] = {}
        self._structures: dict[str, Hashable] = {}
        for module in modules:
            holder, dot, _ = module["path"].rpartition(".")
            if dot:
                self.held.setdefault(holder, []).append(module)

    def structure(self, module: Mapping[str, Any]) -> Hashable:
        """Return the types, shapes and parameters of a module and of all in it."""
        path = module["path"]
        if path not in self._structures:
            inside = tuple(
                (one["path"][len(path) :], self.structure(one)) for one in self.held.get(path, ())
            )
            shape = tuple(module["shape"] or ())
            self._structures[path] = (
                module["type"],
                shape,
                module["own"],
                module.get("trainable"),
                inside,
            )
        return self._structures[path]

    def state(self, module: Mapping[str, Any]) -> frozenset[str]:
        """Return the findings in a module and in all in it."""
        return frozenset().union(*self._codes(module))

    def _codes(self, module: Mapping[str, Any]) -> Iterator[frozenset[str]]:
        yield self.special.get(module["path"], frozenset())
        for one in self.held.get(module["path"], ()):
            yield from self._codes(one)
