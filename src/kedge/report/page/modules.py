"""The modules of a recording, for the page's tree, and which fold because they are alike."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from kedge.report.curves import KINDS
from kedge.report.module_lines import FoldedLine
from kedge.report.shown_run import ShownRun
from kedge.rules.recorded.optimizers import unheld_parameters
from kedge.sites.folding import WHOLE, Folding, pattern
from kedge.sites.site import OF_OPERATION
from kedge.store.recording import Recording, SiteInfo

Module = dict[str, Any]


def modules_of(shown_run: ShownRun) -> list[Module]:
    """Return every module, watched or not, in registration order if that was recorded."""
    recording = shown_run.recording
    made: dict[str, Module] = {}
    for number, root in enumerate(recording.roots):
        made[root.prefix] = _empty(root.prefix, number) | {"type": root.type}
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
        if site.kind in ("out", f"{OF_OPERATION}out") and module["shape"] is None:
            module["shape"] = list(site.shape)
        if site.kind in ("param", "param.grad"):
            sizes.setdefault(site.owner, {})[site.path] = math.prod(site.shape)

    for path, module in made.items():
        if module["own"] is None:  # it was not recorded
            module["own"] = sum(sizes.get(path, {}).values())
    saved = shown_run.recording.saved
    if saved is not None:
        for sums in saved.modules:
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
    """Return the module of each site.

    Parameters that no optimizer held are among them, though they have no site of their own.
    """
    owners = {}
    for path in unheld_parameters(recording):
        owners[f"{path}:param"] = path.rpartition(".")[0]
    for site in recording.sites:
        if site.kind not in KINDS:
            owners[site.site] = site.owner
    return owners


def groups_of(recording: Recording) -> list[int]:
    """Return a number for each site; alike sites of several blocks have the same."""

    def likeness(site: SiteInfo) -> Hashable:
        return site.type, site.shape, site.dtype

    folding = Folding[SiteInfo](lambda site: site.site, likeness)
    numbers: dict[int, int] = {}
    for number, one in enumerate(folding.fold(recording.sites)):
        for site in one.members:
            numbers[site.id] = number
    return [numbers[site.id] for site in recording.sites]


def folds_of(shown_run: ShownRun, modules: Sequence[Module]) -> list[dict[str, Any]]:
    """Return the blocks that the page's tree folds: the name of each, and the paths in it.

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


def _special(shown_run: ShownRun) -> dict[str, set[str]]:
    """Return the codes of each module's findings, and a mark for those far from others alike."""
    owners = owners_of(shown_run.recording)
    special: dict[str, set[str]] = {}
    for finding in shown_run.findings:
        path = owners.get(finding.site)
        if path is not None:
            special.setdefault(path, set()).add(finding.code)
    names = {pattern(line.path) for line in shown_run.folds if isinstance(line, FoldedLine)}
    for line in shown_run.folds:
        if not isinstance(line, FoldedLine) and pattern(line.path) in names:
            special.setdefault(line.path, set()).add(f"apart {line.path}")
    return special


class _Blocks:
    """Modules with what is in them."""

    def __init__(
        self,
        modules: Sequence[Module],
        special: Mapping[str, set[str]],
    ) -> None:
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
        path = module["path"]
        inside = map(self.state, self.held.get(path, ()))
        return frozenset(self.special.get(path, ())).union(*inside)
