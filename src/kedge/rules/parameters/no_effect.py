"""NO-EFFECT: steps of an optimizer after which the parameters are what they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.optimizers import rates_over_steps, trained_by, without_optimizer
from kedge.rules.recorded.roots import by_root, names_of
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.recorded.weights import STARVED, finite_medians
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import listed
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True)
class NoEffectEvidence(Evidence):
    """The parameters that the last steps left as they were, and the number of these steps."""

    parameters: Sequence[str] = said("parameters {}")
    of: int = said("of {} with gradients")
    steps: int = said("the last {} measured steps")
    since: int = said("since step {}")
    dtype: str = said("in {}")


@dataclass(frozen=True, kw_only=True)
class RateOfZeroEvidence(Evidence):
    """The measured steps at the end in which every learning rate was zero, or too small."""

    since: int = said("since step {}")
    steps: int = said("the last {} measured steps")
    of: int = said("of {} measured steps")


@dataclass(frozen=True)
class _Still:
    """Parameters of one root that the last optimizer steps left as they were.

    Attributes:
        updates: The sites of their updates.
        of: How many parameters had gradients.
        steps: The measured steps that changed none of the first one.
    """

    updates: list[SiteInfo]
    of: int
    steps: Ints


@dataclass(frozen=True)
class NoEffect(Rule):
    """The optimizer steps, with gradients and a learning rate above zero, and parameters stay exactly what they were.

    Meaning:
        The step is not carried out: a wrapper or compiled code passes it by, it writes to a copy, or
        the update is lost in rounding. Or a schedule has brought the learning rate to zero, and the
        rest of the run changes nothing.

    Formula:
        still = parameters whose gradient was not zero in more than half of its elements, and whose
        update, in a fixed sample of the elements, was exactly zero, in each of the last window
        measured steps of the optimizer, with a learning rate above zero in all its groups.

        rate of zero = every learning rate of the optimizers of a model was exactly zero, or below
        faded of its highest and no update other than zero, in each measured step of the last share
        of the run, while there were gradients.

    Window:
        The last window measured steps with an update; for a rate of zero the end of the run.

        Parameters are left out whose usual gradient is below a thousandth of the largest one, like
        a bias before a batch norm: what it gets is rounding, and lost in rounding. So are steps
        whose gradient is below a thousandth of the largest one with which this parameter moved: it
        has arrived where the loss is lowest, and stays there.

    Thresholds:
        - window (10): after one step of rounding, or of a scaler that skips, there are others.
        - faded (1e-3): of the highest rate; below it a schedule is the reason.
        - few (5): measured steps with such a rate, which is known exactly.
        - share (0.2): of the run. A schedule may end at zero, but not that early.

    Severity:
        - error: no parameter of the model that gets a gradient changes.
        - warning: some parameters do not change; a learning rate of zero.

    Evidence:
        The parameters, the number of those with gradients, and the number of steps.

    Remedy:
        Call the step of the optimizer itself, outside of compiled code, and look at what wraps it.
        Keep parameters contiguous. In bfloat16 and float16 an update below a thousandth of the
        weight is lost in rounding: keep float32 master weights. For a rate of zero, give the
        schedule the real number of steps.

    Cannot see:
        Steps that change the weights by a wrong amount; a parameter of which only elements
        change that were not drawn; parameters whose gradient is mostly zero, such as
        embeddings.
    """

    window: int = 10
    faded: float = 1e-3
    few: int = 5
    share: float = 0.2

    code = "NO-EFFECT"
    name = "steps of the optimizer change nothing"
    severity = "error"
    of_training = True
    follows = "LOSS-BELOW-ZERO UNDERFLOW GRADS-SHRUNK:cleared"
    leads_to = "UPDATE-RATIO:small NO-LEARNING"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding of each kind for every root."""
        sites = trained_sites(recording, "update")
        for root, updates in by_root(sites, lambda site: site.root):
            rates = rates_over_steps(recording, root)
            is_faded = rates.highest < self.faded * np.fmax.reduce(rates.highest, initial=0)
            still = self._still(recording, updates, (rates.lowest > 0) & ~is_faded)
            if still.updates:
                yield self._finding(recording, root, still)
            yield from self._rate_of_zero(recording, root, updates, rates.highest, is_faded)

    def idle(self, recording: Recording) -> str:
        """Return that no optimizer stepped."""
        return without_optimizer(recording)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured updates; a recording without any has nothing to judge."""
        updates = trained_sites(recording, "update")
        if not updates:
            return None
        return too_few(self.code, measured(recording, updates), self.window)

    def _still(self, recording: Recording, updates: list[SiteInfo], has_rate: Bools) -> _Still:
        """Return the parameters that got gradients and did not change, at a learning rate above zero."""
        paths = {site.path: site for site in recording.of_kind("param.grad")}
        gradients = [paths.get(site.path) for site in updates]
        change = recording.matrix(updates, "rms")
        size = recording.matrix(gradients, "rms")
        is_dense = ~(recording.matrix(gradients, "zero") >= 0.5)
        is_driven = has_rate & np.isfinite(change) & (size > 0) & is_dense
        usual = finite_medians(size)
        starved = usual < STARVED * np.max(usual[np.isfinite(usual)], initial=0)
        is_driven[starved] = False
        pull = np.max(np.where(is_driven & (change > 0), size, 0.0), axis=1, initial=0)
        is_driven &= ~(size < STARVED * pull[:, None])

        own = np.flatnonzero(is_driven.any(axis=1))
        last = max((recording.steps[is_driven[row]][-1] for row in own), default=-1)
        found: list[tuple[SiteInfo, Ints]] = []
        for row in own:
            steps = recording.steps[is_driven[row]]
            number = _trailing(change[row, is_driven[row]] == 0)
            if steps[-1] == last and number >= self.window:
                found.append((updates[row], steps[-number:]))
        if not found:
            return _Still([], len(own), recording.steps[:0])
        return _Still([site for site, _ in found], len(own), found[0][1])

    def _finding(self, recording: Recording, root: int, found: _Still) -> Finding:
        still = found.updates
        model = names_of(recording, [root])
        by = trained_by(recording, root) or "the optimizer"
        severity: Severity = "warning"
        which = f"{listed([site.name for site in still], 3)} of {model}"
        if len(still) == found.of:
            severity = "error"
            which = f"any parameter of {model} that gets a gradient"
        since = int(found.steps[0])
        remedy = _PASSED_BY
        if still[0].dtype in _NARROW:
            remedy = _ROUNDED
        return Finding(
            code=self.code,
            severity=severity,
            site=still[0].site,
            step=since,
            message=f"The last {len(found.steps)} measured steps of {by}, from step {since} on, "
            f"did not change {which}, though there were gradients and the learning rate was "
            "not zero.",
            evidence=NoEffectEvidence(
                parameters=[site.path for site in still[:NAMED]],
                of=found.of,
                steps=len(found.steps),
                since=since,
                dtype=still[0].dtype,
            ),
            confidence=0.9,
            remedy=remedy,
        )

    def _rate_of_zero(
        self,
        recording: Recording,
        root: int,
        updates: list[SiteInfo],
        rates: Floats,
        is_faded: Bools,
    ) -> Iterator[Finding]:
        """Yield a finding if the rates were zero, or so small that rounding took every update, too long at the end."""
        changes = recording.matrix(updates, "rms")
        stepped = np.isfinite(changes).any(axis=0)
        changed = np.nan_to_num(changes).any(axis=0)
        gone = ((rates == 0) | (is_faded & ~changed))[stepped]
        last = _trailing(gone)
        if last < self.few:
            return
        steps = recording.steps[stepped]
        since = int(steps[-last])
        if steps[-1] - since < self.share * (steps[-1] - steps[0]):
            return
        model = names_of(recording, [root])
        ends = rates[stepped][-last:]
        became = f"has been zero since step {since}"
        if ends.max() > 0:
            became = (
                f"has fallen from {np.fmax.reduce(rates):.3g} to {ends[-1]:.3g}, and since step "
                f"{since} every update has been lost in rounding"
            )
        yield Finding(
            code=self.code,
            severity="warning",
            site=updates[0].site,
            step=since,
            message=f"The learning rate of every parameter of {model} {became}, in the last {last} "
            f"of {len(gone)} measured steps: these changed nothing.",
            evidence=RateOfZeroEvidence(since=since, steps=last, of=len(gone)),
            confidence=0.95,
            remedy="Give the schedule the real number of steps, and look at whether it counts "
            "batches or epochs; a warm-up must not begin at zero and stay there.",
        )


def _trailing(each: Bools) -> int:
    """Return how many of the last ones are true, without a gap."""
    return int(np.cumprod(each[::-1]).sum())


_NARROW = ("bfloat16", "float16")

_ROUNDED = (
    "In bfloat16 and float16 an update below a thousandth of the weight is rounded away: keep "
    "float32 master weights, or raise the learning rate."
)
_PASSED_BY = (
    "Look at what stands between the program and the optimizer's step: a subclass or wrapper "
    "whose step() returns early, compiled code that skips it, or gradients that are clipped or "
    "scaled to nothing before it; a learning rate so small that the update is lost in rounding. "
    "Keep the parameters contiguous (parameter.data = parameter.data.contiguous())."
)
