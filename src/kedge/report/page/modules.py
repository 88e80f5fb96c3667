"""The modules of a recording, watched or not, for the page's tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kedge.report.curves import KINDS
from kedge.store.recording import Recording, SiteInfo
from kedge.store.saved_account import newest


def modules_of(recording: Recording) -> list[dict[str, Any]]:
    """Return every module, in registration order if that was recorded."""
    made: dict[str, dict[str, Any]] = {}
    for number, root in enumerate(recording.roots):
        made[root.prefix] = _empty(root.prefix, number) | {"type": root.name}
        for entry in root.modules:
            made[entry["path"]] = _registered(entry, number)
    for site in recording.sites:
        _place(made, site)
    _count_parameters(made, recording)
    _note_saved(made, recording)
    return list(made.values())


def _registered(entry: Mapping[str, Any], root: int) -> dict[str, Any]:
    module = _empty(entry["path"], root)
    module |= {"type": entry.get("type", ""), "own": entry.get("parameters", 0)}
    module |= {"trainable": entry.get("trainable")}
    if entry.get("file"):
        module |= {"file": entry["file"], "line": entry.get("line")}
    return module


def _empty(path: str, root: int) -> dict[str, Any]:
    return {
        "path": path,
        "root": root,
        "type": "",
        "own": None,
        "shape": None,
        "sites": [],
        "saved": None,
    }


def _place(made: dict[str, dict[str, Any]], site: SiteInfo) -> None:
    """Add a site to its module; missing modules on its path are added too."""
    if site.kind in KINDS:
        return
    path = site.owner
    for holder in _holders(path):
        made.setdefault(holder, _empty(holder, site.root))
    module = made[path]
    module["sites"].append(site.id)
    module["type"] = module["type"] or site.type
    if site.kind == "out" and module["shape"] is None:
        module["shape"] = list(site.shape)


def _holders(path: str) -> list[str]:
    """Return the paths of a module's holders and its own, the outermost first; the root's only for the root itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))] or [""]


def _count_parameters(made: dict[str, dict[str, Any]], recording: Recording) -> None:
    """Fill in the number of a module's own parameters from their sites, where it was not recorded."""
    sizes: dict[str, dict[str, int]] = {}
    for site in recording.sites:
        if site.kind in ("param", "param.grad"):
            sizes.setdefault(site.owner, {})[site.path] = math.prod(site.shape)
    for path, module in made.items():
        if module["own"] is None:
            module["own"] = sum(sizes.get(path, {}).values())


def _note_saved(made: dict[str, dict[str, Any]], recording: Recording) -> None:
    for entry in (saved_event(recording) or {}).get("modules", ()):
        if entry.get("path") in made:
            made[entry["path"]]["saved"] = entry.get("bytes")


def saved_event(recording: Recording) -> Mapping[str, Any] | None:
    """Return the newest event about saved tensors."""
    return newest(recording.events)
