"""GRAD-EXPLODE: gradients against their own past."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from kedge.rules.evidence import Evidence, places, said, unsaid
from kedge.rules.naming import NAMED, plain
from kedge.rules.recorded.jump_start import JumpStart, jump_start
from kedge.rules.recorded.optimizers import later_starts
from kedge.rules.recorded.roots import by_root
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.recorded.weights import WeightCourses, middle, share, weight_courses
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Bools, Floats, Ints, Rows


@dataclass(frozen=True, kw_only=True)
class GradExplodeEvidence(Evidence):
    """The norm that left its past behind, and the gradients with the largest shares of it."""

    norm: float | None = said("norm {}")
    bar: float | None = said("the limit is {}", limit="limit")
    largest: float | None = said("largest {}")
    samples_before: int = said("{} measured steps before")
    update_ratio: float | None = said("update relative to the parameter {}")
    ends_badly: bool = said("the run ends with values that are not finite")
    shares: Mapping[str, float | None] = places("share at each site")
    begins: JumpStart | None = unsaid(unless=None)


@dataclass(frozen=True)
class GradExplode(Rule):
    """The gradient grew far beyond all earlier gradients of the run and stayed there.

    Meaning:
        The norm of all gradients together rose to a multiple of its earlier values and did not come
        back.

    Formula:
        G = sqrt(sum of squares of the gradients of all parameters of a root), in every measured
        step. Reported at the first sample with G > factor * max(G over the history steps before the
        last lag steps), if sustained consecutive samples are above that bar, and if from there on
        the median over the weights of rms(update) / rms(weight) exceeds harm at least once. The two
        conditions do not apply if G stays above the bar until it is no longer finite.

        Or: G is not finite at the end, and before that it rose for rising consecutive samples, to
        more than factor squared times the median of the samples before.

        Or: the same as the first, for G in every step, taken at the end of the backward pass,
        before clipping, if the median over the weights of their change in size, from the measured
        step before to the one after, exceeds ruin. This finds explosions that begin and end between
        two samples.

    Window:
        The whole run, sample by sample, from the first sample with min_history samples before the
        lag. So the first formula never judges the first steps, in which the gradients of healthy
        runs rise and fall. The first step of a new optimizer, for example for a new head, starts a
        new training with a new past. Gradients that are missing in more than a tenth of the steps are left
        out: layers that are unfrozen later would raise the norm.

    Thresholds:
        - factor (10): Megatron-LM calls a gradient unexpectedly large at 10 times the maximum of
          100 samples.
        - history (1,000): steps. These are as many samples as in Megatron-LM if one step in ten is
          sampled.
        - lag (50): steps. Keeps growth over several samples out of the history that it is compared
          with. In a run of less than four times as many steps it is a quarter of the steps.
        - sustained (3): one bad batch is not an explosion; SPIKE reports it.
        - harm (0.1): 100 times the update ratio of 1e-3 that Karpathy calls healthy: in one step a
          weight changes by a tenth of its size. A large gradient that is clipped, or that Adam
          normalises, does no such harm.
        - ruin (1): the weights at least double. A bad batch changed them by less than 0.2.
        - min_history (20): samples to compare with.
        - rising (3): like sustained, for a run that is too short for the first formula.
        - jump (4): what the norm is more than so many times that of the step before has jumped, and
          not grown.

    Evidence:
        The norm and its bar, the largest norm, the update ratio from there on, and the parameters
        with the largest share of the norm. If the norm jumped and a measured step shows it: where
        that begins, as SPIKE says it.

    Remedy:
        Lower the learning rate or warm it up, clip gradients (torch.nn.utils.clip_grad_norm_), and
        look at the batch and at the parameter with the largest share of the norm.

    Cannot see:
        Gradients that are too large from the first steps on (RATE-TOO-LARGE); an explosion of
        one layer that the norm of all others hides.
    """

    factor: float = 10.0
    history: int = 1_000
    lag: int = 50
    sustained: int = 3
    harm: float = 0.1
    ruin: float = 1.0
    min_history: int = 20
    rising: int = 3
    jump: float = 4.0

    code = "GRAD-EXPLODE"
    name = "the gradient grew far beyond its past and stayed there"
    severity = "error"
    of_training = True
    follows = (
        "NEVER-INITIALISED INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO "
        "GRADS-KEPT RATE-TOO-LARGE"
    )

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for root, _ in by_root(trained_sites(recording, "param.grad"), lambda site: site.root):
            arrived = _Norms.of(recording, root)
            taken = _Norms.of_every_step(recording, root)
            starts = later_starts(recording, root)
            ways = [(each, self._outgrown) for each in (*arrived.cut(starts), *taken.cut(starts))]
            for norms, find in (*ways, (arrived, self._runaway)):
                found = find(norms)
                if found is not None:
                    yield self._finding(norms, *found, arrived.parts(int(norms.steps[found[0]])))
                    break

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of norms for a past to compare with."""
        roots = [
            root
            for root, _ in by_root(trained_sites(recording, "param.grad"), lambda site: site.root)
        ]
        norms = [
            (_Norms.of(recording, root), _Norms.of_every_step(recording, root)) for root in roots
        ]
        known = [max(len(arrived.steps), len(taken.steps)) for arrived, taken in norms]
        # Three quarters of a short run are its past, and the last samples have to stay above the
        # bar.
        need = -(-4 * self.min_history // 3) + self.sustained
        if not any(known):
            return None
        return too_few(self.code, min(known), need)

    def drawn(self, recording: Recording, finding: Finding) -> Sequence[str]:
        """Return the norm of the gradients, which the finding is about; its site has the largest share of it."""
        roots = {site.site: site.root for site in recording.sites}
        root = roots[finding.site]
        norms = [site.site for site in recording.of_kind("grad.norm") if site.root == root]
        return norms or [finding.site]

    def _lag(self, norms: _Norms) -> float:
        """Return the number of steps between a sample and the end of its past."""
        span = 0.0
        if len(norms.steps):
            span = float(norms.steps[-1] - norms.steps[0])
        return min(float(self.lag), span / 4)

    def _outgrown(self, norms: _Norms) -> tuple[int, float] | None:
        """Return the first sample that lies far above its own past and is followed by others, and its bar."""
        lag = self._lag(norms)
        starts = np.searchsorted(norms.steps, norms.steps - lag - self.history)
        ends = np.searchsorted(norms.steps, norms.steps - lag)
        for at in np.flatnonzero(ends >= self.min_history).tolist():
            past = norms.total[starts[at] : ends[at]]
            bar = self.factor * float(past[np.isfinite(past)].max(initial=0))
            if 0 < bar < norms.total[at] < np.inf and self._lasts(norms, at, bar):
                return at, bar
        return None

    def _lasts(self, norms: _Norms, at: int, bar: float) -> bool:
        if norms.end > at and norms.ends_badly:
            return bool((norms.total[at : norms.end] > bar).all())
        following = norms.total[at : at + self.sustained]
        if len(following) < self.sustained or not (following > bar).all():
            return False
        if norms.taken:
            return norms.change(at) > self.ruin
        return norms.harm(at) > self.harm

    def _runaway(self, norms: _Norms) -> tuple[int, float] | None:
        """Return the sample at which a norm that ended non-finite had grown far, and its bar."""
        total = norms.total[: norms.end]
        if not norms.ends_badly or len(total) <= self.rising:
            return None
        falls = np.flatnonzero(~(np.diff(total) > 0))
        start = 1
        if len(falls):
            start = int(falls[-1]) + 2
        bar = np.inf
        if np.isfinite(total[:start]).all():
            bar = self.factor**2 * float(np.median(total[:start]))
        above = np.flatnonzero(total[start:] > bar)
        if len(total) - start >= self.rising and len(above):
            return (start + int(above[0]), bar)
        return None

    def _finding(
        self, norms: _Norms, at: int, bar: float, parts: dict[str, float | None]
    ) -> Finding:
        step = int(norms.steps[at])
        norm = norms.total[at]
        harm = norms.harm(at)
        rest = norms.total[at:]
        largest = float(rest[np.isfinite(rest)].max())
        fate = "and stayed above it"
        if norms.ends_badly:
            fate = "and was not finite at the end"
        begins = self._start(norms, at)
        where = ""
        if begins is not None:
            where = f" {begins}"
        confidence = 0.7
        if (norms.steps < step - self._lag(norms)).sum() >= self.min_history:
            confidence = 0.9
        return Finding(
            code=self.code,
            severity=self.severity,
            site=next(iter(parts)),
            step=step,
            message=f"The norm of the gradients was {norm:.3g} at step {step}, above "
            f"the limit of {bar:.3g} set by the run's own past, {fate} (largest: "
            f"{largest:.3g}); {next(iter(parts))} has the largest share.{where}",
            evidence=GradExplodeEvidence(
                norm=plain(norm),
                bar=plain(bar),
                largest=plain(largest),
                samples_before=at,
                update_ratio=plain(harm),
                ends_badly=norms.ends_badly,
                shares=parts,
                begins=begins,
            ),
            confidence=confidence,
            remedy="Lower the learning rate or warm it up, clip gradients "
            "(torch.nn.utils.clip_grad_norm_), and look at the batch of this step "
            "and at the parameter with the largest share.",
        )

    def _start(self, norms: _Norms, at: int) -> JumpStart | None:
        """Return where the norm's jump begins; None if it grew over several steps, or that was not measured."""
        if not at or not norms.total[at] > self.jump * norms.total[at - 1]:
            return None
        steps = norms.steps[at : at + self.sustained]
        roots = {norms.sites[0].root}
        return jump_start(norms.recording, roots, steps, backward=True)


@dataclass(frozen=True)
class _Norms:
    """The norm of all gradients of one root, in every step that has them."""

    recording: Recording
    sites: list[SiteInfo]
    steps: Ints
    squares: Floats
    "Sums of squares: a row a site, a column a step."
    taken: bool = False
    "Whether they are the norms that are recorded in every step."

    @classmethod
    def of(cls, recording: Recording, root: int) -> _Norms:
        """Return the norms of a root from the gradients that are recorded in nearly all steps."""
        sites = [site for site in recording.of_kind("param.grad") if site.root == root]
        every = recording.all_rows
        line = np.full(len(recording.sites), -1)
        line[[site.id for site in sites]] = np.arange(len(sites))
        own = np.flatnonzero(line[every.site] >= 0)
        step = every.rows.step[own]
        counted = _counted(every.rows)[own]
        steps = np.unique(step[counted])
        squares = np.zeros((len(sites), len(steps)))
        present = np.zeros(squares.shape, dtype=bool)
        own, step = own[shared := np.isin(step, steps)], step[shared]
        i = line[every.site[own]]
        at = np.searchsorted(steps, step)
        squares[i, at], present[i, at] = every.rows.sumsq[own], True
        kept = _steady(present)
        steady = [sites[i] for i in np.flatnonzero(kept)]
        return cls(recording, steady, steps, squares[kept])

    @classmethod
    def of_every_step(cls, recording: Recording, root: int) -> _Norms:
        """Return the norms that are recorded in every step, for the steps that had as many gradients as usual."""
        sites = [site for site in recording.of_kind("grad.norm") if site.root == root][:1]
        if not sites:
            return cls(recording, [], np.zeros(0, dtype=np.int64), np.zeros((0, 0)), taken=True)
        rows = recording.rows(sites[0])
        usual = (
            np.asarray(rows.count == np.median(rows.count))
            if len(rows)
            else np.zeros(0, dtype=bool)
        )
        return cls(recording, sites, rows.step[usual], rows.sumsq[None, usual], taken=True)

    def cut(self, starts: Sequence[int]) -> list[_Norms]:
        """Return the norms from each of some steps up to the next; the first part begins with the run."""
        cuts = [0, *np.searchsorted(self.steps, starts).tolist(), len(self.steps)]
        return [
            replace(self, steps=self.steps[begin:end], squares=self.squares[:, begin:end])
            for begin, end in pairwise(cuts)
        ]

    @cached_property
    def total(self) -> Floats:
        """The norm in every step; an absent gradient counts as zero."""
        return np.asarray(np.sqrt(self.squares.sum(axis=0)))

    @property
    def end(self) -> int:
        """The index after the last finite norm."""
        return int(np.flatnonzero(np.isfinite(self.total)).max(initial=-1)) + 1

    @property
    def ends_badly(self) -> bool:
        """Whether the norm is not finite in the end."""
        return self.end < len(self.total)

    def harm(self, at: int) -> float:
        """Return the largest update ratio from a sample on, infinite if none was recorded."""
        later = middle(self.weights.update)[self.weights.steps >= self.steps[at]]
        if np.isfinite(later).any():
            return float(np.nanmax(later))
        return np.inf

    def change(self, at: int) -> float:
        """Return the change of the weights' sizes around a step, from the last measured one before it to the next after it."""
        after = int(np.searchsorted(self.weights.steps, self.steps[at], side="right"))
        if not 0 < after < len(self.weights.steps):
            return 0.0
        size = self.weights.size
        now, was = size[:, after : after + 1], size[:, after - 1 : after]
        changed = middle(np.abs(share(now, was) - 1))
        return float(np.nan_to_num(changed[0]))

    @cached_property
    def weights(self) -> WeightCourses:
        """The weights of the root."""
        every = weight_courses(self.recording)
        root = self.sites[0].root
        own = [row for row, weight in enumerate(every.weights) if weight.root == root]
        return every.part(np.array(own, dtype=np.int64))

    def parts(self, step: int) -> dict[str, float | None]:
        """Return the gradients with the largest shares of the squared norm, in a step or the next one known."""
        at = min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)
        order = np.argsort(self.squares[:, at])[::-1][:NAMED]
        whole = self.squares[:, at].sum()
        return {self.sites[i].site: plain(self.squares[i, at] / whole) for i in order}


def _counted(rows: Rows) -> Bools:
    """Return which rows have gradients that can be compared.

    Between measured steps gradients are recorded where one of them is not finite; only these count
    there.
    """
    return np.asarray((rows.level == FULL) | ~rows.clean)


def _steady(present: Bools) -> Bools:
    """Return which gradients are recorded in nine tenths of the steps; all of them, if none is."""
    if not present.size:
        return np.ones(len(present), dtype=bool)
    kept = np.asarray(present.mean(axis=1) >= 0.9)
    if kept.any():
        return kept
    return np.ones(len(present), dtype=bool)
