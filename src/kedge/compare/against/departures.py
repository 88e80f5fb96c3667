"""The relations of a good run that do not hold in another run, as findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kedge.calls.arguments import described
from kedge.compare.against import inputs, layers, optimizers, parameters, passes, ranges, ranks
from kedge.compare.against.departs import CODE
from kedge.compare.against.run_pair import Departure, RunPair
from kedge.compare.alignment.sites import SameModule
from kedge.errors import CannotCompare, WrongCall
from kedge.rules.rule import SEVERITIES, Finding
from kedge.short_text import counted
from kedge.store.recording import Recording

Relation = Callable[[RunPair], Iterator[Departure]]

#: The relations, those that can be the cause of others first.
RELATIONS: tuple[Relation, ...] = (
    layers.modules,
    layers.dtypes,
    passes.modes,
    layers.operations,
    layers.losses,
    layers.dropouts,
    layers.firing,
    passes.evaluations,
    passes.kept_gradients,
    passes.calls,
    inputs.repeats,
    inputs.batches,
    optimizers.kinds,
    optimizers.held,
    optimizers.rates,
    optimizers.courses,
    parameters.still,
    parameters.moving,
    ranks.equal_parameters,
    ranks.own_inputs,
    ranges.finite,
    ranges.inputs,
    ranges.evaluated,
    ranges.sizes,
)

LEAST_ALIKE = 0.5
"""The least share of modules that runs of the same program have in common, of the smaller model's."""


def departures(recording: Recording, good: Recording) -> tuple[Finding, ...]:
    """Return what held in a good run and does not hold in another run of the same program.

    The runs may have other seeds, lengths and batch sizes. A departure that is a fact of the
    program is an error; one that is inferred from the range of values in the good run is a warning.
    If there is a fact, only inputs are inferred beside it: all other sizes may follow from it.

    Args:
        recording: The run that is asked.
        good: A healthy run of the same, or of a similar program.

    Returns:
        The departures, errors first, then in the order of steps. All have the code ``DEPARTS``.

    Raises:
        CannotCompare: They are of different programs, or one of them has no measured step.
        WrongCall: One of them is no recording.
    """
    for given in (recording, good):
        if not isinstance(given, Recording):
            raise WrongCall(
                f"departures(recording, good): {described(given)} is no recording; open it with "
                'kedge.Recording.open("run.kedge")'
            )
    pair = RunPair.of(good, recording)
    reason = reason_against(pair)
    if reason:
        raise CannotCompare(f"cannot check {_name(recording)} against {_name(good)}: {reason}")
    return departures_of(pair)


def departures_of(pair: RunPair) -> tuple[Finding, ...]:
    """Return what held in the good run of a pair and does not hold in the other one."""
    found = [each for relation in RELATIONS for each in relation(pair)]
    if not all(each.inferred for each in found):
        found = [each for each in found if not each.inferred or each.kind == ranges.INPUTS.kind]
    return _ordered(_finding(each) for each in found)


def _finding(departure: Departure) -> Finding:
    confidence = 1.0
    severity = SEVERITIES[0]
    message = departure.message
    if departure.step >= 0:
        message += f" First seen in step {departure.step}."
    if departure.inferred:
        confidence = 0.7
        severity = SEVERITIES[1]
        message += " This is inferred from the range of values in the good run."
    return Finding(
        code=CODE,
        severity=severity,
        site=departure.site,
        step=departure.step,
        message=message,
        evidence=departure.evidence,
        confidence=confidence,
        remedy=departure.remedy,
    )


def _ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(
        sorted(findings, key=lambda each: (SEVERITIES.index(each.severity), each.step)),
    )


def reason_against(pair: RunPair) -> str:
    """Return why two runs cannot be compared, and the remedy; empty if they can."""
    for side, recording in (("the good run", pair.good), ("the run", pair.run)):
        if not len(recording.steps):
            return f"{side} has no measured step; record it again with --every 1"
    pairs = [same for same in pair.alignment.modules if same.a.fires]
    alike = [same for same in pairs if same.kept or _is_named_alike(same)]
    alone = [module for module in pair.alignment.only_a if module.fires]
    every = len(pairs) + len(alone)
    added = [module for module in pair.alignment.only_b if module.fires]
    smaller = len(pairs) + min(len(alone), len(added))  # a part of a model may be lost
    if len(alike) < LEAST_ALIKE * smaller:
        return (
            f"these are different programs, with {len(alike)} of the good run's "
            f"{counted(every, 'module')} in both; name a good run of the same model"
        )
    return ""


def _is_named_alike(same: SameModule) -> bool:
    return same.a.type == same.b.type and same.how in ("name", "wrapper", "prefix")


def _name(recording: Recording) -> str:
    return recording.path.name or "a recording"
