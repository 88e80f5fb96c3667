"""Why two recordings part: each cause, told from what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kedge.compare.comparison import compare
from kedge.compare.verdict import Verdict, judge, judge_ranks
from kedge.store.recording import Recording
from tests.compare.stories import NET, Factor, Layer, from_step, story

ULP = 2.0**-23
PARAMETERS = ("*.weight:param",)
FORWARD = ("*:out", "*:in")
BACKWARD = ("*:out.grad", "*:param.grad")


def verdict(b: Recording | None = None, a: Recording | None = None, **changes: Any) -> Verdict:
    """Compare the usual run with one that differs."""
    return judge(compare(a or story(), b or story(**changes)))


def spread(first: int, size: float, *texts: str) -> Factor:
    """Multiply sites from a step on, each by a factor of its own around 1."""

    def given(text: str, step: int) -> float:
        hit = any(text.endswith(t[1:]) if t.startswith("*") else text == t for t in texts)
        return 1 + size * (1 + len(text) % 5) / 5 if hit and step >= first else 1.0

    return given


def both(*factors: Factor) -> Factor:
    """Multiply by several factors."""
    return lambda text, step: float(np.prod([factor(text, step) for factor in factors]))


def test_no_difference() -> None:
    """Equal runs do not part, and it is said how much was compared."""
    told = verdict()

    assert (told.parted, told.first, told.cause.code) == (False, None, "same")
    assert told.cause.evidence == "108 values of 27 sites in 4 steps are equal to the last bit"


def test_a_difference_within_the_tolerance() -> None:
    """Of what is tolerated, the largest is shown."""
    told = judge(compare(story(), story(factor=from_step(1, 1 + 1e-6, "mid:out")), tolerance=1e-5))

    assert (told.parted, told.cause.headline) == (False, "no difference beyond the tolerance")
    assert told.cause.evidence.endswith("are at most 1e-06 apart, and 1e-05 is tolerated")


def other_data(first: int) -> Factor:
    """Multiply the inputs from a step on, in each step by another factor."""
    return lambda text, step: (
        1.3 + step / 10 if text in {":in", "stem:in"} and step >= first else 1.0
    )


EVERYTHING = spread(0, 0.2, *FORWARD, *BACKWARD, "*:update", ":grad.norm")

CAUSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "other numbers of the same size in all parameters": (
        "seed",
        {"factor": both(spread(0, 0.05, *PARAMETERS), EVERYTHING)},
        "another seed: the parameters begin with other numbers of the same distribution",
    ),
    "numbers of another size in all parameters": (
        "init",
        {"factor": both(from_step(0, 3.0, *PARAMETERS), EVERYTHING)},
        "another initialisation: the parameters begin with another scale",
    ),
    "other numbers in one parameter": (
        "parameters",
        {"factor": both(from_step(0, 1.5, "mid.weight:param"), from_step(0, 1.1, "head:out"))},
        "1 of 3 parameters begins with other values: mid",
    ),
    "zeros in one parameter": (
        "parameters",
        {"factor": both(from_step(0, 0.0, "mid.weight:param"), from_step(0, 1.1, "head:out"))},
        "1 of 3 parameters begins with zeros in B: mid",
    ),
    "a module that returns zeros": (
        "code",
        {"factor": from_step(1, 0.0, "mid:out", "act:in")},
        "mid (Linear) returns only zeros in B",
    ),
    "inputs of another scale": (
        "data",
        {"factor": from_step(0, 2.0, ":in", "stem:in", "*:out")},
        "another scale of the data: the inputs are 2 times as large in B",
    ),
    "one parameter of another dtype": (
        "dtype",
        {
            "dtypes": lambda text: "bfloat16" if text == "mid.weight:param" else "float32",
            "factor": spread(0, 2.0**-9, "mid.weight:param", "mid:out"),
        },
        "another dtype: parameters of mid are float32 in A and bfloat16 in B",
    ),
    "another rate for one parameter": (
        "rate",
        {
            "factor": both(
                from_step(0, 0.1, "mid.weight:update"), spread(1, 0.1, *PARAMETERS, *FORWARD)
            )
        },
        "another learning rate of some parameters: the updates of mid are 0.1 times as large in B",
    ),
    "other inputs": (
        "data",
        {"factor": both(other_data(0), spread(0, 0.2, "*:out"))},
        "other data, or the same in another order",
    ),
    "other inputs from the middle on": (
        "data",
        {"factor": both(other_data(2), from_step(2, 1.3, "*:out"))},
        "other data, or the same in another order",
    ),
    "inputs of one step": (
        "data",
        {"factor": lambda text, step: 1.3 if text in {":in", "stem:in"} and step == 1 else 1.0},
        "another scale of the data: the inputs are 1.3 times as large in B at step 1 alone",
    ),
    "inputs of some steps": (
        "data",
        {
            "factor": lambda text, step: (
                1.3 + step / 10 if text in {":in", "stem:in"} and step in {0, 2} else 1.0
            )
        },
        "other data in 2 batches, not in all",
    ),
    "another activation": (
        "layer",
        {
            "layers": [replace(n, type="GELU") if n.path == "relu" else n for n in NET],
            "factor": from_step(0, 1.2, "relu:out", "mid:in", "mid:out"),
        },
        "a changed layer: relu is ReLU in A, GELU in B",
    ),
    "one layer more": (
        "layer",
        {"layers": [*NET[:2], Layer("drop", "Dropout"), *NET[2:]]},
        "a changed layer: B has drop (Dropout), A does not",
    ),
    "another width": (
        "layer",
        {
            "layers": [
                replace(n, weight=(16, 8), shape=(4, 16)) if n.path == "mid" else n for n in NET
            ],
            "factor": from_step(0, 1.1, "head.weight:param"),
        },
        "a changed layer: mid (Linear) has weight 8x8 in A, weight 16x8 in B",
    ),
    "another value of a module whose input is equal": (
        "code",
        {"factor": from_step(1, 1.01, "mid:out", "act:in")},
        "mid (Linear) computes something else",
    ),
    "another value between modules": (
        "code",
        {"factor": from_step(1, 1.01, "act:in", "act:out")},
        "the input of act is computed differently, by code between modules",
    ),
    "rounding in the forward pass": (
        "rounding",
        {"factor": spread(0, 20 * ULP, *FORWARD[:1])},
        "rounding: the same arithmetic in a different order",
    ),
    "rounding in the backward pass": (
        "rounding",
        {"factor": spread(0, 20 * ULP, "mid:out.grad")},
        "rounding: the same arithmetic in a different order",
    ),
    "an output of another dtype": (
        "dtype",
        {
            "dtypes": lambda text: (
                "bfloat16" if text in {"mid:out", "act:in", "act:out"} else "float32"
            ),
            "factor": spread(
                0, 2.0**-9, "mid:out", "act:in", "act:out", "head:in", "head:out", ":out"
            ),
        },
        "another dtype: mid:out is float32 in A and bfloat16 in B",
    ),
    "parameters of another dtype": (
        "dtype",
        {
            "dtypes": lambda text: "bfloat16",
            "factor": spread(0, 2.0**-9, *PARAMETERS, *FORWARD, *BACKWARD),
        },
        "another dtype: parameters are float32 in A and bfloat16 in B",
    ),
    "inputs of another dtype": (
        "dtype",
        {
            "dtypes": lambda text: "float16" if text in {":in", "stem:in"} else "float32",
            "factor": spread(0, 2.0**-12, *FORWARD),
        },
        "another dtype: inputs are float32 in A and float16 in B",
    ),
    "gradients of another dtype": (
        "dtype",
        {
            "dtypes": lambda text: "float16" if text.endswith(".grad") else "float32",
            "factor": spread(0, 0.1, *BACKWARD),
        },
        "another dtype: head:out.grad is float32 in A and float16 in B",
    ),
    "all gradients by one factor": (
        "scaled",
        {"factor": from_step(0, 1024.0, *BACKWARD, ":grad.norm")},
        "another scale of the loss: the gradients are 1024 times as large in B",
    ),
    "other gradients from the first one on": (
        "loss",
        {"factor": spread(0, 0.3, *BACKWARD)},
        "another loss, or other targets: the first gradient differs",
    ),
    "other gradients from the middle on": (
        "backward",
        {"factor": from_step(0, 1.3, "relu:out.grad", "stem:out.grad")},
        "the backward pass differs from relu:out.grad on",
    ),
    "another norm of equal gradients": (
        "clipping",
        {"factor": from_step(0, 0.1, ":grad.norm", "*:update")},
        "gradients are accumulated or scaled differently: their norm at the end of backward differs",
    ),
    "all updates by one factor": (
        "rate",
        {"factor": both(from_step(0, 0.5, "*:update"), spread(1, 0.1, *PARAMETERS, *FORWARD))},
        "another learning rate: the updates of all 3 parameters are 0.5 times as large in B",
    ),
    "updates by many factors": (
        "optimizer",
        {"factor": spread(0, 0.9, "*:update")},
        "another optimizer, or other settings of it",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_inferred_from_what_differs(name: str) -> None:
    """Each cause has its own headline, and is found only by its own evidence."""
    code, changes, headline = CAUSES[name]
    told = verdict(**changes)

    assert (told.parted, told.cause.code, told.cause.headline) == (True, code, headline)


@pytest.mark.parametrize("name", CAUSES)
def test_the_order_of_two_runs_does_not_matter(name: str) -> None:
    """Exchanging the runs finds the same kind of cause."""
    code, changes, _ = CAUSES[name]

    assert verdict(a=story(**changes), b=story()).cause.code == code


def test_evidence_tells_what_is_equal() -> None:
    """What is said to be equal was compared."""
    told = verdict(factor=from_step(2, 2.0, "*:update"))

    assert told.cause.evidence == (
        "at step 2 parameters, forward and gradients are equal to the last bit; 2 compared steps before it are equal"
    )
    assert told.first is not None
    assert told.first.same.text == "stem.weight:update"


def test_evidence_of_one_parameter_is_a_sentence() -> None:
    """It tells that the other parameters are equal."""
    told = verdict(
        a=story(),
        b=story(factor=both(from_step(0, 1.5, "mid.weight:param"), from_step(0, 1.1, "head:out"))),
    )

    assert told.cause.evidence == "at step 0 the others are equal to the last bit"


def test_an_update_that_is_rounding_does_not_hide_a_rate() -> None:
    """A bias before a batch norm is updated by rounding alone, which has no common factor with the others."""
    a = story(factor=from_step(0, 1e-8, "mid.weight:update"))
    halved = both(
        from_step(0, 0.5, "stem.weight:update", "head.weight:update"),
        from_step(0, 1.3e-8, "mid.weight:update"),
    )
    told = verdict(a=a, b=story(factor=halved))

    assert (
        told.cause.headline
        == "another learning rate: the updates of all 2 parameters are 0.5 times as large in B"
    )
    assert told.cause.evidence.endswith("; 1 update left out, mere rounding")


@pytest.mark.parametrize(
    ("key", "headline"),
    [
        ("torch", "another version of PyTorch: 2.12.0 in A, 2.13.0 in B"),
        ("device", "another device: 2.12.0 in A, 2.13.0 in B"),
    ],
)
def test_rounding_between_versions_and_devices(key: str, headline: str) -> None:
    """Differences of rounding size are put down to what the manifests differ in."""
    a, b = (
        story(manifest={key: "2.12.0"}),
        story(manifest={key: "2.13.0"}, factor=spread(0, 20 * ULP, "mid:out")),
    )

    assert verdict(a=a, b=b).cause.headline == headline


def test_another_version_does_not_explain_what_is_not_rounding() -> None:
    """A difference beyond rounding is put down to the module, whatever the manifests say."""
    a, b = (
        story(manifest={"torch": "2.12.0"}),
        story(manifest={"torch": "2.13.0"}, factor=from_step(0, 1.1, "mid:out")),
    )

    assert verdict(a=a, b=b).cause.code == "code"


def test_products_on_a_gpu_may_be_coarser() -> None:
    """On a GPU a difference of the size of TensorFloat-32 in a product of matrices is named as such."""
    manifest = {"device": "cuda"}
    told = verdict(
        a=story(manifest=manifest),
        b=story(manifest=manifest, factor=from_step(0, 1 + 4e-4, "mid:out")),
    )

    assert told.cause.code == "products"


def test_the_same_batches_in_another_order() -> None:
    """Inputs whose sums are those of the other run, in other steps, are the same data in another order."""
    steps, order = range(8), [3, 1, 0, 2, 7, 6, 5, 4]
    a = story(steps=steps)
    sums = [row for row in _rows(a) if row["site"] in (0, 1)]
    moved = [{**row, "step": order[row["step"]]} for row in sums]
    b = Recording.build(
        a.sites, [*moved, *(row for row in _rows(a) if row["site"] > 1)], roots=a.roots
    )

    assert verdict(a=a, b=b).cause.code == "order"


def test_batches_that_one_run_left_out() -> None:
    """The same batches some steps earlier are recognised as such, from the step on in which one was left out."""
    a = story(steps=range(12))
    varied = [
        {**row, "sum": row["step"] * 3.0, "sumsq": 9e4, "max": row["step"] + 9.0}
        if row["site"] < 2
        else row
        for row in _rows(a)
    ]
    ahead = [
        {**row, "sum": row["sum"] + 3.0, "max": row["max"] + 1.0}
        if row["site"] < 2 and row["step"] >= 4
        else row
        for row in varied
    ]
    one, other = (Recording.build(a.sites, rows, roots=a.roots) for rows in (varied, ahead))
    told, back = verdict(a=one, b=other).cause, verdict(a=other, b=one).cause

    assert (
        told.headline == "the same batches, but B is 1 step ahead from step 4 on: it left some out"
    )
    assert (
        back.headline == "the same batches, but A is 1 step ahead from step 4 on: it left some out"
    )
    assert "(:in) from step 4 on" in told.evidence


def test_one_batch_that_differs_is_no_order_of_the_data() -> None:
    """Nor are a few rows of one: the steps after it have equal inputs, and that is said."""
    a = story(steps=range(12))
    rows = [
        {**row, "max": 99.0} if row["site"] < 2 and row["step"] == 4 else row for row in _rows(a)
    ]
    told = verdict(a=a, b=Recording.build(a.sites, rows, roots=a.roots)).cause

    assert (told.code, told.headline) == ("data", "other data in one batch, that of step 4")
    assert "at step 4 alone; 7 compared steps after it have equal inputs" in told.evidence
    assert "their largest value is" in told.evidence


def _rows(recording: Recording) -> list[dict[str, Any]]:
    """The rows of a recording, as they were written down."""
    names = ("step", "count", "sum", "sumsq", "min", "max", "nonzero", "nonfinite", "level")
    found = []
    for site in recording.sites:
        rows = recording.rows(site)
        found += [
            {"site": site.id, **{n: getattr(rows, n)[i].item() for n in names}}
            for i in range(len(rows))
        ]
    return found


def test_batches_of_another_size() -> None:
    """An input that holds another number of elements is another batch size."""
    a = story()
    rows = [{**row, "count": row["count"] // 2} if row["site"] < 2 else row for row in _rows(a)]
    sites = [
        {
            "site": s.site,
            "path": s.path,
            "kind": s.kind,
            "type": s.type,
            "shape": [2, 8],
            "from": list(s.sources),
            "owner": s.owner,
        }
        for s in a.sites
    ]
    told = verdict(a=a, b=Recording.build(sites, rows, roots=a.roots))

    assert told.cause.code == "batch"
    assert told.cause.headline == "inputs of another size: :in holds 32 numbers in A and 16 in B"
    assert told.cause.evidence == "first shape 4x8 in A, 2x8 in B, at step 0"


def test_a_frozen_parameter() -> None:
    """Gradients of fewer numbers are not gradients of another scale."""
    a = story()
    norm = next(i for i, site in enumerate(a.sites) if site.kind == "grad.norm")
    rows = [{**row, "count": row["count"] - 1} if row["site"] == norm else row for row in _rows(a)]
    told = verdict(a=a, b=Recording.build(a.sites, rows, roots=a.roots))

    assert told.cause.code == "trainable"
    assert told.cause.headline.startswith("fewer parameters get gradients in B")


def test_other_random_numbers() -> None:
    """A Dropout that is the first to differ drew other numbers."""
    layers = [*NET[:2], Layer("drop", "Dropout"), *NET[2:]]
    told = verdict(
        a=story(layers=layers),
        b=story(layers=layers, factor=from_step(1, 1.2, "drop:out", "mid:in")),
    )

    assert told.cause.headline == "other random numbers: drop (Dropout) is the first to differ"


def test_other_words_are_other_data() -> None:
    """An embedding that is the first to differ, with equal parameters, was given other numbers to look up."""
    layers = [Layer("words", "Embedding", (10, 8)), *NET]
    a, b = (
        _without_input(story(layers=layers, factor=f))
        for f in (from_step(0, 1.0), from_step(0, 1.2, "words:out"))
    )

    assert verdict(a=a, b=b).cause.code == "data"


def _without_input(recording: Recording) -> Recording:
    rows = [
        row
        for row in _rows(recording)
        if recording.sites[row["site"]].site not in (":in", "words:in")
    ]
    return Recording.build(recording.sites, rows, roots=recording.roots)


def test_another_loss_or_other_targets() -> None:
    """A loss that differs though what comes in is equal may have got other targets, which are not measured."""

    def run(value: float) -> Recording:
        model = story()
        site = {
            "id": len(model.sites),
            "site": "Loss:out",
            "type": "CrossEntropyLoss",
            "root": 1,
            "shape": [],
        }
        row = {"step": 0, "site": len(model.sites), "count": 1, "sum": value, "sumsq": value**2}
        roots = [*model.roots, {"name": "Loss", "prefix": "Loss"}]
        return Recording.build([*model.sites, site], [*_rows(model), row], roots=roots)

    told = verdict(a=run(2.0), b=run(2.5))

    assert (
        told.cause.headline
        == "Loss (CrossEntropyLoss) computes something else, or gets other targets"
    )


def test_another_loss_behind_the_same_outputs() -> None:
    """What backward began at belongs to no module, and is compared all the same."""

    def run(value: float) -> Recording:
        sites = [
            {"site": "fc:out", "type": "Linear"},
            {"site": "loss", "path": "loss", "kind": "loss", "root": -1, "owner": ""},
        ]
        rows = [
            {"step": 0, "site": text, "count": 1, "sum": x, "sumsq": x * x}
            for text, x in (("fc:out", 2.0), ("loss", value))
        ]
        return Recording.build(sites, rows)

    told = judge(compare(run(0.5), run(0.75)))
    assert (told.cause.code, told.cause.headline) == (
        "loss",
        "another loss, or other targets: loss is the first to differ",
    )


def test_runs_that_part_where_nothing_was_measured() -> None:
    """Parameters that are equal in one common step and differ in the next parted in between."""
    told = verdict(
        a=story(steps=[0, 10]),
        b=story(steps=[0, 10], factor=from_step(10, 1.1, *PARAMETERS, *FORWARD)),
    )

    assert (
        told.cause.headline == "they diverge after step 0, in steps that were not measured in both"
    )


def test_a_loss_that_parts_off_schedule() -> None:
    """Where only norms were measured, nothing is said of what comes before them."""
    light = frozenset({1, 2, 3})
    told = verdict(
        a=story(light=light), b=story(light=light, factor=from_step(2, 1.1, ":grad.norm"))
    )

    assert told.cause.code == "unseen"
    assert "at step 2 the parameters were not measured in both" in told.cause.evidence
    assert told.first is not None
    assert (told.first.step, told.first.same.text) == (2, ":grad.norm")


def test_runs_that_part_before_the_first_common_step() -> None:
    """Parameters that differ in a first common step in the middle of the runs tell of no seed."""
    told = verdict(
        a=story(steps=[0, 5]), b=story(steps=[1, 5], factor=from_step(0, 1.01, *PARAMETERS))
    )

    assert told.cause.code == "late"


def test_something_not_finite_on_one_side() -> None:
    """A NaN in one run alone is a difference, and its module is named."""
    told = verdict(broken=lambda text, step: text == "mid:out" and step == 3)

    assert told.cause.headline == "mid (Linear) computes something else"
    assert told.first is not None
    assert (told.first.step, told.first.statistic, told.first.apart) == (
        3,
        "nonfinite",
        float("inf"),
    )


RANKS: dict[str, tuple[Callable[[], Factor], bool, str]] = {
    "each its own data": (lambda: spread(0, 0.3, *FORWARD, *BACKWARD), False, "ranks"),
    "the same data": (lambda: from_step(0, 1.0), False, "same-data"),
    "another parameter": (
        lambda: both(spread(0, 0.3, *FORWARD), from_step(2, 1.1, "mid.weight:param")),
        True,
        "drift",
    ),
    "another update": (lambda: from_step(1, 1.1, "mid.weight:update"), True, "drift"),
    "another norm": (lambda: from_step(1, 1.1, ":grad.norm"), True, "drift"),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_differ_in_their_data_alone(name: str) -> None:
    """Ranks part if what they share differs; that their data are not shared out is said."""
    factor, parted, code = RANKS[name]
    told = judge_ranks(compare(story(), story(factor=factor())))

    assert (told.parted, told.cause.code) == (parted, code)


def test_ranks_of_which_nothing_shared_was_measured() -> None:
    """Without parameters, updates and norms there is nothing that ranks have to agree in, and that is said."""
    runs = [
        Recording.build(["fc:out"], [{"step": 0, "site": 0, "count": 1, "sumsq": v}])
        for v in (1.0, 2.0)
    ]
    told = judge_ranks(compare(*runs))

    assert (told.parted, told.cause.headline) == (
        False,
        "nothing that ranks share was measured in both",
    )
