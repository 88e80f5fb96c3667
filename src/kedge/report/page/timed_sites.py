"""The times of modules on a page: rows of the heat-map beside those of the sites."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kedge.report.page.sheets import FINITE, Sheet, Sheets
from kedge.report.page.step_bins import Grouping
from kedge.sites.folding import block
from kedge.sites.site import escape
from kedge.store.recording import Recording

MILLISECONDS = "milliseconds"
_KINDS = {"time.forward": "forward", "time.backward": "backward"}


def with_times(
    recording: Recording, sites: list[dict[str, Any]], sheets: Sheets
) -> tuple[list[dict[str, Any]], Sheets]:
    """Return a page's sites and sheets with a row for each time of each module, if they were timed.

    Args:
        recording: The recording.
        sites: What the page has of each site.
        sheets: Their sheets.
    """
    timed = recording.timed_modules
    if timed is None:
        return sites, sheets
    groups = Grouping.of(sheets.bins, timed.steps)
    group = 1 + max((site["group"] for site in sites), default=-1)
    types = _types(recording)
    added: list[dict[str, Any]] = []
    values = []
    for kind, direction in _KINDS.items():
        for path, seconds in zip(timed.paths, getattr(timed, direction), strict=True):
            folded = groups.fold(seconds * 1e3, "last")
            if np.isnan(folded).all():
                continue
            added.append(_described(path, kind, types.get(path, "")) | {"group": group})
            values.append(folded)
            group += 1
    rows = list(range(len(sites), len(sites) + len(added)))
    table = np.array(values).reshape(len(added), len(sheets.bins))
    states = np.where(np.isnan(table), 0, FINITE).astype(np.uint8)
    by_name = {**sheets.by_name, MILLISECONDS: Sheet(rows, table)}
    joined = replace(sheets, states=np.vstack([sheets.states, states]), by_name=by_name)
    return [*sites, *added], joined


def _types(recording: Recording) -> dict[str, str]:
    """Return the class of each module by its recorded path."""
    return {module["path"]: module["type"] for root in recording.roots for module in root.modules}


def _described(path: str, kind: str, type_: str) -> dict[str, Any]:
    return {
        "site": f"{escape(path)}:{kind}",
        "path": path,
        "kind": kind,
        "type": type_,
        "root": -1,
        "shape": [],
        "dtype": MILLISECONDS,
        "from": [],
        "owner": path,
        "block": block(path),
    }
