"""What the rows of a recording show of a birth: its value, its place, the values next to it, the steps before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kedge.frames import SourceLine
from kedge.json_input.classes import left_out
from kedge.rules.evidence import LeadUp, SiteCourse
from kedge.rules.naming import name_of, plain
from kedge.rules.nonfinite.bad_steps import (
    FINITE,
    INFINITE,
    NAN,
    TOTAL,
    recorded_steps,
    states_of,
    usable,
)
from kedge.rules.nonfinite.search import Sighting
from kedge.rules.recorded.losses import LOSS, maker_at
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.wiring import ModuleSites, Wiring
from kedge.store.recording import Recording, Rows, SiteInfo
from kedge.store.rows import FULL

#: A parameter of this many times its first size, or a gradient of this many times its usual one,
#: has diverged.
_GROWN = 1e3

#: The growth of parameters that begin below this size means nothing.
_SMALL = 1e-6

#: The share of a weight's size by which one step may change it; the tenth of UPDATE-RATIO holds for
#: many.
_LONG = 0.5

#: Sums and products of values beyond this size overflow float32.
VAST = 1e15

#: How many steps, and sites, the steps before a birth are shown of.
_STEPS, _SITES = 16, 4

_STATES = {FINITE: "finite", INFINITE: "inf", NAN: "nan"}


@dataclass(frozen=True, kw_only=True)
class NearRange:
    """The values of a site next to a birth; what is not known is left out.

    Attributes:
        step: The last step in which they were measured in full.
        min: The smallest of them in that step.
        max: The largest.
        rms: Their root mean square.
        now: That in the step of the birth, if it is another one.
    """

    step: int | None = left_out(None)
    min: float | None = left_out(None)
    max: float | None = left_out(None)
    rms: float | None = left_out(None)
    now: float | None = left_out(None)

    @property
    def largest(self) -> float:
        """The largest magnitude; 0 if none is known."""
        known = (self.min, self.max, self.rms, self.now)
        return max((abs(size) for size in known if size is not None), default=0.0)


@dataclass(frozen=True)
class Growth:
    """A parameter that grew far.

    Attributes:
        site: Its site.
        first: The first step in which its size is known.
        was: Its size there.
        step: The last such step before the birth.
        now: Its size there; None if it is infinite.
        ratio: Its size there in units of the first; None if it is infinite.
        words: Its size there in words.
    """

    site: str
    first: int
    was: float | None
    step: int
    now: float | None
    ratio: float | None
    words: str


@dataclass(frozen=True)
class _Row:
    """The measured figures of one row; None where they were not measured or are not finite."""

    step: int
    min: float | None
    max: float | None
    rms: float | None
    nonfinite: int | None
    nan: int | None
    count: int


@dataclass(frozen=True)
class Figures:
    """The figures and names of one birth in the step that shows it."""

    wiring: Wiring
    sighting: Sighting

    @property
    def _recording(self) -> Recording:
        return self.wiring.recording

    @property
    def _step(self) -> int:
        return self.sighting.bad_step.step

    @property
    def site(self) -> SiteInfo:
        """The first site that held the value."""
        return self.wiring.sites[self.sighting.site]

    @property
    def name(self) -> str:
        """The name of the module that made the value, or that holds the operation that did."""
        module = self.sighting.module
        if module is None:
            return "the program"
        return name_of(module)

    @property
    def root(self) -> str:
        """The name of the model that the site belongs to."""
        return names_of(self._recording, [self.site.root])

    def calls_in_turn(self) -> int:
        """Return how often a root was called in the step, if a call may have taken the result of another one.

        Returns:
            0 if it was called once, if all that it was given was bad, or if it returned no bad
            value.
        """
        rows = self._rows(self.sighting.site)
        here = np.flatnonzero(rows.step == self._step)
        root = self.site.root
        outs = [site.id for site in self._recording.of_kind("out") if site.root == root]
        if not len(here) or not self.sighting.bad_step.nonfinite(outs):
            return 0
        calls = int(rows.calls[here[0]])
        if calls < 2 or rows.nonfinite[here[0]] >= rows.count[here[0]]:
            return 0
        return calls

    @property
    def dtype(self) -> str:
        """The dtype in which it was made: for a module's backward that of its output, which autocast chooses."""
        module = self.sighting.module
        if self.sighting.place == "backward" and module is not None and module.outs:
            return self.wiring.sites[module.outs[0]].dtype
        return self.site.dtype

    def source(self) -> SourceLine | None:
        """Return the program's line that calls the module; for an operation between two modules, that of the next one."""
        sighting = self.sighting
        sites = [sighting.site]
        module = next(iter(sighting.cleared), sighting.module)
        is_between = sighting.place == "forward" and sighting.certainty == "between"
        if module is not None and not is_between:
            sites = [*module.outs, *module.ins, sighting.site]
        for site in sites:
            source = self.wiring.sites[site].source
            if source:
                return source
        return None

    def node(self) -> str | None:
        """Return the autograd node of the value; None if the recorded one belongs to another module's value."""
        sighting, site = self.sighting, self.site
        if site.kind == LOSS:
            return maker_at(self._recording, site, self._step)[0]
        if sighting.place == "forward" and sighting.certainty == "between":
            if site.kind.startswith("out"):
                return None
            return site.node
        module = sighting.module
        if module is None or sighting.bad_step.full:
            return site.node
        # The node is that of a measured step, in which the module may have returned its input or an
        # inner module's output.
        sources = [source for source in module.sources if source is not None]
        given = {self.wiring.sites[source].node for source in sources}
        is_other = site.node in given or self.wiring.returned(module) is not None
        if is_other:
            return None
        return site.node

    def unmeasured(self) -> list[ModuleSites]:
        """Return the modules inside that of the birth whose output has no row, as in a step that is not measured."""
        sighting = self.sighting
        is_own = sighting.place == "forward" and sighting.certainty == "inferred"
        if sighting.module is None or not is_own or sighting.bad_step.full:
            return []
        inner = self.wiring.inside(sighting.module)
        return [m for m in inner if m.outs and sighting.bad_step.is_unmeasured(m.outs)]

    def _rows(self, site: int) -> Rows:
        return self._recording.rows(self.wiring.sites[site])

    def value(self) -> str:
        """Return the kind of the value, and the number of elements that have it."""
        row = self.row()
        kind, count = self.kind(), row.count
        if not row.nonfinite:
            return kind
        infinite = 0
        if row.nan:
            infinite = row.nonfinite - row.nan
        if not infinite:
            return f"{kind} ({row.nonfinite} of {count} elements)"
        beside = "an infinity" if infinite == 1 else f"{infinite} infinities"
        return f"{kind} ({row.nan} of {count} elements, beside {beside})"

    def kind(self) -> str:
        """Return the kind of the value in words: NaN, inf, -inf."""
        site = self.sighting.site
        rows = self._rows(site)
        at = _latest(rows, self._step)
        if self.sighting.bad_step.states[site] == NAN or rows.has_nan[at]:
            return "NaN"
        below = rows.min[at] == -np.inf or rows.sum[at] == -np.inf
        above = rows.max[at] == np.inf or rows.sum[at] == np.inf
        if below and above:
            return "inf and -inf"
        if below:
            return "-inf"
        if above:
            return "inf"
        if rows.nonfinite[at] > 0:
            return "infinities"
        return "an infinite norm"

    def row(self) -> _Row:
        """Return the figures of the site in the step, or in the last one before it."""
        rows = self._rows(self.sighting.site)
        return _row(rows, _latest(rows, self._step))

    def near(self, site: int) -> NearRange:
        """Return the range of a site's values when they were last measured in full, and their rms in this step."""
        rows = self._rows(site)
        full = np.flatnonzero((rows.level == FULL) & (rows.step <= self._step))
        figures = NearRange()
        if len(full):
            row = _row(rows, int(full[-1]))
            figures = NearRange(step=row.step, min=row.min, max=row.max, rms=row.rms)
        now = _finite_rms(rows, self._step)
        if now is not None and figures.step != self._step:
            return replace(figures, now=plain(now))
        return figures

    def largest(self) -> float:
        """Return the largest magnitude next to the birth; 0 if it is not known."""
        return self._largest_of(self.sighting.near)

    def _largest_of(self, sites: Iterable[int]) -> float:
        return max((self.near(site).largest for site in sites), default=0.0)

    def weights(self) -> float:
        """Return a bound on the magnitude of the parameters of the module that made it; 0 if one of them is not known."""
        norms = [0.0]
        module = self.sighting.module
        for site in () if module is None else module.params:
            rows = self._rows(site)
            norm = 0.0
            if len(rows):
                norm = np.sqrt(rows.sumsq[_latest(rows, self._step)])
            if not 0 < norm < np.inf:
                return 0.0
            norms.append(float(norm))
        return max(norms)

    def are_vast(self) -> bool:
        """Whether products of the values next to the birth overflow in its dtype; float16 overflows in healthy runs too."""
        return self.site.dtype != "float16" and self.largest() > VAST

    def is_input_vast(self) -> bool:
        """Whether the numbers that the program passed to its models in this step were that large already."""
        heads = [m for m in self.wiring if m.path in self.wiring.heads]
        given = [site for m in heads for site in m.ins if len(self._rows(site))]
        return self._largest_of(given) > VAST

    def is_beyond_range(self, site: int) -> bool:
        """Whether the squares of a parameter left float32: it is very large, or holds infinities."""
        rows = self._rows(site)
        return bool(len(rows) and np.isinf(rows.sumsq[_latest(rows, self._step)]))

    def of_update(self) -> list[float | None]:
        """Return the rms of the updated parameter and of its gradient; None for one that is not known."""
        sizes: list[float | None] = []
        for kind in ("param", "param.grad"):
            same = [s for s in self._recording.of_kind(kind) if s.path == self.site.path]
            size = None
            if same:
                size = _finite_rms(self._recording.rows(same[0]), self._step)
            sizes.append(size)
        return sizes

    def growth(self) -> Growth | None:
        """Return the figures of the parameter of the same root that grew most; None if none grew far.

        For a step of which only gradients are recorded, the next one with other rows counts too.
        """
        root = self.site.root
        until = (self.sighting.later or self.sighting.bad_step).step
        params = [site for site in self._recording.of_kind("param") if site.root == root]
        grown = [growth for site in params if (growth := _growth(self._recording, site, until))]
        return max(grown, key=lambda growth: growth.ratio or np.inf, default=None)

    def before(self) -> LeadUp:
        """Return the steps before the birth, for its site and the inputs of its module; see `lead_up`."""
        sighting = self.sighting
        inputs = list(sighting.near)
        is_own = sighting.place == "forward" and sighting.certainty != "between"
        if is_own and sighting.module:
            inputs = inputs_of(self.wiring, sighting.module) or inputs
        return lead_up(self.wiring, self._step, [sighting.site, *inputs])


def inputs_of(wiring: Wiring, module: ModuleSites) -> list[int]:
    """Return the inputs of a module; for one that is always some output that output, which has rows between measured steps."""
    found = []
    for entry in module.ins:
        sources = wiring.sites[entry].sources
        known = [source for source in sources if source is not None]
        if known and len(known) == len(sources):
            found += known
        else:
            found.append(entry)
    return found


def lead_up(wiring: Wiring, step: int, sites: Iterable[int]) -> LeadUp:
    """Return the last recorded steps up to one, with the figures of some sites in each."""
    steps = recorded_steps(wiring.recording)
    steps = steps[steps <= step][-_STEPS:]
    courses = {}
    for site in list(dict.fromkeys(sites))[:_SITES]:
        rows = wiring.recording.rows(wiring.sites[site])
        states = states_of(rows)
        sizes = rows.statistic("rms")
        largest = rows.statistic("absmax")
        is_signed = wiring.sites[site].kind == LOSS and (rows.statistic("mean") < 0).any()
        rms: list[float | None] = [None] * len(steps)
        absmax: list[float | None] = [None] * len(steps)
        state: list[str | None] = [None] * len(steps)
        value: list[float | None] = []
        if is_signed:
            value = [None] * len(steps)
        for place, each in enumerate(steps):
            at = _at(rows, each)
            if at is not None:
                rms[place] = plain(sizes[at])
                absmax[place] = plain(largest[at])
                state[place] = _STATES[int(states[at])]
                if is_signed:
                    value[place] = plain(rows.statistic("mean")[at])
        courses[wiring.text(site)] = SiteCourse(rms, absmax, state, tuple(value))
    return LeadUp(steps.tolist(), courses)


def risen_gradients(recording: Recording, step: int) -> tuple[float, float, int] | None:
    """Return the usual and the last norm of all gradients before a step, and the step of the last, if it is a thousandfold."""
    for site in recording.of_kind(TOTAL):
        rows = recording.rows(site)
        until = np.flatnonzero(rows.clean & (rows.step < step))
        norms = np.sqrt(rows.sumsq[until])
        if len(norms) > 1 and 0 < _GROWN * np.median(norms[:-1]) < norms[-1]:
            return float(np.median(norms[:-1])), float(norms[-1]), int(rows.step[until[-1]])
    return None


def long_step(recording: Recording, step: int) -> tuple[str, float, int] | None:
    """Return the weight that the last measured step before one changed by far too much, the factor, and that step."""
    steps = recording.steps[recording.steps < step]
    if not len(steps):
        return None
    last = int(steps[-1])
    params = {site.path: site for site in recording.of_kind("param") if len(site.shape) > 1}
    found = []
    for site in recording.of_kind("update"):
        param = params.get(site.path)
        # Any later size of a weight that began at zero is large relative to zero.
        if param is None or not (recording.rows(param).statistic("rms")[:1] > _SMALL).all():
            continue
        size = _finite_rms(recording.rows(param), last)
        change = _finite_rms(recording.rows(site), last)
        if size and change is not None:
            found.append((change / size, param.path))
    ratio, path = max(found, default=(0.0, ""))
    if ratio > _LONG:
        return (path, ratio, last)
    return None


def _growth(recording: Recording, site: SiteInfo, step: int) -> Growth | None:
    """Return the growth of a parameter since its first row; squares beyond float32 count as infinitely large."""
    rows = recording.rows(site)
    until = np.flatnonzero((rows.step <= step) & usable(rows))
    size = rows.statistic("rms")[until]
    if len(size) < 2 or not _SMALL < size[0] < np.inf or not size[-1] > _GROWN * size[0]:
        return None
    words = "more than 1e19"
    if np.isfinite(size[-1]):
        words = f"{size[-1]:.2g}"
    return Growth(
        site=site.site,
        first=int(rows.step[until[0]]),
        was=plain(size[0]),
        step=int(rows.step[until[-1]]),
        now=plain(size[-1]),
        ratio=plain(size[-1] / size[0]),
        words=words,
    )


def _latest(rows: Rows, step: int) -> int:
    """Return the index of the row of a step, or of the last one before it."""
    return max(int(np.searchsorted(rows.step, step, side="right")) - 1, 0)


def _at(rows: Rows, step: int) -> int | None:
    """Return the index of the row of a step; None if there is none."""
    found = np.flatnonzero(rows.step == step)
    if not len(found):
        return None
    return int(found[0])


def _row(rows: Rows, at: int) -> _Row:
    return _Row(
        step=int(rows.step[at]),
        min=plain(rows.statistic("min")[at]),
        max=plain(rows.statistic("max")[at]),
        rms=plain(rows.statistic("rms")[at]),
        nonfinite=_counted(rows.nonfinite[at]),
        nan=_counted(rows.nan[at]),
        count=int(rows.count[at]),
    )


def _counted(number: np.integer) -> int | None:
    """Return a count; None if it was not counted."""
    if number < 0:
        return None
    return int(number)


def _finite_rms(rows: Rows, step: int) -> float | None:
    """Return the rms of the row of one step; None if there is none, or if it is not finite."""
    at = _at(rows, step)
    size = None if at is None else float(rows.statistic("rms")[at])
    if size is not None and np.isfinite(size):
        return size
    return None
