"""The figures of a birth: its value, the values next to it, and how parameters grew before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.rules.naming import plain
from kedge.rules.nonfinite.bad_steps import NAN, usable
from kedge.rules.nonfinite.wording.birth_in_step import BirthInStep
from kedge.rules.nonfinite.wording.step_size import GROWN, SMALL, rms_at
from kedge.store.recording import Rows, SiteInfo
from kedge.store.rows import FULL


@dataclass(frozen=True)
class BirthFigures:
    """The figures of one birth.

    Attributes:
        case: The birth in its step.
    """

    case: BirthInStep

    def value(self) -> str:
        """Return the kind of the value, and the number of elements that have it."""
        row = self.row()
        if not row["nonfinite"]:
            return self.kind()
        beside = row["nonfinite"] - row["nan"] if row["nan"] else 0
        if not beside:
            return f"{self.kind()} ({row['nonfinite']} of {row['count']} elements)"
        also = "an infinity" if beside == 1 else f"{beside} infinities"
        return f"{self.kind()} ({row['nan']} of {row['count']} elements, beside {also})"

    def kind(self) -> str:
        """Return the kind of the value in words: NaN, inf, -inf."""
        site = self.case.birth.site
        rows = self.case.rows(site)
        at = _latest(rows, self.case.step)
        if self.case.bad_step.states[site] == NAN or rows.has_nan[at]:
            return "NaN"
        below = rows.min[at] == -np.inf or rows.sum[at] == -np.inf
        above = rows.max[at] == np.inf or rows.sum[at] == np.inf
        if not below and not above:
            return "infinities" if rows.nonfinite[at] > 0 else "an infinite norm"
        return "inf and -inf" if below and above else "-inf" if below else "inf"

    def row(self) -> dict[str, Any]:
        """Return the figures of the site in the step, or in the last one before it."""
        rows = self.case.rows(self.case.birth.site)
        return _row(rows, _latest(rows, self.case.step))

    def near(self, site: int) -> dict[str, Any]:
        """Return the range of a site's values when they were last measured in full, and their rms in this step."""
        rows, step = self.case.rows(site), self.case.step
        full = np.flatnonzero((rows.level == FULL) & (rows.step <= step))
        row = _row(rows, int(full[-1])) if len(full) else {}
        figures = {
            name: row[name] for name in ("step", "min", "max", "rms") if row.get(name) is not None
        }
        now = _finite_rms(rows, step) if figures.get("step") != step else None
        return figures | ({} if now is None else {"now": plain(now)})

    def largest(self) -> float:
        """Return the largest magnitude next to the birth; 0 if it is not known."""
        figures = [self.near(site) for site in self.case.birth.near]
        return max(
            (abs(f[name]) for f in figures for name in ("min", "max", "rms", "now") if name in f),
            default=0.0,
        )

    def weights(self) -> float:
        """Return a bound on the magnitude of the parameters of the module that made it; 0 if one of them is not known."""
        module = self.case.birth.module
        norms = [] if module is None else [self._norm(site) for site in module.params]
        return max(norms, default=0.0) if all(norms) else 0.0

    def _norm(self, site: int) -> float:
        rows = self.case.rows(site)
        if not len(rows):
            return 0.0
        norm = float(np.sqrt(rows.sumsq[_latest(rows, self.case.step)]))
        return norm if np.isfinite(norm) else 0.0

    def had_diverged(self) -> bool:
        """Whether products of the values next to the birth overflow in its dtype; float16 overflows in healthy runs too."""
        return self.largest() > (np.inf if self.case.site.dtype == "float16" else 1e15)

    def is_vast(self, site: int) -> bool:
        """Whether the squares of a parameter left float32: it is very large, or holds infinities."""
        rows = self.case.rows(site)
        return bool(len(rows) and np.isinf(rows.sumsq[_latest(rows, self.case.step)]))

    def of_update(self) -> str:
        """Return the size of the updated parameter and of its gradient, in brackets; empty if neither is known."""
        sizes = []
        for kind, words in (("param", "its rms was"), ("param.grad", "its gradient's")):
            sites = (s for s in self.case.recording.of_kind(kind) if s.path == self.case.site.path)
            rows = next((self.case.recording.rows(site) for site in sites), None)
            size = _finite_rms(rows, self.case.step) if rows is not None else None
            sizes += [f"{words} {size:.2g}"] if size is not None else []
        return f" ({', '.join(sizes)})" if sizes else ""

    def growth(self) -> dict[str, Any] | None:
        """Return the figures of the parameter of the same root that grew most; None if none grew far."""
        params = [
            site
            for site in self.case.recording.of_kind("param")
            if site.root == self.case.site.root
        ]
        grown = [growth for site in params if (growth := self._growth_of(site))]
        return max(grown, key=lambda each: each["ratio"] or np.inf, default=None)

    def _growth_of(self, site: SiteInfo) -> dict[str, Any] | None:
        """Return the growth of a parameter since its first row; squares beyond float32 count as infinitely large."""
        rows = self.case.recording.rows(site)
        until = np.flatnonzero((rows.step <= self.case.step) & usable(rows))
        size = rows.statistic("rms")[until]
        if len(size) < 2 or not SMALL < size[0] < np.inf or not size[-1] > GROWN * size[0]:
            return None
        return {
            "site": site.site,
            "first": int(rows.step[until[0]]),
            "was": plain(size[0]),
            "step": int(rows.step[until[-1]]),
            "now": plain(size[-1]),
            "ratio": plain(size[-1] / size[0]),
            "words": f"{size[-1]:.2g}" if np.isfinite(size[-1]) else "more than 1e19",
        }


def _latest(rows: Rows, step: int) -> int:
    """Return the index of the row of a step, or of the last one before it."""
    return max(int(np.searchsorted(rows.step, step, side="right")) - 1, 0)


def _row(rows: Rows, at: int) -> dict[str, Any]:
    """Return the measured figures of one row as plain JSON values."""
    numbers: dict[str, Any] = {
        name: plain(rows.statistic(name)[at]) for name in ("min", "max", "rms")
    }
    counts = {name: int(getattr(rows, name)[at]) for name in ("nonfinite", "nan")}
    known = {name: None if count < 0 else count for name, count in counts.items()}
    return {"step": int(rows.step[at]), **numbers, **known, "count": int(rows.count[at])}


def _finite_rms(rows: Rows, step: int) -> float | None:
    """Return the rms of the row of one step; None if it is not finite."""
    size = rms_at(rows, step)
    return size if np.isfinite(size) else None
