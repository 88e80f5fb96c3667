"""Numbers over the steps: the losses, the norms of gradients, and the scale of each site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from rich.text import Text

from kedge.report.sparkline import coloured, drawable, sparkline
from kedge.rules.recorded.optimizers import events_of, optimizers
from kedge.rules.recorded.roots import names_of, root_paths
from kedge.short_text import counted, listed, spans, told_apart
from kedge.shown_text import visible
from kedge.store.events import EndEvent, LearningRatesEvent, LossGraphEvent
from kedge.store.recording import Recording, Rows, SiteInfo
from kedge.store.rows import Bools, Floats, Ints

KINDS = ("loss", "grad.norm")
"""The kinds of sites that are only curves."""


_TITLES = {"loss": "loss", "norm": "gradient norm", "rate": "learning rate"}
_LOGGED = "logged by the program"


@dataclass(frozen=True, eq=False)
class Curve:
    """A number for each of some steps.

    Attributes:
        kind: Whether it is a loss, a norm, a learning rate, or what the program logged.
        label: The line that called backward, the model of the gradients, or the optimizer.
        site: The number of its site; None if it is the sum over several sites, or of no site.
        steps: The steps with a value.
        values: The values.
        bad: Whether the value was non-finite, for each of these steps.
        part: What it is of, where several curves with one label are drawn together: a group of the
            optimizer.
        logged: The name under which the program logged it; None if it did not.
    """

    kind: Literal["loss", "norm", "rate", "logged"]
    label: str
    site: int | None
    steps: Ints
    values: Floats
    bad: Bools
    part: str = ""
    logged: str | None = None

    @property
    def title(self) -> str:
        """The title of the curve."""
        if self.logged is not None:
            return visible(self.logged)
        return _TITLES[self.kind]

    @property
    def name(self) -> str:
        """The label, with the part."""
        if self.part:
            return f"{self.label}, {self.part}"
        return self.label

    @cached_property
    def finite(self) -> Floats:
        """The values, with NaN in place of those that are not finite."""
        return np.where(self.bad | ~np.isfinite(self.values), np.nan, self.values)

    def drawn(self, width: int) -> Text:
        """Return the curve as a line of blocks; the scale is linear if a value is negative, or logged."""
        values = np.where(self.bad, np.nan, self.values)
        drawn = drawable(values, linearly=self.kind == "logged")
        return coloured(sparkline(drawn, self.bad, width), "cyan")


@dataclass(frozen=True, eq=False)
class ScaleSeries:
    """The scale of a site's values over the measured steps.

    Attributes:
        rms: One value for each measured step, NaN where there is none. Of a single number that was
            negative it is that number.
        broken: Whether a value was non-finite, at that step or before the next measured one.
        last: The newest value; NaN or infinite if it was non-finite.
        broken_steps: The number of steps with non-finite values, light steps included.
        since: Whether a value was non-finite after the last measured step.
    """

    rms: Floats
    broken: Bools
    last: float | None
    broken_steps: int
    since: bool = False

    def drawn(self, width: int, style: str) -> Text:
        """Return the series as a line of blocks."""
        return coloured(sparkline(drawable(self.rms), self.broken, width), style)


def scale_series(recording: Recording, site: SiteInfo) -> ScaleSeries:
    """Return the scale of one site over the steps of a recording."""
    rows = recording.rows(site)
    rms = recording.series(site, "rms")
    if is_number(recording, site) and (rows.statistic("mean") < 0).any():
        rms = recording.series(site, "mean")
    bad = non_finite(rows)
    broken = np.zeros(len(rms), dtype=bool)
    since = False
    if len(rms):
        before = np.searchsorted(recording.steps, rows.step[bad], side="right") - 1
        broken[np.maximum(before, 0)] = True
        since = bool(bad.any() and rows.step[bad][-1] > recording.steps[-1])

    last = None
    present = rms[~np.isnan(rms)]
    if len(present):
        last = float(present[-1])
    if len(bad) and bad[-1]:
        last = float("nan")
        if len(rms) and np.isinf(rms[-1]):
            last = float("inf")
    return ScaleSeries(rms, broken, last, int(bad.sum()), since)


def median_series(several: Sequence[ScaleSeries]) -> ScaleSeries | None:
    """Return the median scale of several sites in each step; None without a site."""
    if not several:
        return None
    with warnings.catch_warnings(action="ignore"):  # of a step in which none has a value
        rms = np.nanmedian([series.rms for series in several], axis=0)
    broken = np.logical_or.reduce([series.broken for series in several])
    last = None
    newest = [series.last for series in several if series.last is not None]
    if newest:
        last = float(np.median(newest))
    most = max(series.broken_steps for series in several)
    since = any(series.since for series in several)
    return ScaleSeries(rms, broken, last, most, since)


def curves_of(recording: Recording) -> Iterator[Curve]:
    """Yield the curves of a recording: losses, norms of gradients, learning rates, and what the program logged."""
    yield from losses_of(recording)
    yield from norms_of(recording)
    yield from rates_of(recording)
    for name, logged in recording.logged.items():
        bad = ~np.isfinite(logged.values)
        yield Curve("logged", _LOGGED, None, logged.steps, logged.values, bad, logged=name)


def early_end(recording: Recording, curves: Sequence[Curve]) -> str:
    """Return a sentence on curves that end long before the run; empty if they do not.

    It names the cause if that is the budget.
    """
    end = recording.end or EndEvent()
    ends = (int(each.steps[-1]) for each in curves if len(each.steps) and each.kind != "logged")
    last = max(ends, default=-1)
    steps = end.steps or 0
    if last < 0 or steps - 1 - last <= steps // 10:
        return ""
    said = f"no values after step {last:,} of {steps:,}"
    skipped = (end.levels or {}).get("skipped", 0)
    if skipped:
        said += f": the budget left out {counted(skipped, 'step')}"
    return said


def losses_of(recording: Recording) -> Iterator[Curve]:
    """Yield the losses of a recording.

    A loss is the tensor that a backward pass began at. Without a backward pass, it is a single
    number returned by a root.
    """
    losses: Sequence[SiteInfo] = recording.of_kind("loss")
    if not losses:
        losses = [site for site in recording.sites if is_number(recording, site)]
    for site in losses:
        rows = recording.rows(site)
        label = _loss(recording, site, is_only=len(losses) == 1)
        yield Curve("loss", label, site.id, rows.step, number(rows), non_finite(rows))


def norms_of(recording: Recording) -> Iterator[Curve]:
    """Yield the norm of all gradients of each model of a recording."""
    norms = recording.of_kind("grad.norm")
    for site in norms:
        rows = recording.rows(site)
        label = f"all gradients of {_root(recording, site)}"
        yield Curve("norm", label, site.id, rows.step, np.sqrt(rows.sumsq), non_finite(rows))
    if not norms:
        yield from _from_parameters(recording)


def rates_of(recording: Recording) -> Iterator[Curve]:
    """Yield the learning rates of each optimizer in the measured steps.

    Groups whose rates are the same in every step share a curve.
    """
    events: dict[int, list[LearningRatesEvent]] = {}
    for event in events_of(recording, LearningRatesEvent):
        events.setdefault(event.optimizer, []).append(event)
    for index, label in _optimizer_names(recording, sorted(events)).items():
        known = events[index]
        steps = recording.steps[recording.steps >= known[0].step]
        newest = np.searchsorted([event.step for event in known], steps, side="right") - 1
        groups: dict[bytes, list[int]] = {}
        courses: dict[bytes, Floats] = {}
        for group in range(max(len(event.rates) for event in known)):
            each = [event.rates[group : group + 1] or (None,) for event in known]
            rates = np.array([rate for (rate,) in each], dtype=np.float64)  # None becomes NaN
            values = rates[newest]
            groups.setdefault(values.tobytes(), []).append(group)
            courses[values.tobytes()] = values

        names = known[-1].names
        for key, alike in groups.items():
            values = courses[key]
            seen = np.isfinite(values)
            part = ""
            if len(groups) > 1:
                part = _group_names(alike, names)
            if seen.any():
                none = np.zeros(int(seen.sum()), dtype=bool)
                yield Curve("rate", label, None, steps[seen], values[seen], none, part)


def _optimizer_names(recording: Recording, indices: Sequence[int]) -> dict[int, str]:
    """Return a name for each optimizer: its type, and its models where several have this type.

    The types are recorded at the end of the program.
    """
    known = {optimizer.index: optimizer for optimizer in optimizers(recording) or ()}
    types = {}
    for index in indices:
        types[index] = f"optimizer {index}"
        if index in known:
            types[index] = visible(known[index].type)
    names = []
    for index, name in types.items():
        of_models = ""
        if list(types.values()).count(name) > 1 and known[index].roots:
            of_models = f" of {visible(names_of(recording, known[index].roots))}"
        names.append(name + of_models)
    return dict(zip(indices, told_apart(names), strict=True))


def _group_names(groups: Sequence[int], names: Sequence[str | None]) -> str:
    """Return the names of groups of an optimizer as the program has them, or their numbers."""
    given = [name for group in groups for name in names[group : group + 1] if name]
    if len(given) == len(groups):
        return visible(listed(given))
    if len(groups) == 1:
        return f"group {groups[0]}"
    return f"groups {spans(groups)}"


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
    value = rows.statistic("mean")
    never_negative = not (value < 0).any()
    only_size = np.isnan(value) & rows.clean & never_negative
    return np.where(only_size, rows.statistic("rms"), value)


def _from_parameters(recording: Recording) -> Iterator[Curve]:
    """Yield the norm of each root's gradients in the measured steps, from those of its parameters."""
    steps = recording.steps
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


def _loss(recording: Recording, site: SiteInfo, *, is_only: bool) -> str:
    if site.kind != "loss":
        return f"{_root(recording, site)} ({site.site})"
    parts = []
    if not is_only or not site.source:
        parts.append(site.site)
    if site.source:
        parts.append(f"backward at {visible(site.source.file)}:{site.source.line}")
    return ", ".join([*parts, *_meaning(recording, site)])


def _meaning(recording: Recording, site: SiteInfo) -> Iterator[str]:
    """Yield what distinguishes the numbers from the tensor that one backward pass began at."""
    graphs = recording.of(LossGraphEvent)
    if any(graph.unscaled for graph in graphs if graph.site == site.site):
        yield "without the GradScaler's scale"
    calls = recording.rows(site).calls
    if len(calls):
        often = int(np.median(calls))
        if often > 1:
            yield f"mean of {often} backward passes a step"


def _root(recording: Recording, site: SiteInfo) -> str:
    return visible(names_of(recording, [site.root]))


def non_finite(rows: Rows) -> Bools:
    """Return whether any value was non-finite, for each row."""
    return ~rows.clean & (rows.count > 0)
