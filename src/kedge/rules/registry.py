"""All rules, their findings in a recording, and the page of each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from textwrap import indent

from kedge.calls.arguments import described
from kedge.errors import NoSuchRule, WrongCall
from kedge.rules.activations.autocast_lost import AutocastLost
from kedge.rules.activations.dead_channel import DeadChannel
from kedge.rules.activations.heavy_dropout import HeavyDropout
from kedge.rules.activations.init_scale import InitScale
from kedge.rules.activations.input_scale import InputScale
from kedge.rules.activations.near_overflow import NearOverflow
from kedge.rules.activations.saturated import Saturated
from kedge.rules.activations.scale_drift import ScaleDrift
from kedge.rules.activations.underflow import Underflow
from kedge.rules.consequences import follow
from kedge.rules.gradients.grad_explode import GradExplode
from kedge.rules.gradients.grad_vanish import GradVanish
from kedge.rules.gradients.grad_zero import GradZero
from kedge.rules.gradients.grads_kept import GradsKept
from kedge.rules.gradients.grads_shrunk import GradsShrunk
from kedge.rules.gradients.rival_stopped import RivalStopped
from kedge.rules.holders import naming_ranks
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.parameters.mostly_frozen import MostlyFrozen
from kedge.rules.parameters.never_called import NeverCalled
from kedge.rules.parameters.never_initialised import NeverInitialised
from kedge.rules.parameters.no_effect import NoEffect
from kedge.rules.parameters.not_optimized import NotOptimized
from kedge.rules.parameters.rate_too_large import RateTooLarge
from kedge.rules.parameters.two_optimizers import TwoOptimizers
from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.parameters.update_ratio import UpdateRatio
from kedge.rules.parameters.weights_shrunk import WeightsShrunk
from kedge.rules.rank_departs import RankDeparts
from kedge.rules.rule import SEVERITIES, Finding, Rule
from kedge.rules.saved_memory import SavedMemory
from kedge.rules.settings import toml
from kedge.rules.training.batch_of_one import BatchOfOne
from kedge.rules.training.batch_sizes import BatchSizes
from kedge.rules.training.double_softmax import DoubleSoftmax
from kedge.rules.training.eval_apart import EvalApart
from kedge.rules.training.eval_mode import EvalMode
from kedge.rules.training.loss_below_zero import LossBelowZero
from kedge.rules.training.no_learning import NoLearning
from kedge.rules.training.paired_targets import PairedTargets
from kedge.rules.training.same_batch import SameBatch
from kedge.rules.training.spike import Spike
from kedge.rules.training.squashed_logits import SquashedLogits
from kedge.rules.training.train_mode import TrainMode
from kedge.rules.training.workers_alike import WorkersAlike
from kedge.store.events import SnapshotEvent
from kedge.store.recording import Recording

#: Every rule with its default thresholds, in the order in which they are listed.
ALL: tuple[Rule, ...] = (
    NanBorn(),
    NotOptimized(),
    NoEffect(),
    GradsKept(),
    GradsShrunk(),
    NeverInitialised(),
    TwoOptimizers(),
    RateTooLarge(),
    WeightsShrunk(),
    NearOverflow(),
    Underflow(),
    GradExplode(),
    GradVanish(),
    GradZero(),
    Spike(),
    DeadChannel(),
    Saturated(),
    HeavyDropout(),
    DoubleSoftmax(),
    SquashedLogits(),
    PairedTargets(),
    LossBelowZero(),
    EvalMode(),
    TrainMode(),
    EvalApart(),
    BatchOfOne(),
    BatchSizes(),
    SameBatch(),
    WorkersAlike(),
    RivalStopped(),
    InputScale(),
    UpdateRatio(),
    InitScale(),
    ScaleDrift(),
    MostlyFrozen(),
    UnusedParam(),
    NeverCalled(),
    NoLearning(),
    AutocastLost(),
    SavedMemory(),
    RankDeparts(),
)


def by_code(rules: Iterable[Rule] | None = None) -> dict[str, Rule]:
    """Return all rules by code, with some rules in place of the usual ones."""
    return {rule.code: rule for rule in (*ALL, *(rules or ()))}


def can_judge(rule: Rule, recording: Recording) -> bool:
    """Whether a rule fits a recording: one that begins in the midst of a training does not show how that began."""
    return not (recording.manifest.get("late") and rule.of_the_beginning)


def check(recording: Recording, rules: Iterable[Rule] | None = None) -> tuple[Finding, ...]:
    """Return the findings of rules in a recording.

    Args:
        recording: The recording; it may still be growing, or have been cut short.
        rules: The rules to run; all of them, with their default thresholds, if None.

    Returns:
        The findings, errors first, then in the order of steps, a cause before its effects. Findings
        that may follow from another one are info, but for a NaN.

    Raises:
        WrongCall: The recording is none, or one of the rules is no `Rule`.
    """
    if not isinstance(recording, Recording):
        raise WrongCall(
            f"check(recording): {described(recording)} is no recording; open it with "
            'kedge.Recording.open("run.kedge")'
        )
    given = ALL if rules is None else tuple(rules)
    for rule in given:
        if not isinstance(rule, Rule):
            raise WrongCall(
                f"check(recording, rules): {described(rule)} is no rule; make its "
                "class a subclass of kedge.rules.Rule, and give an instance of it"
            )
    judging = [rule for rule in given if can_judge(rule, recording)]
    found: list[Finding] = []
    for rule in judging:
        found += rule.check(recording)
    return in_order(recording, judging, found)


def in_order(
    recording: Recording, judging: Sequence[Rule], each: list[Finding]
) -> tuple[Finding, ...]:
    """Return the findings of some rules, as `check` does, given what each rule found."""
    found = naming_ranks(recording, judging, each)
    ordered = sorted(
        follow(recording, found, by_code(judging).values()),
        key=lambda each: (SEVERITIES.index(each.severity), each.step, bool(each.follows)),
    )
    return tuple(_naming_snapshots(recording, ordered))


def _naming_snapshots(recording: Recording, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings with the snapshot of the program's state that was kept for their rule.

    It is named by the first finding of the rule, the worst.
    """
    snapshots = {event.code: event.folder for event in recording.of(SnapshotEvent)}
    for finding in findings:
        folder = snapshots.pop(finding.code, "")
        if folder:
            yield finding.with_snapshot(folder)
        else:
            yield finding


def explain(code: str, rules: Iterable[Rule] | None = None) -> str:
    """Return the page of a rule, and its thresholds as they are set.

    Args:
        code: The rule's code, in any case.
        rules: The rules as they are configured; with their default thresholds if None.

    Raises:
        NoSuchRule: No rule has this code.
    """
    own = {rule.code: rule for rule in rules or ()}
    rule = own.get(code.upper()) or by_code(rules)[known_code(code)]
    usual = by_code().get(rule.code, rule)
    page = f"{rule.code} ({rule.severity}): {rule.name}\n\n{inspect.getdoc(type(rule))}\n"
    set_to = indent(toml([rule], [usual]), "    ")
    return f"{page}\nThresholds, in the form of pyproject.toml:\n{set_to}"


def known_code(code: str, others: Iterable[str] = ()) -> str:
    """Return a code in its usual spelling.

    Args:
        code: The code, in any case.
        others: Known codes of findings that no rule makes.

    Raises:
        NoSuchRule: Neither a rule nor one of the others has this code.
    """
    known = [*(rule.code for rule in ALL), *others]
    if code.upper() not in known:
        raise NoSuchRule(_unknown(code, known))
    return code.upper()


def _unknown(code: str, codes: list[str]) -> str:
    near = get_close_matches(code.upper(), codes, n=3, cutoff=0.4)
    if near:
        return f"there is no rule {code!r}: the nearest are {', '.join(near)}"
    return f"there is no rule {code!r}: the rules are {', '.join(codes)}"
