"""The numbers of a run for tools that draw curves: a few named ones per step.

# Note [Names]
TensorBoard and Weights & Biases make a section for each first part of a name, sort the sections by
name, and the curves in a section too. So the few curves of the whole run are in the first section,
the loss before the norm; each statistic of each kind of site has a section of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np

from kedge.short_text import told_apart
from kedge.store.rows import FULL, STATISTICS
from kedge.watch.run.sinks import Columns, Entries, rows_of

#: The tag of texts.
FINDINGS = "kedge/findings"


class Scalars:
    """A sink that names the numbers of each step: ``kedge_rms_out/layer1``; see Note [Names].

    These are the given statistics of every site in every measured step and, in guarded steps too,
    ``kedge/loss`` and ``kedge/norm_of_gradients``. Without a backward pass, the loss is the single
    number that a root returns: ``kedge/loss/CrossEntropyLoss``. Measured NaNs are sent as NaN.

    Args:
        statistics: The statistics of each site to send.
    """

    def __init__(self, statistics: Sequence[str]) -> None:
        unknown = [name for name in statistics if name not in STATISTICS]
        if unknown:
            known = ", ".join(STATISTICS)
            raise ValueError(f"{unknown[0]!r} is not a statistic of a recording; there are {known}")
        self.statistics = tuple(statistics)
        self.step = 0
        self._sites: Entries = ()
        self._roots: Entries = ()
        self._has_loss = False

    def sites(self, sites: Entries, roots: Entries) -> None:
        """Remember the sites."""
        self._sites = list(sites)
        self._roots = list(roots)
        self._has_loss = any(site["kind"] == "loss" for site in sites)

    def stats(self, step: int, columns: Columns) -> None:
        """Send the numbers of one step."""
        self.step = max(step, self.step)
        numbers = dict(self._numbers(step, columns))
        if numbers:
            self.send(step, numbers)

    def event(self, event: Mapping[str, Any]) -> None:
        """Send a finding; other events stay in the recording."""
        if event["kind"] == "finding":
            self.send_finding(event)

    @abstractmethod
    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step by their names."""

    @abstractmethod
    def send_finding(self, finding: Mapping[str, Any]) -> None:
        """Send a finding."""

    def _numbers(self, step: int, columns: Columns) -> Iterator[tuple[str, float]]:
        rows = rows_of(step, columns)
        clean = rows.clean.tolist()
        ids = np.asarray(columns["site"]).tolist()
        values = {name: rows.statistic(name).tolist() for name in {*self.statistics, "mean"}}
        for i, number in enumerate(ids):
            site = self._sites[number]
            kind = site["kind"]
            place = _place(site)
            title = place or self._root(site)
            is_number = rows.count[i] == rows.calls[i] and not site["shape"]
            named: dict[str, float] = {}
            if kind == "grad.norm":
                name = f"kedge/norm_of_gradients/{place}".rstrip("/")
                named[name] = float(np.sqrt(rows.sumsq[i]))
            elif kind == "loss":
                named[f"kedge/{site['site']}"] = values["mean"][i]
            elif kind == "out" and is_number and self._has_loss:
                continue
            elif kind == "out" and is_number:
                named[f"kedge/loss/{title}"] = values["mean"][i]
            elif kind != "in" and rows.level[i] == FULL:
                for name in self.statistics:
                    named[f"kedge_{name}_{kind}/{title}"] = values[name][i]
            for name, value in named.items():
                was_measured = not isnan(value) or not clean[i]
                if was_measured:
                    yield name, value

    def _root(self, site: Mapping[str, Any]) -> str:
        root: int = site.get("root", 0)
        if not 0 <= root < len(self._roots):
            return "model"
        names = told_apart([str(each["name"]) for each in self._roots])
        return names[root]


def _place(site: Mapping[str, Any]) -> str:
    """Return the module or parameter of a site, with the index of its tensor: ``lstm[0]``."""
    place, _, kind = site["site"].rpartition(":")
    leaf = kind.removeprefix(site["kind"])
    return str(place.replace("\\", "") + leaf)


def text_of(finding: Mapping[str, Any]) -> str:
    """Return a finding as text."""
    return f"{finding['message']} {finding['remedy']}".rstrip()
