"""The numbers of a run for tools that draw curves: a few named ones per step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np

from kedge.store.rows import FULL, STATISTICS
from kedge.watch.run.sinks import Columns, Entries, rows_of

#: The tag of texts.
FINDINGS = "kedge/findings"


class Scalars:
    """A sink that names the numbers of each step: ``kedge/rms/out/layer1``.

    These are the given statistics of every site in every sampled step, ``kedge/norm/grad.norm``, and
    ``kedge/value/out/...`` for a root that returns a single number, such as the loss. Measured NaNs
    are sent as NaN.

    Args:
        statistics: The statistics of each site to send.
    """

    def __init__(self, statistics: Sequence[str]) -> None:
        unknown = [name for name in statistics if name not in STATISTICS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a statistic of a recording; there are {', '.join(STATISTICS)}")
        self.statistics = tuple(statistics)
        self.step = 0
        self.found = 0
        self._sites: Entries = ()

    def sites(self, sites: Entries, roots: Entries) -> None:  # noqa: ARG002 - the sites' names are enough
        """Remember the sites."""
        self._sites = list(sites)

    def stats(self, step: int, columns: Columns) -> None:
        """Send the numbers of one step."""
        self.step = max(step, self.step)
        numbers = dict(self._numbers(step, columns))
        if numbers:
            self.send(step, numbers)

    def event(self, event: Mapping[str, Any]) -> None:
        """Send a finding; other events stay in the recording."""
        if event["kind"] == "finding":
            self.found += 1
            self.send_finding(event)

    @abstractmethod
    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step by their names."""

    @abstractmethod
    def send_finding(self, finding: Mapping[str, Any]) -> None:
        """Send a finding."""

    def _numbers(self, step: int, columns: Columns) -> Iterator[tuple[str, float]]:
        rows = rows_of(step, columns)
        clean, ids = rows.clean.tolist(), np.asarray(columns["site"]).tolist()
        values = {name: rows.statistic(name).tolist() for name in {*self.statistics, "mean"}}
        for i, number in enumerate(ids):
            site = self._sites[number]
            if site["kind"] == "grad.norm":
                yield tag("norm", site), float(np.sqrt(rows.sumsq[i]))
            elif site["kind"] == "out" and rows.count[i] == rows.calls[i] and not site["shape"]:
                yield tag("value", site), values["mean"][i]
            elif site["kind"] != "in" and rows.level[i] == FULL:
                each = ((name, values[name][i]) for name in self.statistics)
                yield from ((tag(name, site), value) for name, value in each if not (isnan(value) and clean[i]))


def tag(statistic: str, site: Mapping[str, Any]) -> str:
    """Return the name of a statistic of a site: ``kedge/rms/out/layer1``."""
    place, _, kind = site["site"].rpartition(":")
    leaf = kind.removeprefix(site["kind"])
    return f"kedge/{statistic}/{site['kind']}/{place.replace(chr(92), '')}{leaf}".rstrip("/")


def text_of(finding: Mapping[str, Any]) -> str:
    """Return a finding as text."""
    remedy = f" {finding['remedy']}" if finding["remedy"] else ""
    return f"{finding['message']}{remedy}"
