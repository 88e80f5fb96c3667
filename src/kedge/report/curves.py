"""Curves with a value in every watched step: the losses, and the norm of all gradients of each model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kedge.report.sparkline import ScaleSeries, sparkline
from kedge.rules.recorded.roots import root_paths
from kedge.short_text import counted
from kedge.store.recording import Recording, Rows, SiteInfo
from kedge.store.rows import Bools, Floats, Ints

KINDS = ("loss", "grad.norm")
"""The kinds of sites that are only curves."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A number for each of some steps.

    Attributes:
        kind: Whether it is a loss or a norm.
        label: The line that called backward, or the model of the gradients.
        site: The number of its site; None if it is the sum over several sites.
        steps: The steps with a value.
        values: The values.
        bad: Whether the value was non-finite, for each of these steps.
    """

    kind: Literal["loss", "norm"]
    label: str
    site: int | None
    steps: Ints
    values: Floats
    bad: Bools

    @property
    def title(self) -> str:
        """The title of the curve."""
        return "loss" if self.kind == "loss" else "gradient norm"

    def drawn(self, width: int) -> str:
        """Return the curve as a line of blocks: on a logarithmic scale, or on a linear one if a value is negative."""
        values = np.where(self.bad, np.nan, self.values)
        known = values[np.isfinite(values)]
        if len(known) and known.min() < 0:
            low, high = known.min(), known.max()
            values = 10 ** ((values - low) / ((high - low) or 1.0))
        return sparkline(ScaleSeries(values, self.bad, None, int(self.bad.sum())), width)


def curves_of(recording: Recording) -> Iterator[Curve]:
    """Yield the curves of a recording: the losses, and the norms of gradients."""
    yield from losses_of(recording)
    yield from norms_of(recording)


def early_end(recording: Recording, curves: Sequence[Curve]) -> str:
    """Return a sentence on curves that end long before the run, with the cause if it is the budget; otherwise nothing."""
    last, end = (
        max((int(curve.steps[-1]) for curve in curves if len(curve.steps)), default=-1),
        recording.end or {},
    )
    steps, skipped = end.get("steps") or 0, (end.get("levels") or {}).get("skipped", 0)
    if last < 0 or steps - 1 - last <= steps // 10:
        return ""
    why = f": the budget left out {counted(skipped, 'step')}" if skipped else ""
    return f"no values after step {last:,} of {steps:,}{why}"


def losses_of(recording: Recording) -> Iterator[Curve]:
    """Yield the losses of a recording.

    A loss is the tensor that a backward pass began at. Without a backward pass, it is a single
    number returned by a root.
    """
    losses = recording.of_kind("loss") or [
        site for site in recording.sites if is_number(recording, site)
    ]
    for site in losses:
        rows = recording.rows(site)
        yield Curve(
            "loss",
            _loss(recording, site, len(losses)),
            site.id,
            rows.step,
            number(rows),
            _bad(rows),
        )


def norms_of(recording: Recording) -> Iterator[Curve]:
    """Yield the norm of all gradients of each model of a recording."""
    norms = recording.of_kind("grad.norm")
    for site in norms:
        rows, label = recording.rows(site), f"all gradients of {_root(recording, site)}"
        yield Curve("norm", label, site.id, rows.step, np.sqrt(rows.sumsq), _bad(rows))
    if not norms:
        yield from _from_parameters(recording)


def is_number(recording: Recording, site: SiteInfo) -> bool:
    """Whether a site is a root's only output and a single number."""
    if (
        site.kind != "out"
        or site.path not in root_paths(recording)
        or any(size != 1 for size in site.shape)
    ):
        return False
    rows = recording.rows(site)
    return len(rows) > 0 and bool((rows.count == rows.calls).all())


def number(rows: Rows) -> Floats:
    """Return the values of a single number; in a light step only its magnitude may be known."""
    value, size = rows.statistic("mean"), rows.statistic("rms")
    never_negative = not (value < 0).any()
    return np.where(np.isnan(value) & rows.clean & never_negative, size, value)


def _from_parameters(recording: Recording) -> Iterator[Curve]:
    """Yield the norm of each root's gradients in the measured steps, computed from those of its parameters."""
    steps: NDArray[np.int64] = recording.steps
    for root in sorted({site.root for site in recording.of_kind("param.grad")}):
        total = np.zeros(len(steps))
        seen = np.zeros(len(steps), dtype=bool)
        own = [site for site in recording.of_kind("param.grad") if site.root == root]
        for site in own:
            squares = recording.series(site, "rms") ** 2 * recording.series(site, "count")
            absent = np.isnan(recording.series(site, "count"))
            total += np.where(absent, 0, squares)
            seen |= ~absent
        if seen.any():
            label = f"all gradients of {_root(recording, own[0])}, measured steps"
            norm = np.sqrt(total[seen])
            yield Curve("norm", label, None, steps[seen], norm, ~np.isfinite(norm))


def _loss(recording: Recording, site: SiteInfo, many: int) -> str:
    if site.kind != "loss":
        return f"{_root(recording, site)} ({site.site})"
    called = (
        f"backward at {_printable(site.source['file'])}:{site.source['line']}"
        if site.source
        else ""
    )
    name = site.site if many > 1 or not called else ""
    return ", ".join(part for part in (name, called, *_meaning(recording, site)) if part)


def _meaning(recording: Recording, site: SiteInfo) -> Iterator[str]:
    """Yield what distinguishes the numbers from the tensor that one backward pass began at."""
    graphs = (
        event
        for event in recording.events
        if event.get("kind") == "loss-graph" and event["site"] == site.site
    )
    if any(event.get("unscaled") for event in graphs):
        yield "without the GradScaler's scale"
    calls = recording.rows(site).calls
    often = int(np.median(calls)) if len(calls) else 1
    if often > 1:
        yield f"mean of {often} backward passes a step"


def _root(recording: Recording, site: SiteInfo) -> str:
    return (
        _printable(recording.roots[site.root].name)
        if 0 <= site.root < len(recording.roots)
        else "the model"
    )


def _printable(text: str) -> str:
    """Return a name of the program with its control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _bad(rows: Rows) -> Bools:
    return ~rows.clean & (rows.count > 0)
