"""RANK-DEPARTS: the ranks of a distributed run against each other.

# Note [Replicated parameters]
Parameters that ranks hold alike have equal values and equal gradients in the first measured step.
Equal values alone say little: a part of a model that begins with zeros, or with the same seed, has
them too. A model may have both kinds, as with tensor parallelism, where norms are replicated and
weights are spread. So each parameter is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.rules.evidence import Evidence, places, said
from kedge.rules.naming import NAMED, plain
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.recorded.samples import too_few
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Bools, Floats, Ints

FORWARD = ("in", "out", "param")


@dataclass(frozen=True, kw_only=True)
class OutOfSyncEvidence(Evidence):
    """The sizes of a parameter on each rank, in the first step in which they differ."""

    rank: int | None = said("rank {}")
    rms: Mapping[str, float | None] = places("root mean square on each rank", preferred=True)
    parameters: int = said("parameters {}")
    of: int = said("of {} in all")
    gradients_part_at: int | None = said("gradients differ from step {} on")


@dataclass(frozen=True, kw_only=True)
class NotFiniteEvidence(Evidence):
    """The ranks with values that are not finite, and others that had none."""

    ranks: Sequence[int] = said("ranks: {}")
    finite: Sequence[int] = said("finite: {}")
    born: str = said("born: {}")


@dataclass(frozen=True, kw_only=True)
class FarAwayEvidence(Evidence):
    """How far the values of one rank are from those of the others."""

    rank: int = said("rank {}")
    times: float | None = said("{} times")
    rms: Mapping[str, float | None] = places("root mean square on each rank", preferred=True)
    steps: int = said("steps {}")


@dataclass(frozen=True, kw_only=True)
class StepsEvidence(Evidence):
    """The steps that each rank took."""

    steps: Mapping[str, int] = places("steps", preferred=True)


@dataclass(frozen=True)
class RankDeparts(Rule):
    """One rank of a distributed run differs from the others.

    Meaning:
        Ranks that hold the same parameters no longer agree on them; or only one rank made the first
        non-finite value; or the outputs of one rank's modules are far from those of the others; or
        the ranks took different numbers of steps.

    Formula:
        Out of sync (error): the root mean square of a replicated parameter differs between ranks by
        more than tolerance times the largest. A parameter is replicated if each rank holds it as a
        whole, and if it and its gradient agree in the first measured step. Other parameters may be
        parts of a model that is spread over the ranks. If none is replicated because the first
        gradients of all differ already, and the norms of the gradients never agree later, this is a
        warning: each rank may train a model of its own.

        Not finite (error): NAN-BORN finds a birth in the forward pass of some ranks, and the others
        had only finite values in that step's forward and before.

        Far away (warning): log2 of the rms of a module's output is further from the median of the
        ranks (of two ranks: from rank 0's) than log2(factor), and than spread times its usual
        variation, in each of the last sustained measured steps.

        Steps (warning): the ranks ended by themselves after different numbers of steps.

    Window:
        The steps that all ranks measured in full; for non-finite values every step. Modules whose
        output has fewer than least elements are left out, including the loss: a single batch
        decides their size.

    Thresholds:
        - tolerance (1e-4): after an all-reduce the ranks have the same bits; sums of squares on
          different devices differ by the rounding of float32, 1e-6.
        - factor (4): healthy ranks that saw 2 to 8 images each reached 1.4 (in a single step 6.6).
          Images that one rank does not normalise are some 255 times as large.
        - spread (4): times the median deviation of the other ranks and steps.
        - sustained (5): one odd batch is not reported.
        - least (64): see above.

    Evidence:
        The figures of each rank, and the first step with a difference.

    Remedy:
        Out of sync: if the gradients still agreed, look at clipping, the scaler and the optimizer; if
        not, at how they are exchanged. Look for random decisions that differ between ranks, and for
        layers that DistributedDataParallel does not know. Otherwise look at the data that this rank gets, and at its device.

    Cannot see:
        Ranks that were not recorded, gradients that are exchanged wrongly but alike on all
        ranks, and parts of a model that differ between ranks from the first measured step on,
        which are taken for parts of it.
    """

    tolerance: float = 1e-4
    factor: float = 4.0
    spread: float = 4.0
    sustained: int = 5
    least: int = 64

    code = "RANK-DEPARTS"
    name = "one rank differs from the others"
    severity = "error"
    compares_ranks = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding of each kind; one for each rank that is far away."""
        if len(recording.ranks) > 1:
            group = _Group(recording)
            yield from self._out_of_sync(group)
            yield from self._not_finite(group)
            yield from self._far_away(group)
            yield from self._steps(group)

    def idle(self, recording: Recording) -> str:
        """Return that there is one process."""
        if len(recording.ranks) < 2:
            return "one process"
        return ""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of steps that all ranks measured; a single process has no ranks to compare."""
        if len(recording.ranks) < 2:
            return None
        return too_few(
            self.code, len(_Group(recording).steps), self.sustained, "steps that all ranks measured"
        )

    def _out_of_sync(self, group: _Group) -> Iterator[Finding]:
        """Judge each parameter by itself; see Note [Replicated parameters]."""
        if len(group.steps) < 2:
            return
        sites = [site for site in group.recording.of_kind("param") if group.whole(site)]
        every = [_Parameter.of(group, site, self.tolerance) for site in sites]
        alike = [parameter for parameter in every if parameter.departs != 0]
        unlike = [parameter for parameter in alike if parameter.departs is not None]
        replicated = [parameter for parameter in alike if parameter.shares_gradients]
        departed = [parameter for parameter in unlike if parameter.shares_gradients]
        if departed:
            yield self._departed(group, departed, len(sites))
        elif unlike and not replicated:
            yield self._unexchanged(group, unlike, len(sites))

    def _departed(self, group: _Group, departed: list[_Parameter], of: int) -> Finding:
        """Return the finding about replicated parameters on which the ranks no longer agree."""
        worst, at, number = _first(departed)
        values = worst.sizes[:, at]
        odd = group.odd_one(values)
        who = "the ranks no longer agree"
        if odd is not None:
            who = f"rank {odd} departed from the others"

        parted = worst.gradients_part
        why = ""
        remedy = _OUT_OF_SYNC
        if worst.has_gradients and (parted is None or parted >= group.steps[at]):
            why = (
                " Until then its gradients agreed at the end of every measured backward pass, so "
                "what comes after that differs."
            )
            remedy = _AFTER_BACKWARD
        elif parted is not None:
            why = f" Its gradients differ since step {parted}."
            remedy = _COMMUNICATION
        site = worst.site.site
        step = int(group.steps[at])
        return Finding(
            code=self.code,
            severity="error",
            site=site,
            step=step,
            message=f"At step {step} {who} on {site}, by {_relative(worst.sizes)[at]:.1e} of its "
            f"size; until step {int(group.steps[at - 1])} it was the same on all ranks.{why}",
            evidence=OutOfSyncEvidence(
                rank=odd,
                rms=group.by_rank(values),
                parameters=number,
                of=of,
                gradients_part_at=group.norms_part(self.tolerance),
            ),
            confidence=0.9,
            remedy=remedy,
        )

    def _unexchanged(self, group: _Group, unlike: list[_Parameter], of: int) -> Finding:
        """Return the finding about ranks that began alike, and whose first gradients differ already."""
        worst, at, number = _first(unlike)
        values = worst.sizes[:, at]
        step = int(group.steps[at])
        site = worst.site.site
        agreeing, compared = group.agreeing_norms(self.tolerance)
        severity: Severity = "warning"
        confidence = 0.5
        message = _NEVER.format(site=site, step=step)
        if agreeing >= max(2, compared // 10):
            severity = "error"
            confidence = 0.9
            message = _SOMETIMES.format(site=site, step=step, agreeing=agreeing, compared=compared)
        return Finding(
            code=self.code,
            severity=severity,
            site=site,
            step=step,
            message=message,
            evidence=OutOfSyncEvidence(
                rank=group.odd_one(values),
                rms=group.by_rank(values),
                parameters=number,
                of=of,
                gradients_part_at=group.norms_part(self.tolerance),
            ),
            confidence=confidence,
            remedy=_SEPARATE,
        )

    def _not_finite(self, group: _Group) -> Iterator[Finding]:
        births = {
            rank: finding
            for rank, share in zip(group.ranks, group.shares, strict=True)
            for finding in list(NanBorn().check(share))[:1]
            if finding.site.rpartition(":")[2] in FORWARD
        }
        if not births:
            return
        step = min(finding.step for finding in births.values())
        broken = [rank for rank, finding in births.items() if finding.step == step]
        born = births[broken[0]]
        others = [
            rank for rank, share in zip(group.ranks, group.shares, strict=True)
            if rank not in broken and _last_step(share) >= step and _sound_until(share, step)
            and len(share.rows(born.site))  # the stages of a pipeline have different sites
        ]  # fmt: skip
        if not others:
            return
        yield Finding(
            code=self.code,
            severity="error",
            site=born.site,
            step=step,
            message=f"{_ranks(broken)} alone held a non-finite value at {born.site} "
            f"in step {step}; {_ranks(others).lower()} did not.",
            evidence=NotFiniteEvidence(
                ranks=broken,
                finite=others[:NAMED],
                born=born.message,
            ),
            confidence=born.confidence,
            remedy="Look at the batch that this rank had in this step (its sampler, "
            "its shard of the data), and if the same rank breaks again with other "
            "data, at its device.",
        )

    def _far_away(self, group: _Group) -> Iterator[Finding]:
        told: set[int] = set()
        for site in group.recording.of_kind("out"):
            if math.prod(site.shape) < self.least:
                continue
            course = _Apart.of(group, site)
            if len(course.steps) < self.sustained:
                continue
            bar = max(math.log2(self.factor), self.spread * course.usual)
            late = course.logs[:, -self.sustained :]
            is_far = (late > bar).all(axis=1) | (late < -bar).all(axis=1)
            for place in np.flatnonzero(is_far).tolist():
                if place not in told:
                    told.add(place)
                    yield self._distant(group, course, place)

    def _distant(self, group: _Group, course: _Apart, place: int) -> Finding:
        rank = group.ranks[place]
        apart = course.logs[place]
        times = 2.0 ** float(np.median(apart[-self.sustained :]))
        near = np.flatnonzero(np.abs(apart) <= math.log2(self.factor))
        start = 0
        if len(near):
            start = int(near[-1]) + 1
        step = int(course.steps[start])
        site = course.site.site
        how = f"1/{1 / times:.3g} of"
        if times > 1:
            how = f"{times:.3g} times"
        others = f"those at rank {group.ranks[0]}"
        confidence = 0.5
        if len(group.ranks) > 2:
            others = "those of the rank in the middle"
            confidence = 0.7
        return Finding(
            code=self.code,
            severity="warning",
            site=site,
            step=step,
            message=f"From step {step} on, the values of {site} at rank {rank} are {how} {others}.",
            evidence=FarAwayEvidence(
                rank=rank,
                times=plain(times),
                rms=group.by_rank(course.rms[:, -1]),
                steps=len(course.steps) - start,
            ),
            confidence=confidence,
            remedy="Compare this rank's input with that of the others: its shard of "
            "the data, its transforms, its seed.",
        )

    def _steps(self, group: _Group) -> Iterator[Finding]:
        ends = [share.end for share in group.shares]
        ended = {
            rank: end
            for rank, end in zip(group.ranks, ends, strict=True)
            if end is not None and not end.exit
        }
        taken = {rank: end.steps for rank, end in ended.items() if end.steps is not None}
        if len(taken) < len(ends) or len(set(taken.values())) < 2 or not group.recording.sites:
            return
        least = min(taken.values())
        most = max(taken.values())
        short = [rank for rank, steps in taken.items() if steps == least]
        outputs = group.recording.of_kind("out") or group.recording.sites
        site = outputs[-1].site
        yield Finding(
            code=self.code,
            severity="warning",
            site=site,
            step=least,
            message=f"{_ranks(short)} took {least} steps through {site}, others up to {most}.",
            evidence=StepsEvidence(
                steps={str(rank): steps for rank, steps in taken.items()},
            ),
            remedy="Use the same number of batches on all ranks: drop_last=True, or "
            "the context manager Join of torch.distributed.algorithms.join.",
        )


@dataclass(frozen=True)
class _Parameter:
    """A parameter that every rank has as a whole.

    Attributes:
        site: Its site.
        sizes: The root mean squares: a row a rank, a column a common step.
        departs: The place of the first step in which the ranks differ; None if they never do.
        has_gradients: Whether its gradients were measured on each rank, from the first step on.
        gradients_part: The first step in which these differ; None if they never do.
        shares_gradients: Whether they agree in the first step. Where they were not measured, the
            norms of all gradients say so.
    """

    site: SiteInfo
    sizes: Floats
    departs: int | None
    has_gradients: bool
    gradients_part: int | None
    shares_gradients: bool

    @classmethod
    def of(cls, group: _Group, site: SiteInfo, tolerance: float) -> _Parameter:
        """Return what the ranks have of a parameter."""
        sizes = group.rms(site)
        begins = int(group.steps[0])
        gradient = group.gradients.get(site.path)
        has_gradients = False
        parted = None
        if gradient is not None:
            courses = group.rms(gradient)
            has_gradients = bool(np.isfinite(courses[:, 0]).all())
            place = _first_place(_relative(courses) > tolerance)
            if place is not None:
                parted = int(group.steps[place])
        norms = group.norms_part(tolerance)
        shares = norms is None or norms > begins
        if has_gradients:
            shares = parted != begins
        departs = _first_place(_relative(sizes) > tolerance)
        return cls(site, sizes, departs, has_gradients, parted, shares)


def _first(parameters: Sequence[_Parameter]) -> tuple[_Parameter, int, int]:
    """Return the parameter that departs first, and furthest of several; the place of that step; and their number."""
    at = min(p.departs for p in parameters if p.departs is not None)
    now = [p for p in parameters if p.departs == at]
    worst = max(now, key=lambda p: float(_relative(p.sizes)[at]))
    return worst, at, len(now)


def _first_place(each: Bools) -> int | None:
    """Return the place of the first true one; None if there is none."""
    found = np.flatnonzero(each)
    if not len(found):
        return None
    return int(found[0])


@dataclass(frozen=True)
class _Apart:
    """The distances of the ranks from each other at one site, in the steps in which all ranks had values there.

    Attributes:
        site: The site.
        steps: The steps.
        rms: The root mean squares: a row a rank, a column a step.
        logs: The distances from the rank in the middle, of two ranks from the first, as powers of
            two.
    """

    site: SiteInfo
    steps: Ints
    rms: Floats
    logs: Floats

    @classmethod
    def of(cls, group: _Group, site: SiteInfo) -> _Apart:
        """Return the distances of the ranks at a site."""
        rms = group.rms(site)
        known = (np.isfinite(rms) & (rms > 0)).all(axis=0)
        logs = np.log2(rms[:, known])
        middle = np.median(logs, axis=0) if len(logs) > 2 else logs[0]
        return cls(site, group.steps[known], rms[:, known], logs - middle)

    @property
    def usual(self) -> float:
        """The usual variation of a rank against the others."""
        logs = self.logs if len(self.logs) > 2 else self.logs[1:]
        return float(np.median(np.abs(logs - np.median(logs, axis=1, keepdims=True))))


class _Group:
    """The ranks of a recording, and the steps and sites that they have in common."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.ranks = recording, recording.ranks
        self.shares = [recording.of_rank(rank) for rank in self.ranks]

    @cached_property
    def steps(self) -> Ints:
        """The steps that all ranks measured in full."""
        common = self.shares[0].steps
        for share in self.shares[1:]:
            common = np.intersect1d(common, share.steps, assume_unique=True)
        return common

    def by_rank(self, values: Floats) -> dict[str, float | None]:
        """Return one figure of each rank for a finding."""
        return {str(rank): plain(value) for rank, value in zip(self.ranks, values, strict=True)}

    def rms(self, site: SiteInfo) -> Floats:
        """Return the root mean square of a site: a row a rank, a column a common step, NaN where there is none."""
        table = np.full((len(self.shares), len(self.steps)), np.nan)
        for row, share in zip(table, self.shares, strict=True):
            row[:] = share.series(site, "rms")[np.isin(share.steps, self.steps)]
        return table

    def whole(self, site: SiteInfo) -> bool:
        """Whether every rank has all elements of a parameter, in every common step, and not a part of it."""
        size = math.prod(site.shape)
        for share in self.shares:
            rows = share.rows(site)
            kept = (rows.level == FULL) & np.isin(rows.step, self.steps)
            if (
                int(kept.sum()) < len(self.steps)
                or not (rows.count[kept] == size * rows.calls[kept]).all()
            ):
                return False
        return True

    @cached_property
    def gradients(self) -> dict[str, SiteInfo]:
        """The sites of the parameters' gradients, by path."""
        return {site.path: site for site in self.recording.of_kind("param.grad")}

    @cached_property
    def norms(self) -> list[tuple[Ints, Floats]]:
        """The norms of all gradients of each model, and their steps, also between the measured ones."""
        found = []
        for site in self.recording.of_kind("grad.norm"):
            rows = [share.rows(site) for share in self.shares]
            steps = rows[0].step
            for other in rows[1:]:
                steps = np.intersect1d(steps, other.step, assume_unique=True)
            table = np.array([r.statistic("rms")[np.isin(r.step, steps)] for r in rows])
            found.append((steps, table))
        return found

    def norms_part(self, tolerance: float) -> int | None:
        """Return the first step in which the norms of the ranks' gradients differ at the end of the backward pass."""
        parted = []
        for steps, table in self.norms:
            place = _first_place(_relative(table) > tolerance)
            if place is not None:
                parted.append(int(steps[place]))
        return min(parted, default=None)

    def agreeing_norms(self, tolerance: float) -> tuple[int, int]:
        """Return in how many steps the norms of the ranks' gradients agree, and of how many."""
        agreeing = sum(int((_relative(table) <= tolerance).sum()) for _, table in self.norms)
        return agreeing, sum(len(steps) for steps, _ in self.norms)

    def odd_one(self, values: Floats) -> int | None:
        """Return the rank that is alone with its value; None if there is not exactly one."""
        middle = np.median(values)
        apart = np.abs(values - middle)
        place = int(np.nanargmax(apart))
        rest = np.delete(apart, place)
        alone = len(values) > 2 and apart[place] > 10 * rest.max(initial=0)
        if not alone:
            return None
        return self.ranks[place]


def _relative(course: Floats) -> Floats:
    """Return the distance of the ranks in each step, as a share of the largest; 0 if a rank has no finite value."""
    if not course.size:
        return np.zeros(course.shape[-1])
    largest = np.abs(course).max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = (course.max(axis=0) - course.min(axis=0)) / largest
    return np.asarray(np.nan_to_num(apart, nan=0.0, posinf=0.0))


def _last_step(share: Recording) -> int:
    """Return the last step in a rank's recording, or before its end."""
    if share.end is not None:
        return (share.end.steps or 1) - 1
    return max(
        (int(rows.step[-1]) for site in share.sites if len(rows := share.rows(site))), default=-1
    )


def _sound_until(share: Recording, step: int) -> bool:
    """Whether all values in the forward passes of a rank were finite, up to a step."""
    for site in share.sites:
        if site.kind in FORWARD:
            rows = share.rows(site)
            if not rows.clean[rows.step <= step].all():
                return False
    return True


def _ranks(ranks: Sequence[int]) -> str:
    """Return the names of some ranks for the beginning of a sentence."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:NAMED]))
    if len(ranks) > NAMED:
        named += " and others"
    return f"Ranks {named}"


_NEVER = (
    "The ranks started from the same parameters, and their gradients agreed at the end of no "
    "backward pass: by step {step} they differ on {site}."
)
_SOMETIMES = (
    "The ranks started from the same parameters, and their gradients agreed at the end of the "
    "backward pass in {agreeing:,} of {compared:,} steps only: by step {step} they differ on {site}."
)
_SEPARATE = (
    "Wrap the model in DistributedDataParallel or fully_shard, and call the wrapped one in every "
    "step; ignore this if each rank trains a part of a model, or a model of its own."
)
_OUT_OF_SYNC = (
    "Look for parameters that are changed outside of the optimizer, for decisions "
    "that differ between ranks (random numbers, early stopping, skipped steps), and "
    "for layers that were added after wrapping in DistributedDataParallel."
)
_AFTER_BACKWARD = (
    "Look at what changes gradients and parameters after the backward pass: clipping on some ranks "
    "only, or by a norm that each rank computes for itself; a scaler; the optimizer and its state; "
    "parameters that are changed outside of it."
)
_COMMUNICATION = (
    "Look at how the gradients are exchanged: a step in which the wrapped model is passed by or "
    "no_sync() is left on, a model that was moved or got parameters after wrapping, a reduction in "
    "low precision."
)
