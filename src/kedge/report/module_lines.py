"""The lines of a report's table: one for each module, from several sites."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from kedge.errors import NoSuchSite
from kedge.report.curves import ScaleSeries, median_series, scale_series
from kedge.rules.recorded.once import once
from kedge.rules.recorded.optimizers import unheld_parameters
from kedge.rules.recorded.roots import root_names
from kedge.rules.rule import Finding
from kedge.sites.filters import SiteFilter
from kedge.sites.folding import FEW_OUTLIERS, MOST_OUTLIERS, Folding, outliers
from kedge.sites.site import OF_OPERATION, escape
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Floats, Ints


@dataclass(eq=False)
class ModuleLine:
    """One module, or one leaf of a module's structured output.

    Attributes:
        label: The name of the line.
        path: The module's path, which ``--sites`` is matched with.
        recording: The recording with its figures.
        sites: Its sites by kind.
        parameters: The sites of its own parameters by kind, the largest parameter first.
        unheld: The texts of its trainable parameters that no optimizer held, which may not be
            recorded.
    """

    label: str
    path: str
    recording: Recording
    sites: dict[str, SiteInfo] = field(default_factory=dict)
    parameters: dict[str, list[SiteInfo]] = field(default_factory=dict)
    unheld: set[str] = field(default_factory=set)

    @property
    def all_sites(self) -> list[SiteInfo]:
        """All its sites, those of its parameters last."""
        return [*self.sites.values(), *chain(*self.parameters.values())]

    @property
    def texts(self) -> set[str]:
        """The texts of all sites of this line, and of parameters that no optimizer held."""
        return self.unheld.union(site.site for site in self.all_sites)

    @property
    def type(self) -> str:
        """The module's class."""
        return next((site.type for site in self.all_sites if site.type), "")

    @property
    def shape(self) -> str:
        """The shape of its output."""
        out = self.sites.get("out") or self.sites.get("out.grad")
        if out is None:
            return ""
        return "x".join(map(str, out.shape))

    @property
    def size(self) -> int:
        """The number of its own parameters."""
        totals = [0]
        for sites in self.parameters.values():
            sizes = {site.path: math.prod(site.shape) for site in sites}
            totals.append(sum(sizes.values()))
        return max(totals)

    @cached_property
    def out(self) -> ScaleSeries | None:
        """The scale of its output over the steps."""
        return self._scale_series("out")

    @cached_property
    def gradient(self) -> ScaleSeries | None:
        """The scale of its output's gradient, or else of its largest parameter's, over the steps."""
        return self._scale_series("gradient")

    def _scale_series(self, figure: str) -> ScaleSeries | None:
        site = self.scaled(figure)
        if site is None:
            return None
        return scale_series(self.recording, site)

    def scaled(self, figure: str) -> SiteInfo | None:
        """Return the site whose scale is a figure.

        It is None for a figure that is no scale, and without a site.
        """
        if figure == "out":
            return self.sites.get("out")
        if figure != "gradient":
            return None
        if "out.grad" in self.sites:
            return self.sites["out.grad"]
        of_parameters = self.parameters.get("param.grad")
        if of_parameters and "out" not in self.sites:
            return of_parameters[0]
        return None

    @cached_property
    def update(self) -> float | None:
        """The newest ratio of the update of its largest parameter to that parameter."""
        changes = self.parameters.get("update")
        if not changes:
            return None
        return _known(_newest_updates(self.recording)[changes[0].id])

    @cached_property
    def zero(self) -> float | None:
        """The newest share of exact zeros in its output."""
        return self._newest_of(self.sites.get("out"), "zero")

    @cached_property
    def forward(self) -> float | None:
        """The median milliseconds of its forward, if the run was to time modules."""
        return self._milliseconds(0)

    @cached_property
    def backward(self) -> float | None:
        """The median milliseconds of its backward, if the run was to time modules."""
        return self._milliseconds(1)

    def _milliseconds(self, place: int) -> float | None:
        timed = self.recording.timed_modules
        if timed is None or self.path not in timed.medians:
            return None
        return _known(timed.medians[self.path][place] * 1e3)

    @property
    def broken(self) -> int:
        """The number of steps with a non-finite output or gradient, whichever are more."""
        steps = _broken_steps(self.recording)
        most = 0
        for site in (self.scaled("out"), self.scaled("gradient")):
            if site is not None:
                most = max(most, int(steps[site.id]))
        return most

    def newest(self, figure: str) -> list[float]:
        """Return the newest value of a figure, one of `FIGURES`.

        A folded line has one for each of its modules.
        """
        value = getattr(self, figure)
        if isinstance(value, ScaleSeries):
            value = value.last
        if value is None:
            return []
        return [value]

    def newest_finite(self, figure: str) -> float | None:
        """Return the newest finite value of a figure: what comes after a NaN tells no blocks apart."""
        site = self.scaled(figure)
        if site is not None:
            return self._newest_of(site, "rms")
        return {"update": self.update, "zero": self.zero}.get(figure)

    def _newest_of(self, site: SiteInfo | None, statistic: str) -> float | None:
        """Return the newest finite value of a statistic of a site, if it has one."""
        if site is None:
            return None
        return _known(_newest_finite(self.recording)(statistic)[site.id])

    @property
    def structure(self) -> Hashable:
        """What lines must have in common to fold: type, shapes, dtypes and kinds of their sites."""
        return tuple((site.kind, site.type, site.shape, site.dtype) for site in self.all_sites)


def _known(value: float) -> float | None:
    if math.isnan(value):
        return None
    return float(value)


@once
def _broken_steps(recording: Recording) -> Ints:
    """Return for each site, by its number, in how many steps a value was non-finite."""
    every = recording.all_rows
    return every.count(~every.rows.clean & (every.rows.count > 0))


@once
def _newest_updates(recording: Recording) -> Floats:
    """Return the newest finite ratio of each update to its parameter, by the update's number.

    It is NaN without one.
    """
    changes = recording.of_kind("update")
    by_path = {site.path: site for site in recording.of_kind("param")}
    own = [by_path.get(site.path) for site in changes]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = recording.matrix(changes, "rms") / recording.matrix(own, "rms")
    known = np.isfinite(ratios)
    found = np.full(len(recording.all_rows.lengths), np.nan)
    for place in range(ratios.shape[1]):  # of several steps, the last
        lines = np.flatnonzero(known[:, place])
        found[[changes[line].id for line in lines]] = ratios[lines, place]
    return found


@once
def _newest_finite(recording: Recording) -> Callable[[str], Floats]:
    """Return a function from a statistic to its newest finite value of each site.

    The values are by the site's number, and NaN where there is none.
    """

    @functools.cache
    def newest(statistic: str) -> Floats:
        every = recording.all_rows
        values = recording.statistic(statistic)
        known = (every.rows.level == FULL) & np.isfinite(values)
        found = np.full(len(every.lengths), np.nan)
        found[every.site[known]] = values[known]  # of several, the last: rows are in order of steps
        return found

    return newest


FIGURES = ("out", "gradient", "update", "zero")
"""The figures of a line."""


class FoldedLine(ModuleLine):
    """Modules whose paths differ only in numbers, as one line; its figures are the medians of theirs.

    Attributes:
        members: Their lines.
    """

    def __init__(self, label: str, members: Sequence[ModuleLine]) -> None:
        first = members[0]
        super().__init__(label, first.path, first.recording, first.sites, first.parameters)
        self.members = tuple(members)

    @property
    def texts(self) -> set[str]:
        """The texts of all sites of its modules."""
        return set[str]().union(*(line.texts for line in self.members))

    @property
    def size(self) -> int:
        """The number of parameters of all its modules."""
        return sum(line.size for line in self.members)

    @cached_property
    def out(self) -> ScaleSeries | None:
        """The median scale of the outputs over the steps."""
        return median_series([line.out for line in self.members if line.out is not None])

    @cached_property
    def gradient(self) -> ScaleSeries | None:
        """The median scale of the gradients over the steps."""
        return median_series([line.gradient for line in self.members if line.gradient is not None])

    @cached_property
    def update(self) -> float | None:
        """The median of the newest ratios of updates."""
        return _median(self.newest("update"))

    @cached_property
    def zero(self) -> float | None:
        """The median of the newest shares of exact zeros."""
        return _median(self.newest("zero"))

    @cached_property
    def forward(self) -> float | None:
        """The median of their milliseconds of the forward."""
        return _median(self.newest("forward"))

    @cached_property
    def backward(self) -> float | None:
        """The median of their milliseconds of the backward."""
        return _median(self.newest("backward"))

    @property
    def broken(self) -> int:
        """The most steps with non-finite values of any of its modules."""
        return max(line.broken for line in self.members)

    def newest_finite(self, figure: str) -> float | None:
        """Return the median of the newest finite values of a figure."""
        values = (line.newest_finite(figure) for line in self.members)
        return _median([value for value in values if value is not None])

    def newest(self, figure: str) -> list[float]:
        """Return the newest value of a figure for each of its modules that has one."""
        return [value for line in self.members for value in line.newest(figure)]


def _median(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return float(np.median(values))


def folded(
    made: Sequence[ModuleLine],
    findings: Sequence[Finding] = (),
) -> list[ModuleLine]:
    """Return the lines of a long table, folded: see Note [What folds].

    Args:
        made: The lines.
        findings: The findings; only lines with the same ones fold.
    """
    codes: dict[str, set[str]] = {}
    for finding in findings:
        codes.setdefault(finding.site, set()).add(finding.code)

    def state(line: ModuleLine) -> Hashable:
        own = [codes[text] for text in line.texts if text in codes]
        return line.broken > 0, frozenset().union(*own)

    folding = Folding(lambda line: line.label, lambda line: line.structure, state, _outlying)
    shown: list[ModuleLine] = []
    for one in folding.shown(made):
        if one.folded:
            shown.append(FoldedLine(one.name, one.members))
        else:
            shown.append(one.members[0])
    return shown


def _outlying(group: Sequence[ModuleLine]) -> set[int]:
    """Return the places of the lines with a figure that is far from that of the others."""
    found = _only_zeros(group, "out") | _only_zeros(group, "gradient")
    for figure in FIGURES:
        values = [line.newest_finite(figure) for line in group]
        found |= set(outliers(values, share=figure == "zero"))
    return found


def _only_zeros(group: Sequence[ModuleLine], figure: str) -> set[int]:
    """Return the places of the few that had only zeros in a step in which the others had not."""
    sites = [line.scaled(figure) for line in group]
    if None in sites:
        return set()
    scales = group[0].recording.matrix(sites, "rms")
    if not scales.size:
        return set()
    zeros = scales == 0
    many_zeros = zeros.sum(axis=0)
    many_known = (~np.isnan(scales)).sum(axis=0)
    few = many_zeros <= np.maximum(FEW_OUTLIERS, many_known * MOST_OUTLIERS)
    rare = few & (2 * many_zeros < many_known)
    return set(np.flatnonzero((zeros & rare).any(axis=1)).tolist())


def lines(recording: Recording) -> tuple[ModuleLine, ...]:
    """Return the lines of a recording's table, in data-flow order."""
    by_label: dict[str, ModuleLine] = {}
    by_path: dict[str, ModuleLine] = {}

    names = root_names(recording)

    def line_of(site: SiteInfo, path: str, leaf: str = "") -> ModuleLine:
        name = escape(path) or "(root)"
        if not path and site.root < len(names):
            name = f"({names[site.root]})"
        label = name + leaf
        line = by_label.setdefault(label, ModuleLine(label, path, recording))
        by_path.setdefault(path, line)
        return line

    # Outputs first: each call and each leaf has a line of its own, and a parameter joins the first.
    for site in sorted(recording.sites, key=lambda site: (_base(site) != "out", site.id)):
        kind = _base(site)
        if site.kind.startswith(OF_OPERATION):
            if len(recording.rows(site)):
                _add_operation(by_label, recording, site, kind)
        elif kind in ("out", "out.grad"):
            name, _, flow = site.site.rpartition(":")
            leaf = name.removeprefix(escape(site.path)) + flow.removeprefix(kind)
            line_of(site, site.path, leaf).sites[kind] = site
        elif kind in ("param", "param.grad", "update"):
            owner = by_path.get(site.owner) or line_of(site, site.owner)
            owner.parameters.setdefault(kind, []).append(site)
    for path in unheld_parameters(recording):
        holder = by_path.get(path.rpartition(".")[0])
        if holder is not None:
            holder.unheld.add(f"{path}:param")
    for line in by_label.values():
        for sites in line.parameters.values():
            sites.sort(key=lambda site: -math.prod(site.shape))

    # A line without an output stands before the module that holds it, where the data would pass.
    placed = [line for line in by_label.values() if "out" in line.sites]
    for line in by_label.values():
        if "out" in line.sites:
            continue
        nearest = len(placed)
        longest = -1
        for place, other in enumerate(placed):
            holds = not other.path or line.path.startswith(f"{other.path}.")
            if holds and len(other.path) > longest:
                nearest, longest = place, len(other.path)
        placed.insert(nearest, line)
    return tuple(placed)


def _add_operation(
    by_label: dict[str, ModuleLine], recording: Recording, site: SiteInfo, kind: str
) -> None:
    """Add a site of an operation outside of modules to its line; what goes into one has a line of its own."""
    name, _, flow = site.site.rpartition(":")
    label = name + flow.removeprefix(kind)
    column = kind
    if kind in ("in", "in.grad"):
        label = f"{name}:in{flow.removeprefix(kind)}"
        column = kind.replace("in", "out", 1)
    line = by_label.setdefault(label, ModuleLine(label, site.path, recording))
    line.sites[column] = site


def _base(site: SiteInfo) -> str:
    return site.kind.removeprefix(OF_OPERATION).partition("[")[0]


def matching(all_lines: Sequence[ModuleLine], text: str) -> tuple[ModuleLine, ...]:
    """Return the lines of the modules that a filter selects.

    Args:
        all_lines: The lines to choose from.
        text: A text of the site language; see Note [Words] in `kedge.sites.filters`.

    Raises:
        NoSuchSite: No module has such a path.
        SelectorError: The text cannot be read.
    """
    sites = list(chain.from_iterable(line.all_sites for line in all_lines))
    paths = {line.path for line in all_lines} | {site.path for site in sites}
    chosen = SiteFilter(text, paths)
    problem = chosen.problem(sites)
    if problem:
        raise NoSuchSite(problem)
    return tuple(line for line in all_lines if any(map(chosen.chooses, line.all_sites)))
