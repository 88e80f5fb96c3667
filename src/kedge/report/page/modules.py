"""The modules of a recording, for the page's tree: which there are, and which fold because they are alike."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from kedge.report.curves import KINDS
from kedge.report.module_lines import FoldedLine
from kedge.report.shown_run import ShownRun
from kedge.rules.recorded.optimizers import unheld_parameters
from kedge.sites.folding import WHOLE, Folding, pattern
from kedge.store.recording import Recording, SiteInfo

Module = dict[str, Any]


def modules_of(shown_run: ShownRun) -> list[Module]:
    """Return every module, watched or not, in registration order if that was recorded."""
    recording = shown_run.recording
    made: dict[str, Module] = {}
    for number, root in enumerate(recording.roots):
        made[root.prefix] = _empty(root.prefix, number) | {"type": root.name}
        for entry in root.modules:
            module = _empty(entry["path"], number)
            module["type"] = entry.get("type", "")
            module["own"] = entry.get("parameters", 0)
            module["trainable"] = entry.get("trainable")
            if entry.get("file"):
                module |= {"file": entry["file"], "line": entry.get("line")}
            made[entry["path"]] = module
    sizes: dict[str, dict[str, int]] = {}
    for site in recording.sites:
        if site.kind in KINDS:
            continue
        parts = site.owner.split(".")
        for end in range(1, len(parts) + 1):  # modules on its path may have no site of their own
            holder = ".".join(parts[:end])
            made.setdefault(holder, _empty(holder, site.root))
        module = made[site.owner]
        module["sites"].append(site.id)
        module["type"] = module["type"] or site.type
        if site.kind == "out" and module["shape"] is None:
            module["shape"] = list(site.shape)
        if site.kind in ("param", "param.grad"):
            sizes.setdefault(site.owner, {})[site.path] = math.prod(site.shape)

    for path, module in made.items():
        if module["own"] is None:  # it was not recorded
            module["own"] = sum(sizes.get(path, {}).values())
    saved = shown_run.recording.saved
    for sums in saved.modules if saved is not None else ():
        if sums.path in made:
            made[sums.path]["saved"] = sums.bytes
    return list(made.values())


def _empty(path: str, root: int) -> Module:
    return {
        "path": path,
        "root": root,
        "type": "",
        "own": None,
        "shape": None,
        "sites": [],
        "saved": None,
    }


def owners_of(recording: Recording) -> dict[str, str]:
    """Return the module of each site; also of the parameters that no optimizer held, which have no site of their own."""
    unheld = {f"{path}:param": path.rpartition(".")[0] for path in unheld_parameters(recording)}
    return unheld | {site.site: site.owner for site in recording.sites if site.kind not in KINDS}


def groups_of(recording: Recording) -> list[int]:
    """Return a number for each site; alike sites of several blocks have the same."""
    folding = Folding[SiteInfo](
        lambda site: site.site, lambda site: (site.type, site.shape, site.dtype)
    )
    numbers: dict[int, int] = {}
    for number, one in enumerate(folding.fold(recording.sites)):
        for site in one.members:
            numbers[site.id] = number
    return [numbers[site.id] for site in recording.sites]


def folds_of(shown_run: ShownRun, modules: Sequence[Module]) -> list[dict[str, Any]]:
    """Return the blocks that the page's tree folds: the name of each fold, and the paths of its modules.

    Blocks fold if everything in them is alike, they have the same findings, and none is far from
    the others.
    """
    if len(modules) <= WHOLE:
        return []
    blocks = _Blocks(modules, _special(shown_run))
    folding = Folding[Module](lambda module: module["path"], blocks.structure, blocks.state)
    folds = []
    for siblings in blocks.held.values():
        for one in folding.fold(siblings):
            if one.folded:
                paths = [module["path"] for module in one.members]
                folds.append({"name": one.name, "paths": paths})
    return folds


def _special(shown_run: ShownRun) -> dict[str, frozenset[str]]:
    """Return the codes of the findings of each module, and a mark for those far from others of their name."""
    owners = owners_of(shown_run.recording)
    special: dict[str, frozenset[str]] = {}
    for finding in shown_run.findings:
        path = owners.get(finding.site)
        if path is not None:
            special[path] = special.get(path, frozenset()) | {finding.code}
    names = {pattern(line.path) for line in shown_run.folds if isinstance(line, FoldedLine)}
    for line in shown_run.folds:
        if not isinstance(line, FoldedLine) and pattern(line.path) in names:
            special[line.path] = special.get(line.path, frozenset()) | {f"apart {line.path}"}
    return special


class _Blocks:
    """Modules with what is in them."""

    def __init__(self, modules: Sequence[Module], special: Mapping[str, frozenset[str]]) -> None:
        self.special = special
        self.held: dict[str, list[Module]] = {}
        self._structures: dict[str, Hashable] = {}
        for module in modules:
            holder, dot, _ = module["path"].rpartition(".")
            if dot:
                self.held.setdefault(holder, []).append(module)

    def structure(self, module: Module) -> Hashable:
        """Return the types, shapes and parameters of a module and of all in it."""
        path = module["path"]
        if path not in self._structures:
            held = self.held.get(path, ())
            inside = tuple((one["path"][len(path) :], self.structure(one)) for one in held)
            shape = tuple(module["shape"] or ())
            own = module["type"], shape, module["own"], module.get("trainable")
            self._structures[path] = *own, inside
        return self._structures[path]

    def state(self, module: Module) -> frozenset[str]:
        """Return the findings in a module and in all in it."""
        return frozenset().union(*self._codes(module))

    def _codes(self, module: Module) -> Iterator[frozenset[str]]:
        yield self.special.get(module["path"], frozenset())
        for one in self.held.get(module["path"], ()):
            yield from self._codes(one)
