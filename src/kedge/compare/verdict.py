"""The verdict on two recordings: whether they differ, the first difference, and its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kedge.compare import (
    causes_before_forward,
    causes_in_backward,
    causes_in_forward,
    causes_in_modes,
)
from kedge.compare.against.departures import departures_of, reason_against
from kedge.compare.against.run_pair import RunPair
from kedge.compare.comparison import Comparison, Parting
from kedge.compare.first_parting import FirstParting, PartingCause, is_from_outside
from kedge.compare.operations.finding import OperationFinding
from kedge.rules.rule import Finding
from kedge.short_text import counted

Finder = Callable[[FirstParting], PartingCause | None]

#: The finders of causes, in the order of a step: the first cause counts.
FINDERS: tuple[Finder, ...] = (
    causes_before_forward.unseen,
    causes_before_forward.late,
    causes_before_forward.dtype_of_parameters,
    causes_before_forward.layers,
    causes_before_forward.seed,
    causes_before_forward.parameters,
    causes_before_forward.batch_size,
    causes_before_forward.dtype_of_inputs,
    causes_before_forward.data,
    causes_in_forward.dtype,
    causes_in_modes.mode,
    causes_in_modes.dropping,
    causes_in_forward.randomness,
    causes_in_forward.layer,
    causes_in_forward.rounding,
    causes_in_forward.products,
    causes_in_forward.code,
    causes_in_backward.dtype,
    causes_in_backward.scaled,
    causes_in_backward.loss,
    causes_in_backward.backward,
    causes_in_backward.norm,
    causes_in_backward.rate,
    causes_in_backward.optimizer,
)

#: The causes that leave no value equal: then the relations that hold in A are asked of B.
UNLIKE = ("seed", "initialisation")

#: The kinds of sites that the ranks of one run share; all others belong to one rank.
SHARED = ("param", "grad.norm", "update")


@dataclass(frozen=True)
class Verdict:
    """The verdict on two recordings.

    Attributes:
        parted: Whether they differ by more than the tolerance, and should not.
        first: The first difference; None if there is none.
        cause: Its cause, or that there is no difference.
        departures: What held in A and does not hold in B, if they have other initial values.
        operation: What second runs say of the first difference; None without them.
    """

    parted: bool
    first: Parting | None
    cause: PartingCause
    departures: tuple[Finding, ...] = field(default=())
    operation: OperationFinding | None = None

    @property
    def headline(self) -> str:
        """The cause, after what does not hold in B where the values themselves say nothing."""
        if not self.departures:
            return self.cause.headline
        number = counted(len(self.departures), "relation")
        hold = "do not hold"
        if len(self.departures) == 1:
            hold = "does not hold"
        return f"{number} of A, as the good run, {hold} in B; also {self.cause.headline}"


def judge(comparison: Comparison) -> Verdict:
    """Return the verdict on two runs."""
    first = comparison.first
    if first is None:
        return Verdict(parted=False, first=None, cause=_same(comparison))
    facts = FirstParting(comparison, first)
    causes = (find(facts) for find in FINDERS)
    found = next((cause for cause in causes if cause is not None), _unknown(facts))
    if facts.column and found.code not in ("unseen", "late"):
        before = "1 compared step before it is equal"
        if facts.column > 1:
            before = f"{counted(facts.column, 'compared step')} before it are equal"
        found = replace(found, evidence=f"{found.evidence}; {before}")
    return Verdict(
        parted=True, first=first, cause=found, departures=_departures(comparison, found.code)
    )


def _departures(comparison: Comparison, code: str) -> tuple[Finding, ...]:
    if code not in UNLIKE:
        return ()
    pair = RunPair(comparison.a, comparison.b, comparison.alignment)
    if reason_against(pair):
        return ()
    return departures_of(pair)


def judge_ranks(comparison: Comparison) -> Verdict:
    """Return the verdict on two ranks of one run.

    Their data may differ, the values that they share may not.
    """
    sites = comparison.alignment.sites
    shared = [i for i, same in enumerate(sites) if same.kind in SHARED]
    parted = comparison.parted[shared]
    columns = np.flatnonzero(parted.any(axis=0))
    if len(columns):
        column = int(columns[0])
        first = comparison.parting(shared[int(np.argmax(parted[:, column]))], column)
        return Verdict(parted=True, first=first, cause=_drift(first))
    return Verdict(parted=False, first=comparison.first, cause=_agreement(comparison, shared))


def _same(comparison: Comparison) -> PartingCause:
    values = counted(comparison.values, "value")
    sites = counted(len(comparison.alignment.sites), "site")
    found = f"{values} of {sites} in {counted(len(comparison.steps), 'step')} are "
    if comparison.tolerance:
        furthest = float(np.nanmax(comparison.apart))
        found += f"at most {furthest:.2g} apart, and {comparison.tolerance:g} is tolerated"
        return PartingCause("same", "no difference beyond the tolerance", found)
    found += "equal to the last bit"
    if comparison.unlike:
        unlike = counted(comparison.unlike, "step")
        found += f", those of {unlike} that one alone measured in full up to rounding"
    return PartingCause("same", "no difference", found)


def _unknown(facts: FirstParting) -> PartingCause:
    return PartingCause(
        "unknown",
        f"they diverge in {facts.first.same.text}",
        f"everything before is {facts.equal_before()}",
    )


def _drift(first: Parting) -> PartingCause:
    names = {
        "param": "parameters",
        "grad.norm": "gradients at the end of backward",
        "update": "updates",
    }
    what = names[first.same.kind]
    return PartingCause(
        "drift",
        f"the ranks drift apart: their {what} differ from step {first.step} on",
        f"{first.same.text} is the first; ranks that hold parts of a sharded model may differ",
    )


def _agreement(comparison: Comparison, shared: list[int]) -> PartingCause:
    if np.isnan(comparison.apart[shared]).all():
        return PartingCause(
            "ranks",
            "nothing that ranks share was measured in both",
            "no parameter, gradient norm or update",
        )
    sites = comparison.alignment.sites
    inputs = [i for i, same in enumerate(sites) if is_from_outside(comparison.a, same)]
    known = comparison.apart[inputs]
    steps = counted(len(comparison.steps), "step")
    equal = f"parameters, gradient norms and updates are equal in {steps}"
    if inputs and not np.isnan(known).all() and not comparison.parted[inputs].any():
        return PartingCause(
            "same-data",
            "the ranks agree, and they get the same data: should each rank get a different part?",
            equal,
        )
    return PartingCause(
        "ranks",
        "the ranks agree in everything that they share",
        equal + "; each has data of its own",
    )
