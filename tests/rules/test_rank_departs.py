"""RANK-DEPARTS: what ranks must agree on, what they may differ in, and what is said of the one that departs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kedge.rules.rank_departs import RankDeparts
from kedge.rules.registry import check
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden
from tests.rules.scenes import NAN, Scene, all_of, chain, size

NET = [{"name": "Net", "prefix": "", "parameters": 16}]
WEIGHT = {
    "site": "fc.weight:param",
    "path": "fc.weight",
    "kind": "param",
    "owner": "fc",
    "shape": [4, 4],
}
STEPS = range(0, 80, 10)


def found(recording: Recording) -> list[Any]:
    """Run the rule."""
    return list(RankDeparts().check(recording))


def weights(
    *courses: list[float], norms: list[list[float]] | None = None, count: int = 16
) -> Recording:
    """One parameter, for each rank the course of its size, and that of the gradients' norm."""
    rows = [
        {"rank": rank, **size(step, "fc.weight:param", value, count)}
        for rank, course in enumerate(courses)
        for step, value in zip(STEPS, course, strict=False)
    ]
    for rank, course in enumerate(norms or []):
        rows += [
            {"rank": rank, "level": 1, **size(i, ":grad.norm", value)}
            for i, value in enumerate(course)
        ]
    return Recording.build([WEIGHT, {"site": ":grad.norm", "shape": [16]}], rows, roots=NET)


def outputs(*courses: list[float], shape: tuple[int, ...] = (8, 16)) -> Recording:
    """One output, for each rank the course of its size."""
    count = int(np.prod(shape))
    rows = [
        {"rank": rank, **size(10 * i, "fc:out", value, count)}
        for rank, course in enumerate(courses)
        for i, value in enumerate(course)
    ]
    return Recording.build([{"site": "fc:out", "shape": list(shape)}], rows, roots=NET)


def scenes(*each: Scene, events: list[dict[str, Any]] | None = None) -> Recording:
    """Make one recording of what several ranks saw of the same model."""
    rows = [{"rank": rank, **row} for rank, scene in enumerate(each) for row in scene.rows]
    return Recording.build(each[0].sites, rows, roots=each[0].roots, events=events or [])


def test_a_rank_that_leaves_the_others_is_named() -> None:
    """From the step on in which its parameters differ, although they did not before: an error with its rank."""
    (finding,) = found(weights([1, 1, 1], [1, 1, 1], [1, 1, 1.01], norms=[[1, 1], [1, 1], [1, 1]]))

    assert (finding.severity, finding.site, finding.step) == ("error", "fc.weight:param", 20)
    assert finding.message.startswith(
        "At step 20 rank 2 departed from the others on fc.weight:param"
    )
    assert finding.evidence.rank == 2
    assert finding.evidence.rms == {"0": 1.0, "1": 1.0, "2": 1.01}


def test_of_two_ranks_neither_is_blamed() -> None:
    """Nobody can know which of two is right."""
    (finding,) = found(weights([1, 1], [1, 1.01]))

    assert finding.severity == "error"
    assert "the ranks no longer agree" in finding.message
    assert finding.evidence.rank is None


def test_the_step_in_between_is_named() -> None:
    """Where the gradients' norms part is seen in light steps too."""
    (finding,) = found(weights([1, 1], [1, 1.01], norms=[[1] * 9, [1, 1, 1, 1, 1.2, 1, 1, 1, 1]]))

    assert finding.evidence.gradients_part_at == 4


def test_ranks_that_never_exchange_gradients_may_mean_to() -> None:
    """Equal at first and then each on its own: a warning, for parts of a model may begin alike."""
    (finding,) = found(weights([1, 1.1], [1, 1.2], norms=[[1], [1.5]]))

    assert finding.severity == "warning"
    assert finding.message.startswith(
        "The ranks started from the same parameters, and their gradients agreed at the end of no "
        "backward pass"
    )


def parameters(**each: tuple[list[list[float]], list[list[float]]]) -> Recording:
    """Several parameters, each with the courses of its size and of its gradient for each rank."""
    sites, rows = [], []
    for name, (sizes, gradients) in each.items():
        for kind, courses in (("param", sizes), ("param.grad", gradients)):
            site = {**WEIGHT, "site": f"{name}:{kind}", "path": name, "kind": kind, "owner": name}
            sites.append(site)
            rows += [
                {"rank": rank, **size(step, f"{name}:{kind}", value)}
                for rank, course in enumerate(courses)
                for step, value in zip(STEPS, course, strict=False)
            ]
    return Recording.build(sites, rows, roots=NET)


def test_a_replicated_parameter_is_judged_beside_parts_of_a_model() -> None:
    """Its gradients agreed, so it is what comes after the backward pass: one rank alone clips them."""
    recording = parameters(
        part=([[1, 1.1, 1.2], [2, 2.1, 2.2]], [[1, 1, 1], [3, 3, 3]]),
        zeros=([[1, 1.1, 1.2], [1, 1.2, 1.4]], [[1, 1, 1], [3, 3, 3]]),
        norm=([[1, 1, 1.1], [1, 1, 1.2]], [[1, 1, 1], [1, 1, 1]]),
    )

    (finding,) = found(recording)

    assert (finding.severity, finding.site, finding.step) == ("error", "norm:param", 20)
    assert finding.message == (
        "At step 20 the ranks no longer agree on norm:param, by 8.3e-02 of its size; until step 10 it "
        "was the same on all ranks. Until then its gradients agreed at the end of every measured "
        "backward pass, so what comes after that differs."
    )
    assert "clipping on some ranks" in finding.remedy
    assert (finding.evidence.parameters, finding.evidence.of) == (1, 3)


def test_gradients_that_differ_before_are_named() -> None:
    """Then they were not exchanged, or not rightly."""
    recording = parameters(fc=([[1, 1, 1.1], [1, 1, 1.2]], [[1, 1, 1], [1, 1.5, 1.2]]))

    (finding,) = found(recording)

    assert finding.message.endswith("Its gradients differ since step 10.")
    assert "no_sync()" in finding.remedy


def test_parts_that_began_alike_beside_replicated_parameters_are_no_finding() -> None:
    """Biases of zero on a model that is spread over the ranks."""
    recording = parameters(
        bias=([[1, 1.1, 1.2], [1, 1.2, 1.4]], [[1, 1, 1], [3, 3, 3]]),
        norm=([[1, 1.1, 1.2], [1, 1.1, 1.2]], [[1, 1, 1], [1, 1, 1]]),
    )

    assert found(recording) == []


def test_ranks_that_exchange_gradients_in_some_steps_are_an_error() -> None:
    """The wrapper is passed by in the others."""
    norms = [[1.0] * 20, [1.5 if step % 2 == 0 else 1.0 for step in range(20)]]

    (finding,) = found(weights([1, 1.1], [1, 1.2], norms=norms))

    assert finding.severity == "error"
    assert "agreed at the end of the backward pass in 10 of 20 steps only" in finding.message


@pytest.mark.parametrize(
    "recording",
    [
        weights([1, 1.1, 1.2], [2, 2.1, 2.3]),
        weights([1, 1.1, 1.2], [1, 1.3, 1.5], count=8),
        weights([1, 1.1, 1.2], [1, 1.1 * (1 + 1e-6), 1.2]),
        weights([1, 1.1, 1.2]),
        weights([1, 1.1, 1.2], [1]),
    ],
    ids=["parts of a model", "shards", "rounding", "one rank", "no common step but the first"],
)
def test_what_need_not_agree_is_left_alone(recording: Recording) -> None:
    """Other parameters, parts of parameters and the rounding of other devices are no departure."""
    assert found(recording) == []


def test_one_rank_alone_with_a_nan_is_named() -> None:
    """The forward of one rank made it, those of the others did not."""
    ranks = [chain(), chain(), chain()]
    for step in (0, 1):
        for rank, scene in enumerate(ranks):
            bad = (
                all_of(("log:out", "head:in", "head:out", ":out"), NAN)
                if (rank, step) == (1, 1)
                else {}
            )
            # What all ranks exchange is spoilt at all of them.
            scene.step(step, bad | (all_of(("head.weight:update",), NAN) if step else {}))

    (finding,) = found(scenes(*ranks))

    assert (finding.severity, finding.site, finding.step) == ("error", "log:out", 1)
    assert finding.message == (
        "Rank 1 alone held a non-finite value at log:out in step 1; ranks 0, 2 did not."
    )
    assert finding.evidence.ranks == [1]


def test_of_several_births_at_one_rank_the_first_is_named() -> None:
    """The later modules may have been given what the first one spoiled."""
    ranks = [Scene(), Scene()]
    for rank, scene in enumerate(ranks):
        scene.module("a", "Log")
        scene.module("b", "Log")
        scene.step(0)
        scene.step(1, {"a:out": NAN, "b:out": NAN} if rank == 1 else {})

    (finding,) = found(scenes(*ranks))

    assert finding.message == (
        "Rank 1 alone held a non-finite value at a:out in step 1; rank 0 did not."
    )


def test_a_nan_at_all_ranks_is_not_one_ranks() -> None:
    """If all break in the same step, it is not the data of one."""
    ranks = [chain(), chain()]
    for scene in ranks:
        scene.step(0)
        scene.step(1, all_of(("log:out", "head:in", "head:out", ":out"), NAN))

    assert found(scenes(*ranks)) == []


def test_a_mask_at_one_rank_is_fine() -> None:
    """An infinity that the next module heals is what some batches have and others have not."""
    ranks = [chain(), chain()]
    ranks[0].step(0)
    ranks[1].step(0, {"log:out": -np.inf, "head:in": -np.inf})

    assert found(scenes(*ranks)) == []


def test_a_rank_that_ended_before_is_no_witness() -> None:
    """Who was not there in that step cannot have been finite in it."""
    ranks = [chain(), chain()]
    for scene in ranks:
        scene.step(0)
    ranks[1].step(1, all_of(("log:out", "head:in", "head:out", ":out"), NAN))

    assert found(scenes(*ranks)) == []


def test_a_rank_whose_activations_are_far_away_is_named() -> None:
    """Every measured step from then on, many times as large as those of the ranks in the middle."""
    (finding,) = found(
        outputs([1] * 9, [1.2] * 9, [1, 1, 255, 255, 255, 255, 255, 255, 255], [0.9] * 9)
    )

    assert (finding.severity, finding.site, finding.step) == ("warning", "fc:out", 20)
    assert finding.evidence.rank == 2
    assert "at rank 2 are 233 times those of the rank in the middle." in finding.message


def test_of_two_ranks_the_second_is_compared_with_the_first() -> None:
    """One finding, that tells the ratio."""
    (finding,) = found(outputs([1] * 6, [0.1] * 6))

    assert (
        finding.message
        == "From step 0 on, the values of fc:out at rank 1 are 1/10 of those at rank 0."
    )


@pytest.mark.parametrize(
    "recording",
    [
        outputs([1] * 9, [1.2] * 9, [2.5] * 9, [0.9] * 9),
        outputs([1] * 9, [1] * 9, [1, 9, 1, 9, 9, 9, 9, 1, 9], [1] * 9),
        outputs([1, 1, 1], [9, 9, 9]),
        outputs([1] * 9, [1] * 9, [9] * 9, shape=()),
        outputs([1] * 9, [0] * 9, [9] * 9),
        outputs([1] * 12, [64, 1 / 64, 64, 1 / 64, 64, 1 / 64, 64, 6, 6, 6, 6, 6]),
    ],
    ids=[
        "near",
        "now and then",
        "too few steps",
        "a loss",
        "nothing but zeros",
        "all vary as much",
    ],
)
def test_other_data_at_each_rank_is_no_departure(recording: Recording) -> None:
    """Neither single batches nor small differences, nor what one batch decides, are findings."""
    assert found(recording) == []


@pytest.mark.parametrize(("statuses", "says"), [((0, 0), True), ((0, 1), False)])
def test_ranks_that_take_fewer_steps_are_named(statuses: tuple[int, int], says: bool) -> None:
    """If all came to their end by themselves; one that failed or was stopped has taken fewer anyway."""
    ends = [
        {"kind": "end", "exit": status, "steps": steps} | ({"rank": rank} if rank else {})
        for rank, (status, steps) in enumerate(zip(statuses, (20, 18), strict=True))
    ]
    ranks = [chain(), chain()]
    for scene in ranks:
        scene.step(0)

    findings = found(scenes(*ranks, events=ends))

    assert [finding.message for finding in findings] == [
        "Rank 1 took 18 steps through :out, others up to 20."
    ] * says


def test_light_rows_and_other_schedules_do_not_matter() -> None:
    """Ranks are compared in the steps that all of them measured."""
    recording = weights([1, 1.1, 1.2, 1.3], [1, 1.1, 1.2, 1.3])
    rows = [{"rank": 1, **size(15, "fc.weight:param", 7.0)}]
    steps = [
        {"rank": r, **size(10 * i, "fc.weight:param", 1 + i)} for r in (0, 1) for i in range(4)
    ]

    assert found(recording) == []
    assert found(Recording.build([WEIGHT], steps + rows, roots=NET)) == []


def test_a_norm_that_fewer_ranks_measured_is_no_spike() -> None:
    """The norm of the gradients is the same at all ranks; a step that one alone wrote down is not smaller than others."""
    rows = [
        {"rank": rank, "level": 1, **size(step, ":grad.norm", 1 + 0.01 * (step % 3))}
        for rank in range(64)
        for step in range(60)
        if rank == 0 or step > 40
    ]

    assert check(Recording.build([{"site": ":grad.norm", "shape": [16]}], rows, roots=NET)) == ()


@golden("RANK-DEPARTS")
def golden_rank_departs(*, fires: bool) -> Golden:
    """Make one of four ranks diverge from step 30 on, or only see different data."""
    sites = [{"site": "fc:out", "type": "Linear", "shape": [8, 16]}]
    sites += [
        {
            "site": f"fc.weight:{kind}",
            "path": "fc.weight",
            "kind": kind,
            "owner": "fc",
            "shape": [4, 4],
        }
        for kind in ("param", "param.grad")
    ]
    sites.append({"site": ":grad.norm", "shape": [16]})
    rows: list[dict[str, Any]] = []
    for rank in range(4):
        for step in range(0, 60, 10):
            own = 1.001 if fires and rank == 2 and step >= 30 else 1.0
            rows.append({"rank": rank, **size(step, "fc:out", 1 + 0.1 * rank, 128)})
            rows.append({"rank": rank, **size(step, "fc.weight:param", 0.25 * own)})
            rows.append({"rank": rank, **size(step, "fc.weight:param.grad", 1e-3 * (1 + rank))})
            rows.append({"rank": rank, **size(step, ":grad.norm", 2.5e-3)})
    return {
        "roots": [{"name": "Net", "prefix": "", "parameters": 16}],
        "sites": sites,
        "rows": rows,
    }
