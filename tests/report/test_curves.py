"""The losses and the norms of gradients, as the reports draw them."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import kedge
from kedge.report.curves import curves_of, scale_series
from kedge.report.page.document import condense
from kedge.report.shown_run import ShownRun
from kedge.report.terminal import render
from kedge.store.events import event_from
from kedge.store.recording import Recording

LOSS = {
    "site": "loss", "path": "loss", "kind": "loss", "root": -1, "shape": [],
    "source": {"file": "train.py", "line": 7, "function": "fit", "text": "loss.backward()"},
}  # fmt: skip
OTHER = {**LOSS, "site": "loss_2", "path": "loss_2", "source": {**LOSS["source"], "line": 9}}


def recorded(values: list[float], sites: tuple[dict[str, Any] | str, ...] = (LOSS,)) -> Recording:
    """A recording whose sites all have these values."""
    names = [site if isinstance(site, str) else site["site"] for site in sites]
    rows = [
        {
            "step": i,
            "site": n,
            "count": 1,
            "sum": v,
            "sumsq": v * v,
            "nonfinite": int(not math.isfinite(v)),
        }
        for i, v in enumerate(values)
        for n in names
    ]
    return Recording.build(sites, rows, roots=[{"name": "Net"}])


def test_a_loss_is_what_backward_began_at() -> None:
    """Its label says where, and its name where there are several; what a root returns is then no loss of its own."""
    (curve,) = curves_of(recorded([3.0, 2.0, 1.0], (LOSS, ":out")))
    assert (curve.kind, curve.label, curve.values.tolist()) == (
        "loss",
        "backward at train.py:7",
        [3.0, 2.0, 1.0],
    )
    labels = [curve.label for curve in curves_of(recorded([1.0], (LOSS, OTHER)))]
    assert labels == ["loss, backward at train.py:7", "loss_2, backward at train.py:9"]


def test_without_a_backward_pass_a_root_that_returns_one_number_gives_the_loss() -> None:
    """As recordings of programs that only run forward have it."""
    (curve,) = curves_of(recorded([3.0, 2.0], (":out",)))
    assert (curve.kind, curve.label) == ("loss", "Net (:out)")


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([100.0, 10.0, 1.0], "█▅▁"),  # logarithmic
        ([1.0, 0.0, -1.0], "█▅▁"),  # linear
        ([-1.0, -1.0], "▄▄"),
        ([2.0, math.nan, math.inf], "▄✗✗"),
        ([math.nan], "✗"),
        ([], ""),
    ],
)
def test_a_curve_is_drawn_in_blocks(values: list[float], drawn: str) -> None:
    """On a linear scale where it is negative somewhere."""
    curves = list(curves_of(recorded(values)))
    assert curves[0].drawn(10).plain == drawn


def test_losses_and_norms_stand_above_the_table() -> None:
    """From the first value to the last, each on one line; a path that is too long is cut in its middle."""
    stream = io.StringIO()
    deep = {**LOSS, "source": {**LOSS["source"], "file": "a/" * 60 + "train.py"}}
    render(
        ShownRun(recorded([2.5, 0.25], (deep, ":grad.norm", "fc:out")), []),
        Console(file=stream, width=80),
    )
    lines = [line for line in stream.getvalue().splitlines() if "→" in line]
    assert lines[0].startswith("  loss             2.50 → 0.250   █▁  backward…")
    assert lines[0].endswith("a/train.py:7")
    assert lines[1] == "  gradient norm    2.50 → 0.250   █▁  all gradients of Net"
    assert max(map(len, lines)) <= 80


def test_what_a_terminal_would_act_on_is_written_out() -> None:
    """In the name of the program's file, and of a model."""
    odd = {**LOSS, "source": {**LOSS["source"], "file": "a\x1b[31m\nb.py"}}
    (curve,) = curves_of(recorded([1.0], (odd,)))
    assert curve.label == r"backward at a\x1b[31m\nb.py:7"


def test_the_page_draws_the_loss_of_a_program_that_computes_it_by_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most programs do; no module returns it."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.watch("run.kedge"):
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(torch.randn(8, 4)), torch.randint(0, 3, (8,))
            ).backward()
            optimizer.step()
    document = condense(ShownRun(Recording.open("run.kedge"), [], ())).described
    assert [curve["kind"] for curve in document["curves"]] == ["loss", "norm", "rate"]
    assert document["curves"][0]["points"] == 20
    assert all(module["path"] != "loss" for module in document["modules"])


@pytest.mark.parametrize(
    ("values", "drawn", "last"), [([2.0, -1.0, -2.0], "█▃▁", -2.0), ([1.0, 100.0], "▁█", 100.0)]
)
def test_a_module_that_returns_a_negative_number_is_drawn_by_its_value(
    values: list[float], drawn: str, last: float
) -> None:
    """As a criterion does: its curve rises where the loss rises."""
    made = recorded(values, (":out",))
    series = scale_series(made, made.site(":out"))

    assert series.drawn(10, "").plain == drawn
    assert series.last == last


def rated(events: list[dict[str, Any]], steps: list[int]) -> list[Any]:
    """The learning rates that are drawn of a recording with these measured steps."""
    rows = [{"site": ":out", "step": step, "count": 4, "sumsq": 4.0} for step in steps]
    roots = [{"name": "Net"}, {"name": "Net", "prefix": "other"}]
    made = Recording.build([":out"], rows, events=events, roots=roots)
    curves = [curve for curve in curves_of(made) if curve.kind == "rate"]
    return [(curve.name, curve.steps.tolist(), curve.values.tolist()) for curve in curves]


def rates(step: int, *of_groups: float | None, optimizer: int = 0, **more: Any) -> dict[str, Any]:
    """The event of new learning rates."""
    return {
        "kind": "learning-rates", "step": step, "optimizer": optimizer, "rates": [*of_groups], **more
    }  # fmt: skip


def test_each_group_has_its_learning_rate_over_the_steps() -> None:
    """A rate holds from the measured step in which it was seen; groups with the same rates share a curve."""
    events = [rates(0, 0.1, 0.2, 0.1), rates(20, 0.01, 0.2, 0.01)]

    assert rated(events, [0, 10, 20, 30]) == [
        ("optimizer 0, groups 0, 2", [0, 10, 20, 30], [0.1, 0.1, 0.01, 0.01]),
        ("optimizer 0, group 1", [0, 10, 20, 30], [0.2] * 4),
    ]


def test_groups_have_the_names_that_the_program_gives_them() -> None:
    """And one without a name has its number; what is not known is no value."""
    events = [rates(10, 0.1, 0.2, None, names=["head", None, "tail"])]

    assert rated(events, [0, 10]) == [
        ("optimizer 0, head", [10], [0.1]),
        ("optimizer 0, group 1", [10], [0.2]),
    ]


def test_optimizers_of_one_type_are_told_apart_by_their_models() -> None:
    """As those of two networks that play against each other, also where both have one name."""
    known = [
        {"index": number, "type": "Adam", "roots": [number], "rates": [0.1]} for number in (0, 1)
    ]
    events = [
        rates(0, 0.1),
        rates(0, 0.2, optimizer=1),
        {"kind": "optimizers", "optimizers": known},
    ]

    assert [name for name, *_ in rated(events, [0])] == ["Adam of 1st Net", "Adam of 2nd Net"]


def test_norms_of_models_with_one_name_are_told_apart() -> None:
    """Two models of one class are not both "Net"."""
    sites = [
        {"site": f"{path}:grad.norm", "kind": "grad.norm", "root": root}
        for root, path in enumerate(("", "other"))
    ]
    rows = [{"site": site["site"], "step": 0, "count": 4, "sumsq": 4.0} for site in sites]
    roots = [{"name": "Net"}, {"name": "Net", "prefix": "other"}]

    labels = [curve.label for curve in curves_of(Recording.build(sites, rows, roots=roots))]
    assert labels == ["all gradients of 1st Net", "all gradients of 2nd Net"]


def test_the_rates_of_a_schedule_are_recorded_with_the_names_of_groups(tmp_path: Path) -> None:
    """Of each measured step, as the optimizer stepped with them."""
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "name": "decayed"}, {"params": [model.bias], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with kedge.watch(tmp_path / "run.kedge", every=1, budget=None) as run:
        run.tell = None
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
    curves = curves_of(Recording.open(tmp_path / "run.kedge"))

    assert [(curve.name, curve.values.tolist()) for curve in curves if curve.kind == "rate"] == [
        ("SGD, decayed", [0.5, 0.5, 0.25, 0.25]),
        ("SGD, group 1", [1.0, 1.0, 0.5, 0.5]),
    ]


def logged_in(recording: Recording) -> Recording:
    """Return a recording whose program has logged an accuracy and, once, a NaN."""
    events = [
        {"kind": "logged", "name": "val/accuracy", "steps": [0, 2], "values": [0.25, 0.5]},
        {"kind": "logged", "name": "val/accuracy", "steps": [2, 3], "values": [0.75, "nan"]},
        {"kind": "logged", "name": "other rank", "steps": [0], "values": [1], "rank": 1},
    ]
    return replace(recording, events=tuple(map(event_from, events)))


def test_what_a_program_logs_is_a_curve() -> None:
    """Under its name, on a linear scale, after the watch's own curves; the later of two values of a step counts."""
    *_, curve = curves_of(logged_in(recorded([3.0, 2.0])))
    assert (curve.kind, curve.title, curve.label) == (
        "logged",
        "val/accuracy",
        "logged by the program",
    )
    assert curve.steps.tolist() == [0, 2, 3]
    assert curve.values[:2].tolist() == [0.25, 0.75]
    assert curve.bad.tolist() == [False, False, True]


def test_what_a_program_logs_is_in_the_report_and_the_page() -> None:
    """In a program without a loss, too; it is no loss."""
    shown_run = ShownRun(logged_in(recorded([])), (), ())
    file = io.StringIO()
    render(shown_run, Console(file=file, width=100))
    assert "val/accuracy    0.250 → nan" in file.getvalue()
    assert shown_run.losses == ()
    assert shown_run.early == ""
    *_, described = condense(shown_run).described["curves"]
    assert (described["title"], described["newest"]) == ("val/accuracy", [3, "nan"])
