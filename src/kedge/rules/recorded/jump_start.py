"""Where a jump begins: the first value of a step that is far larger than in the measured steps before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kedge.rules.recorded.roots import root_paths
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Ints

_JUMP = {"in": 4.0, "out": 4.0, "out.grad": 10.0, "param.grad": 10.0}
"""How many times its median a value must be, by its kind: gradients differ more from batch to batch."""
_ABOVE = 2.0
"""How many times the greatest of the steps before it must be, and how much more it jumped than what it was made from."""
_WINDOW = 20
"""Measured steps before a jump with which it is compared."""
_LEAST = 5
"""The least number of them."""

_REMEDIES = {
    "data": "Look at the batch of that step",
    "output": "Look at the weights and buffers of that module before that step",
    "input": "Look at the code between that module and those before it",
    "loss": "Look at the targets of that step, and at the loss",
    "gradient": "Look at the backward pass between that module and those after it",
    "parameter": "Look at what changes or exchanges gradients, such as hooks and an all-reduce",
}

Kind = Literal["data", "output", "input", "loss", "gradient", "parameter"]


@dataclass(frozen=True, kw_only=True)
class JumpStart:
    """The first value that jumped in one step.

    Attributes:
        kind: ``data`` if it came from outside, ``output`` of a module, or its ``input``, which code
            between modules made; ``loss`` if it is the first gradient of the backward pass, a
            ``gradient`` of another output, or that of a ``parameter``.
        site: Where.
        step: The measured step in which it was seen.
        times: How many times its median of the steps before it is.
        given: The same of what it was made from, the largest; None if that is not known.
        steps: How many steps there were before.
        alike: How many more gradients of parameters jumped as far, for one of these.
    """

    kind: Kind
    site: str
    step: int
    times: float
    given: float | None
    steps: int
    alike: int = 0

    @property
    def remedy(self) -> str:
        """What to look at."""
        return _REMEDIES[self.kind]

    def __str__(self) -> str:
        times = f"{self.times:.3g} times"
        before = f"of the {self.steps} measured steps before"
        seen = f"At step {self.step}"
        if self.kind == "data":
            return (
                f"{seen} the values that the model was given ({self.site}) were themselves {times} "
                f"their median {before}: the jump is in the batch."
            )
        if self.kind == "output":
            return (
                f"{seen} {self.site} was the first output that jumped, to {times} its median "
                f"{before}; what its module was given was {self.given:.3g} times its own."
            )
        if self.kind == "input":
            return (
                f"{seen} {self.site} was the first value that jumped, to {times} its median "
                f"{before}; no output of a module before it had jumped."
            )
        if self.kind == "loss":
            return (
                f"{seen} no output had jumped; the first gradient of the backward pass "
                f"({self.site}) was already {times} its median {before}."
            )
        if self.kind == "gradient":
            return (
                f"{seen} no output had jumped; {self.site} was the first gradient in the backward "
                f"pass that did, to {times} its median {before}; those before it in the pass were "
                f"at most {self.given:.3g} times theirs."
            )
        others = ""
        if self.alike:
            others = f", like {self.alike:,} more"
        return (
            f"{seen} no output and no gradient of one had jumped; {self.site} was {times} its "
            f"median {before}{others}: it was changed where gradients of parameters are "
            "summed or exchanged."
        )


def jump_start(
    recording: Recording, roots: Collection[int], steps: Ints, *, backward: bool
) -> JumpStart | None:
    """Return where the values of the first measured one of some steps begin to be far larger than before.

    Args:
        recording: The recording.
        roots: The models that are looked at.
        steps: The steps of the jump.
        backward: Whether gradients are looked at, too, if no output jumped.

    Returns:
        None if no step was measured, if too few were before it, or if nothing jumped.
    """
    measured = np.intersect1d(steps, recording.steps)
    if not len(measured):
        return None
    at = int(np.searchsorted(recording.steps, measured[0]))
    jumps = _Jumps(recording, at)
    forward = _of_kinds(recording, roots, ("in", "out"))
    first = next(filter(jumps.jumped, forward), None)
    if first is not None:
        return jumps.in_forward(first)
    if not backward or not jumps.any_known(forward):
        return None
    gradients = _of_kinds(recording, roots, ("out.grad",))
    first = next(filter(jumps.jumped, gradients), None)
    if first is not None:
        return jumps.in_backward(first, gradients)
    parameters = list(filter(jumps.jumped, _of_kinds(recording, roots, ("param.grad",))))
    if not parameters or not jumps.any_known(gradients):
        return None
    largest = max(parameters, key=jumps.times)
    alike = [each for each in parameters if jumps.times(each) >= jumps.times(largest) / _ABOVE]
    return jumps.start("parameter", largest, None, alike=len(alike) - 1)


class _Jumps:
    """The values of one step beside those of the steps before."""

    def __init__(self, recording: Recording, at: int) -> None:
        self._recording = recording
        self._at = at
        self._step = int(recording.steps[at])
        self._known: dict[int, tuple[float, bool]] = {}

    def times(self, site: SiteInfo) -> float:
        """Return how many times its median a value is; NaN if that is not known."""
        return self._compared(site)[0]

    def jumped(self, site: SiteInfo) -> bool:
        """Whether a value is far larger than its median, and than any before."""
        return self._compared(site)[1]

    def any_known(self, sites: Sequence[SiteInfo]) -> bool:
        """Whether any of some values can be compared with those before, so that it is known not to have jumped."""
        return any(np.isfinite(self.times(site)) for site in sites)

    def _compared(self, site: SiteInfo) -> tuple[float, bool]:
        if site.id not in self._known:
            values = self._recording.series(site, "rms")
            now = float(values[self._at])
            before = values[max(self._at - _WINDOW, 0) : self._at]
            before = before[np.isfinite(before)]
            times = np.nan
            jumped = False
            if len(before) >= _LEAST and np.isfinite(now) and np.median(before) > 0:
                times = now / float(np.median(before))
                jumped = times >= _JUMP[site.kind] and now >= _ABOVE * before.max()
            self._known[site.id] = times, jumped
        return self._known[site.id]

    def in_forward(self, site: SiteInfo) -> JumpStart | None:
        """Return the start at the first value of the forward that jumped."""
        sites = self._recording.sites
        if site.kind == "in":
            given = [sites[source] for source in site.sources if source is not None]
            if any(self.times(one) > self.times(site) / _ABOVE for one in given):
                return None
            if not given and site.owner in root_paths(self._recording):
                return self.start("data", site, None)
            return self.start("input", site, None)
        ins = [each for each in self._recording.of_kind("in") if each.owner == site.owner]
        times = [self.times(each) for each in ins]
        known = [each for each in times if np.isfinite(each)]
        if not known or max(known) > self.times(site) / _ABOVE:
            return None
        return self.start("output", site, max(known))

    def in_backward(self, site: SiteInfo, order: Sequence[SiteInfo]) -> JumpStart | None:
        """Return the start at the first gradient of an output that jumped, in the order of backward."""
        before = [self.times(each) for each in order[: order.index(site)]]
        given = max(filter(np.isfinite, before), default=None)
        if given is None:
            return self.start("loss", site, None)
        if given > self.times(site) / _ABOVE:
            return None
        return self.start("gradient", site, given)

    def start(
        self, kind: Kind, site: SiteInfo, given: float | None, *, alike: int = 0
    ) -> JumpStart:
        """Return the start of the jump."""
        if given is not None:
            given = float(f"{given:.6g}")
        return JumpStart(
            kind=kind,
            site=site.site,
            step=self._step,
            times=float(f"{self.times(site):.6g}"),
            given=given,
            steps=min(self._at, _WINDOW),
            alike=alike,
        )


def _of_kinds(recording: Recording, roots: Collection[int], kinds: Sequence[str]) -> list[SiteInfo]:
    """Return the sites of some kinds of some models, in the order in which they were first reached."""
    lengths = recording.all_rows.lengths
    return [
        site
        for site in recording.sites
        if site.kind in kinds
        and site.root in roots
        and site.dtype.startswith(("float", "bfloat"))
        and lengths[site.id]
    ]
