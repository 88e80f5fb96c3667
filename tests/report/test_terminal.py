"""The report in the terminal, compared whole."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kedge.errors import NoSuchSite
from kedge.report.fitted_text import cut
from kedge.report.shown_run import ShownRun
from kedge.report.terminal import ReportExtent, console_for, render
from kedge.rules.evidence import Evidence
from kedge.rules.registry import ALL
from kedge.rules.rule import Finding, Rule
from kedge.store.reading.table import SitesInOne, StatsTable
from kedge.store.recording import Recording, Rows, SiteInfo

MANIFEST = {
    "command": ["train.py", "--name", "my run"],
    "device": "cpu",
    "torch": "2.13.0+cpu",
    "python": "3.11.7",
    "started": "2026-11-21T07:00:00+00:00",
}
END = {
    "kind": "end",
    "exit": 0,
    "steps": 120,
    "sampled": 12,
    "seconds": 12.3,
    "watching": 0.41,
    "error": None,
}
ROOTS = [{"name": "Net", "prefix": "", "parameters": 2410}]

MODULES = [
    ("features.conv", "Conv2d", [32, 8, 14, 14], 1.5, 2e-6),
    ("features.relu", "ReLU", [32, 8, 14, 14], 0.7, 3e-6),
    ("classifier", "Linear", [32, 10], 4.0, 1e-3),
    ("", "Net", [32, 10], 4.0, 1e-3),
]
STEPS = range(0, 120, 10)

BORN = Finding(
    "NAN-BORN",
    "error",
    "classifier:out",
    90,
    "classifier:out was the first to contain NaN, at step 90; its input was finite.",
    remedy=(
        "Look at the range of what goes in: log, division and sqrt leave the finite numbers at 0; "
        "clamp it, or add an epsilon."
    ),
)
DEAD = [
    Finding(
        "DEAD-CHANNEL",
        "warning",
        site,
        40,
        f"{n} of the 8 channels of {site} were never above zero.",
        remedy="Lower the rate.",
    )
    for n, site in ((3, "features.relu:out"), (2, "features.conv:out"))
]


def sites() -> list[dict[str, Any]]:
    """Describe the sites of a small network."""
    made: list[dict[str, Any]] = []
    for path, type_, shape, _, _ in MODULES:
        made += [
            {"site": f"{path}:{kind}", "path": path, "type": type_, "shape": shape}
            for kind in ("out", "out.grad")
        ]
    for kind in ("param", "update"):
        made.append(
            {
                "site": f"classifier.weight:{kind}",
                "owner": "classifier",
                "type": "Linear",
                "shape": [10, 196],
            }
        )
    return made


def row(site: str, step: int, rms: float, zero: float = 0.0) -> dict[str, Any]:
    """Describe a row of a site by its scale."""
    bad = math.isnan(rms)
    figures = {"sum": rms, "sumsq": rms**2 * 100, "min": -rms, "max": rms}
    return {
        "site": site,
        "step": step,
        "count": 100,
        **figures,
        "nonzero": 100 - int(zero * 100),
        "nonfinite": 5 * bad,
    }


def rows(broken_at: int | None = None) -> list[dict[str, Any]]:
    """Describe a run whose gradients grow; from a step on, the classifier returns NaN."""
    made = []
    for step in STEPS:
        for path, type_, _, scale, gradient in MODULES:
            bad = broken_at is not None and step >= broken_at and path in ("classifier", "")
            made.append(
                row(
                    f"{path}:out",
                    step,
                    math.nan if bad else scale,
                    0.48 if type_ == "ReLU" else 0.0,
                )
            )
            made.append(
                row(f"{path}:out.grad", step, math.nan if bad else gradient * 10 ** (step / 20))
            )
        made += [
            row("classifier.weight:param", step, 0.5),
            row("classifier.weight:update", step, 0.002),
        ]
    return made


def network(
    broken_at: int | None = None, events: Iterable[Mapping[str, Any]] = (END,)
) -> Recording:
    """Build the recording of that run."""
    return Recording.build(sites(), rows(broken_at), manifest=MANIFEST, events=events, roots=ROOTS)


def report(
    recording: Recording,
    findings: Iterable[Finding] = (),
    width: int = 100,
    extent: ReportExtent | None = None,
    rules: Sequence[Rule] | None = (),
) -> str:
    """Draw a report as text; without rules, none of them lacks anything."""
    stream = io.StringIO()
    render(
        ShownRun(recording, list(findings), rules),
        Console(file=stream, width=width, highlight=False),
        extent,
    )
    return stream.getvalue()


def test_rules_that_could_not_judge_are_named_with_the_command() -> None:
    """Without findings in place of the verdict, with findings after them; the command stays one line to copy."""
    rules = [rule for rule in ALL if rule.code in ("UPDATE-RATIO", "NEAR-OVERFLOW")]
    recording = replace(
        network(),
        manifest={
            "command": ["train.py", "--name", "a b"],
            "script": "train.py",
            "every": 10,
            "budget": None,
        },
    )

    clean, broken = (report(recording, found, width=80, rules=rules) for found in ((), [BORN]))

    assert "no findings; 1 rule could not judge: UPDATE-RATIO (12 of 20 measured" in clean
    assert "✓" not in clean
    assert "\n1 rule could not judge: UPDATE-RATIO (12 of 20 measured steps)\n" in broken
    command = "to get enough for it: kedge run --budget none --every 1 train.py --name 'a b'\n"
    assert command in clean
    assert command in broken


def text(expected: str) -> str:
    """Take the margin off an expected report."""
    return dedent(expected).lstrip("\n")


def test_a_report_of_80_columns() -> None:
    """Findings first; the table leaves out what does not fit, and no line is broken or too long."""
    drawn = report(network(broken_at=90), [BORN, *DEAD], width=80)

    assert drawn == text("""
        train.py --name 'my run'
        1 error, 2 warnings

        ✗ error   NAN-BORN  classifier:out, step 90
            classifier:out was the first to contain NaN, at step 90; its input was
            finite.
            → Look at the range of what goes in: log, division and sqrt leave the finite
            numbers at 0; clamp it, or add an epsilon.

        ! warning DEAD-CHANNEL  in 2 places
            · 3 of the 8 channels of features.relu:out were never above zero.
            · 2 of the 8 channels of features.conv:out were never above zero.
            → Lower the rate.

        cpu · torch 2.13.0+cpu · Python 3.11.7 · started 2026-11-21 07:00 UTC
        Net: 2,410 parameters · 10 sites
        120 steps, 12 measured · 12.3 s, 3.3 % of it for watching

          module             out trend           grad trend         update zero     ✗
        ! features.conv     1.50 ▄▄▄▄▄▄▄▄▄▄▄▄   0.632 ▁▂▂▃▄▄▅▅▆▇▇█       -   0%
        ! features.relu    0.700 ▄▄▄▄▄▄▄▄▄▄▄▄   0.949 ▁▂▂▃▄▄▅▅▆▇▇█       -  48%
        ✗ classifier         nan ▄▄▄▄▄▄▄▄▄✗✗✗     nan ▁▂▃▄▅▅▆▇█✗✗✗  4.0e-3   0%     3
          (Net)              nan ▄▄▄▄▄▄▄▄▄✗✗✗     nan ▁▂▃▄▅▅▆▇█✗✗✗       -   0%     3

        out, grad: root mean square of a module's output and of its gradient, at step
        110, the last measured one. trend: steps 0 to 110, each line on its own
        logarithmic scale; ✗ non-finite values, 0 only zeros. update: change of the
        parameters in one step, relative to their size. zero: share of exact zeros.
    """)
    assert max(map(len, drawn.splitlines())) <= 80


def test_a_report_of_160_columns() -> None:
    """A wide terminal shows types, shapes and sizes as well."""
    drawn = report(network(broken_at=90), [BORN, *DEAD], width=160)

    assert drawn == text("""
        train.py --name 'my run'
        1 error, 2 warnings

        ✗ error   NAN-BORN  classifier:out, step 90
            classifier:out was the first to contain NaN, at step 90; its input was finite.
            → Look at the range of what goes in: log, division and sqrt leave the finite numbers at 0; clamp it, or
            add an epsilon.

        ! warning DEAD-CHANNEL  in 2 places
            · 3 of the 8 channels of features.relu:out were never above zero.
            · 2 of the 8 channels of features.conv:out were never above zero.
            → Lower the rate.

        cpu · torch 2.13.0+cpu · Python 3.11.7 · started 2026-11-21 07:00 UTC
        Net: 2,410 parameters · 10 sites
        120 steps, 12 measured · 12.3 s, 3.3 % of it for watching

          module         type   shape      params     out trend           grad trend         update zero     ✗
        ! features.conv  Conv2d 32x8x14x14           1.50 ▄▄▄▄▄▄▄▄▄▄▄▄   0.632 ▁▂▂▃▄▄▅▅▆▇▇█       -   0%
        ! features.relu  ReLU   32x8x14x14          0.700 ▄▄▄▄▄▄▄▄▄▄▄▄   0.949 ▁▂▂▃▄▄▅▅▆▇▇█       -  48%
        ✗ classifier     Linear 32x10       1.96k     nan ▄▄▄▄▄▄▄▄▄✗✗✗     nan ▁▂▃▄▅▅▆▇█✗✗✗  4.0e-3   0%     3
          (Net)          Net    32x10                 nan ▄▄▄▄▄▄▄▄▄✗✗✗     nan ▁▂▃▄▅▅▆▇█✗✗✗       -   0%     3

        out, grad: root mean square of a module's output and of its gradient, at step 110, the last measured one.
        trend: steps 0 to 110, each line on its own logarithmic scale; ✗ non-finite values, 0 only zeros. update:
        change of the parameters in one step, relative to their size. zero: share of exact zeros.
    """)


def test_a_report_without_findings() -> None:
    """The report of a healthy run says that it is healthy, and has no column of non-finite values."""
    assert report(network(), width=100) == text("""
        train.py --name 'my run'
        ✓ no findings: 0 rules over 12 measured steps

        cpu · torch 2.13.0+cpu · Python 3.11.7 · started 2026-11-21 07:00 UTC
        Net: 2,410 parameters · 10 sites
        120 steps, 12 measured · 12.3 s, 3.3 % of it for watching

          module         type   shape      params     out trend           grad trend         update zero
          features.conv  Conv2d 32x8x14x14           1.50 ▄▄▄▄▄▄▄▄▄▄▄▄   0.632 ▁▂▂▃▄▄▅▅▆▇▇█       -   0%
          features.relu  ReLU   32x8x14x14          0.700 ▄▄▄▄▄▄▄▄▄▄▄▄   0.949 ▁▂▂▃▄▄▅▅▆▇▇█       -  48%
          classifier     Linear 32x10       1.96k    4.00 ▄▄▄▄▄▄▄▄▄▄▄▄     316 ▁▂▂▃▄▄▅▅▆▇▇█  4.0e-3   0%
          (Net)          Net    32x10                4.00 ▄▄▄▄▄▄▄▄▄▄▄▄     316 ▁▂▂▃▄▄▅▅▆▇▇█       -   0%

        out, grad: root mean square of a module's output and of its gradient, at step 110, the last measured
        one. trend: steps 0 to 110, each line on its own logarithmic scale; ✗ non-finite values, 0 only
        zeros. update: change of the parameters in one step, relative to their size. zero: share of exact
        zeros.
    """)


def test_a_recording_of_nothing() -> None:
    """A recording without sites says so instead of a table, and claims nothing about findings."""
    assert report(Recording.build()) == text("""
        a program without a name
        the recording has no end: the program is running, or was killed

        0 sites
        0 steps measured so far

        nothing was recorded: the program called no module while it was watched
    """)


def test_a_recording_whose_sites_have_no_step() -> None:
    """Where no step was finished, there is no table."""
    recording = Recording.build(sites(), manifest=MANIFEST, events=[END], roots=ROOTS)

    assert (
        report(recording).splitlines()[-1]
        == "nothing was measured: the program finished no step while it was watched"
    )


def test_a_program_that_runs_or_was_killed() -> None:
    """Without an end the report says that there is none, and how far it got."""
    drawn = report(network(events=())).splitlines()

    assert (
        drawn[1]
        == "the recording has no end: the program is running, or was killed; the last measured step is 110"
    )
    assert "12 steps measured so far" in drawn


def test_a_recording_that_was_cut_off() -> None:
    """A torn last step is mentioned."""
    whole = network(events=())
    torn = Recording(
        whole.path,
        whole.manifest,
        whole.roots,
        whole.sites,
        whole.events,
        truncated=True,
        table=whole.table,
    )

    assert report(torn).splitlines()[1] == "the last step was only partly written, and is left out"


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (
            {"exit": 1, "error": "ValueError: no [data]"},
            "ended with exit status 1: ValueError: no [data]",
        ),
        ({"exit": 3, "error": None}, "ended with exit status 3"),
    ],
)
def test_a_program_that_failed(end: dict[str, Any], line: str) -> None:
    """How the program ended is in the head, word for word."""
    assert report(network(events=[END | end])).splitlines()[1] == line


def test_an_odd_head_is_shown_as_it_is() -> None:
    """What a manifest leaves out or words differently does not break the report."""
    manifest = {"script": "a[b].py", "started": "yesterday", "rank": 1, "world": 4}

    lines = report(Recording.build(manifest=manifest)).splitlines()

    assert lines[0] == "a[b].py"
    assert lines[lines.index("") + 1 :][:2] == ["started yesterday · rank 1 of 4", "0 sites"]


def test_many_findings_of_one_rule_are_counted() -> None:
    """Five of a kind are shown, or all of them where all is asked for."""
    many = [
        Finding("DEAD-CHANNEL", "info", f"s{i}:out", -1, f"s{i}:out is dead.", remedy="Wake it.")
        for i in range(7)
    ]

    short = report(network(), many).split("\n\n")
    full = report(network(), many, extent=ReportExtent(most=None, folds=False)).split("\n\n")

    assert short[0].splitlines()[-1] == "7 info"
    assert short[1].splitlines() == [
        "i info    DEAD-CHANNEL  in 7 places",
        *(f"    · s{i}:out is dead." for i in range(5)),
        "    → Wake it.",
        "    and 2 more: kedge check lists them",
    ]
    assert len(full[1].splitlines()) == 1 + 7 + 1


def deep(count: int, stem: str = "") -> Recording:
    """Build a recording of many modules."""
    names = [f"{stem}{i}" for i in range(count)]
    return Recording.build(
        [f"{name}:out" for name in names], [row(f"{name}:out", 0, 1.0) for name in names]
    )


def test_a_long_model_is_cut_and_says_so() -> None:
    """The first modules and those with findings are shown; what is left out is counted where it is missing."""
    finding = Finding("ODD", "warning", "n70:out", 0, "n70:out is odd.")

    drawn = report(deep(100, "n"), [finding], extent=ReportExtent(most=4)).splitlines()

    table = drawn[drawn.index("! warning ODD  n70:out, step 0") + 6 : -4]
    assert [line.split()[:3] for line in table] == [
        ["module", "out", "trend"],
        ["n0", "1.00", "▄"],
        ["n1", "1.00", "▄"],
        ["n2", "1.00", "▄"],
        ["…", "67", "modules"],
        ["!", "n70", "1.00"],
        ["…", "29", "modules"],
        [],
        ["4", "of", "100"],
    ]
    assert (
        table[-1]
        == "4 of 100 modules shown; --all shows every module, --sites SELECTOR the ones you choose"
    )


def blocks(broken: frozenset[str] = frozenset()) -> Recording:
    """Build a recording of a network of 48 blocks, whose scale grows; some outputs are not finite at the end."""
    made = [(f"h.{i}.{part}", 1.0 + i / 48) for i in range(48) for part in ("attn", "mlp")]
    made = [("embed", 3.0), *made[:-1], ("h.47.mlp", 500.0), ("head", 4.0)]
    places = [
        {"site": f"{path}:out", "type": path.split(".")[-1], "shape": [8, 4]} for path, _ in made
    ]
    figures = [
        row(f"{path}:out", step, math.nan if path in broken and step else scale)
        for path, scale in made
        for step in (0, 1)
    ]
    return Recording.build(places, figures)


def test_blocks_that_are_alike_share_a_line() -> None:
    """The line has the least and the largest figure; a block with a finding, or far from the others, has its own."""
    finding = Finding("ODD", "warning", "h.17.attn:out", 0, "it is odd.")

    drawn = report(blocks(), [finding], extent=ReportExtent(most=40)).splitlines()

    table = [
        line.split()[:-2]
        for line in drawn[drawn.index("! warning ODD  h.17.attn:out, step 0") + 7 :]
    ]
    assert table[: table.index([])] == [
        ["embed", "embed", "8x4", "3.00"],
        ["h.0-16,18-47.attn", "attn", "8x4", "1.0..2.0"],
        ["!", "h.17.attn", "attn", "8x4", "1.35"],
        ["h.0-46.mlp", "mlp", "8x4", "1.0..2.0"],
        ["h.47.mlp", "mlp", "8x4", "500"],
        ["head", "head", "8x4", "4.00"],
    ]
    assert (
        "98 modules in 6 lines, with similar blocks in one; --all shows every module"
        in " ".join(drawn)
    )
    assert (
        "h.17, h.47 are apart from similar blocks; the furthest: h.47.mlp has out 500, the others 1.0..2.0"
        in drawn
    )
    assert (
        "h.0-16,18-47.attn: all modules with these numbers; 1.2..3.4 is the smallest"
        in " ".join(drawn)
    )


def test_blocks_without_an_exception_name_none() -> None:
    """A module of another shape or class is no such exception, though its path differs only in numbers."""
    places = [
        {"site": f"h.{i}.fc:out", "type": "Linear", "shape": [8, 4 if i else 2]} for i in range(48)
    ]

    drawn = report(Recording.build(places, [row(place["site"], 0, 1.0) for place in places]))

    assert "48 modules in 2 lines" in drawn
    assert "apart from similar blocks" not in drawn


@pytest.mark.parametrize(("steps", "shown"), [(60, True), (8, False), (None, False)])
def test_curves_that_end_long_before_the_run_say_so(steps: int | None, shown: bool) -> None:
    """Their last value is not that of the run: the budget may leave out the rest."""
    site = {"site": "loss", "path": "loss", "kind": "loss", "root": -1, "shape": []}
    events = [] if steps is None else [{**END, "steps": steps}]
    made = Recording.build([site], [row("loss", step, 3.0) for step in range(8)], events=events)

    assert ("no values after step 7 of 60" in report(made)) is shown


def test_curves_that_the_budget_ended_say_so() -> None:
    """A reader would look for the cause in the program."""
    site = {"site": "loss", "path": "loss", "kind": "loss", "root": -1, "shape": []}
    end = {**END, "steps": 60, "levels": {"measured": 2, "guarded": 6, "skipped": 52}}
    made = Recording.build([site], [row("loss", step, 3.0) for step in range(8)], events=[end])

    assert "no values after step 7 of 60: the budget left out 52 steps" in report(made)


def test_a_parameter_that_no_optimizer_held_marks_its_module() -> None:
    """It may have no site of its own."""
    events = [
        END,
        {"kind": "not-optimized", "root": 0, "unheld": ["fc.weight"], "graded": ["fc.weight"]},
    ]
    made = Recording.build(
        ["fc:out", "head:out"], [row("fc:out", 0, 1.0), row("head:out", 0, 1.0)], events=events
    )
    finding = Finding(
        "NOT-OPTIMIZED",
        "warning",
        "fc.weight:param",
        -1,
        "fc.weight is in no optimizer.",
        Evidence(),
        0.9,
    )

    drawn = report(made, [finding]).splitlines()

    assert [line.split()[:2] for line in drawn if "fc  " in line] == [["!", "fc"]]


def test_blocks_with_values_that_are_not_finite_do_not_hide_among_the_others() -> None:
    """They fold among themselves, and the figure says so."""
    drawn = report(
        blocks(frozenset(f"h.{i}.mlp" for i in range(30, 47))), extent=ReportExtent(most=40)
    )

    lines = [
        line.split()[:4] for line in drawn.splitlines() if ".mlp" in line and "apart" not in line
    ]
    assert lines == [
        ["h.0-29.mlp", "mlp", "8x4", "1.0..1.6"],
        ["h.30-46.mlp", "mlp", "8x4", "nan"],
        ["h.47.mlp", "mlp", "8x4", "500"],
    ]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_folded_table_fits(width: int) -> None:
    """Spreads take more room than figures; what does not fit is left out."""
    assert max(map(len, report(blocks(), width=width).splitlines())) <= width


@pytest.mark.parametrize(("width", "told"), [(80, True), (160, False)])
def test_columns_without_room_are_named(width: int, told: bool) -> None:
    """The legend explains them, so a reader would look for them."""
    paths = [f"transformer.h.{i}.attn.resid_dropout" for i in range(48)]
    kinds = ("out", "out.grad", "param", "update")
    places = [
        {"site": f"{path}.weight:{kind}", "owner": path}
        if kind in ("param", "update")
        else {"site": f"{path}:{kind}"}
        for path in paths
        for kind in kinds
    ]
    rows = [
        row(place["site"], step, 1.23e-3 + 1e-5 * i)
        for i, place in enumerate(places)
        for step in range(2)
    ]

    drawn = " ".join(report(Recording.build(places, rows), width=width).split())

    assert ("A wider terminal shows zero." in drawn) is told


def test_all_or_chosen_modules_can_be_shown() -> None:
    """Without a limit every module has its line; with a glob only those that match."""
    assert (
        len(
            re.findall(
                r"(?m)^  \d+ ", report(deep(100), extent=ReportExtent(most=None, folds=False))
            )
        )
        == 100
    )
    assert re.findall(r"(?m)^  (\d+) ", report(deep(100), extent=ReportExtent(sites="1?,7"))) == [
        "7",
        *map(str, range(10, 20)),
    ]


def test_a_glob_without_a_match_draws_nothing() -> None:
    """The error comes before anything is drawn."""
    stream = io.StringIO()

    with pytest.raises(NoSuchSite):
        render(ShownRun(deep(3), []), Console(file=stream), ReportExtent(sites="x"))
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("encoder.stages.1.layers.0-1.layer.0.conv", 30, "enco…1.layers.0-1.layer.0.conv"),
        ("encoder.stages.1.layers.0-1.layer.0.conv", 20, "e…1…0-1.layer.0.conv"),
        ("model.h.0,2,…,98.mlp.c_fc", 22, "mo…h.0,2,…,98.mlp.c_fc"),
        ("h.17.attn.resid_dropout:out.grad", 27, "h…17…resid_dropout:out.grad"),
        ("rms of model.h.17.attn.c_proj", 24, "rms of …h.17.attn.c_proj"),
        ("transformer.h.31.attn.resid_dropout", 16, "…31…esid_dropout"),
        ("transformer.h.0-30,32-47.attn.resid_dropout", 16, "tran…sid_dropout"),
        ("GPT2LMHeadModel", 10, "GPT2…Model"),
        ("h.17.normalization", 8, "h.17…ion"),
    ],
)
def test_a_cut_name_keeps_the_numbers_of_its_blocks(name: str, width: int, shown: str) -> None:
    """Its words go from the left; else it is cut in its middle, never at its end."""
    assert cut(name, width) == shown


def test_a_block_of_only_zeros_in_a_step_unfolds() -> None:
    """It is not like the others, though its newest figures are."""
    names = [f"h.{i}" for i in range(48)]
    figures = [
        row(f"{name}:out", step, 0.0 if name == "h.5" and not step else 1.0)
        for name in names
        for step in (0, 1)
    ]

    drawn = report(Recording.build([f"{name}:out" for name in names], figures))

    assert "h.0-4,6-47 " in drawn
    assert re.search(r"h\.5 +1\.00 0", drawn)


def test_chosen_blocks_fold_too() -> None:
    """A filter of many modules has a line for those that are alike, unless all are asked for."""
    assert "h.0-46.mlp" in report(blocks(), extent=ReportExtent("mlp", None))
    assert "h.3.mlp" in report(blocks(), extent=ReportExtent("mlp", None, folds=False))


def test_a_long_path_is_cut_in_its_middle() -> None:
    """The last segments of a path tell more than the first, and the first are not lost."""
    path = ".".join(f"block{i}" for i in range(30)) + ".attention.out"
    recording = Recording.build([f"{path}:out"], [row(f"{path}:out", 0, 1.0)])

    line = next(line for line in report(recording, width=80).splitlines() if "attention" in line)

    assert line.startswith("  block…block")
    assert line.split()[0].endswith("block29.attention.out")
    assert len(line) <= 80


@pytest.mark.parametrize("width", [80, 81, 100, 119, 120, 160, 200])
@pytest.mark.parametrize("steps", [1, 12, 500])
def test_no_line_is_wider_than_the_terminal(width: int, steps: int) -> None:
    """At every width the table fits, and its columns are aligned."""
    made = [row(f"{site['site']}", step, 1.0) for step in range(steps) for site in sites()]

    drawn = report(Recording.build(sites(), made, roots=ROOTS), width=width).splitlines()

    assert max(map(len, drawn)) <= width
    table = [line for line in drawn if " ▄" in line]
    assert len(table) == 4
    assert len({line.index("▄") for line in table}) == 1
    head = next(line for line in drawn if line.startswith("  module"))
    assert head.index("trend") == table[0].index("▄")


def test_a_file_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal the report is 100 columns wide, without colours."""
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    console = console_for(stream)

    render(ShownRun(network(90), [BORN]), console)

    assert console.width == 100
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(("columns", "width"), [("40", 80), ("140", 140), ("400", 200)])
def test_the_width_can_be_given(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    """``COLUMNS`` is honoured between 80 and 200."""
    monkeypatch.setenv("COLUMNS", columns)

    assert console_for(io.StringIO()).width == width


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``NO_COLOR`` a terminal gets no colours; without it, findings have theirs."""
    coloured = []
    for value in ("", "1"):
        monkeypatch.delenv("CI", raising=False)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", value)
        monkeypatch.setenv("TERM", "xterm-256color")
        stream = io.StringIO()
        render(ShownRun(network(90), [BORN]), console_for(stream))
        coloured.append(bool(re.search(r"\x1b\[[0-9;]*3[0-7]", stream.getvalue())))

    assert coloured == [True, False]


@pytest.mark.parametrize(
    ("ci", "forced", "colours"), [("", "", True), ("1", "", False), ("1", "1", True)]
)
def test_in_ci_there_are_no_colours_unless_they_are_forced(
    monkeypatch: pytest.MonkeyPatch, ci: str, forced: str, colours: bool
) -> None:
    """A log of ``CI`` may pass for a terminal; ``FORCE_COLOR`` says that it shows colours."""
    for name, value in (("CI", ci), ("FORCE_COLOR", forced), ("NO_COLOR", "")):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()

    render(ShownRun(network(90), [BORN]), console_for(stream))

    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]", stream.getvalue())) == colours


def test_what_broke_after_the_last_full_step_is_said_to_have() -> None:
    """A value from another step than the legend names is marked as such."""
    late = {**row("classifier:out", 115, math.nan), "level": 1}
    broken = Recording.build(
        sites(), [*rows(), late], manifest=MANIFEST, events=(END,), roots=ROOTS
    )
    legends = [" ".join(report(recording).split()) for recording in (broken, network(90))]

    assert (
        "at step 110, the last measured one; nan, inf: non-finite in a later step. trend"
        in legends[0]
    )
    assert "at step 110, the last measured one. trend" in legends[1]


def test_a_large_recording_is_drawn_with_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 sites each is gathered once, and ten times the steps cost no more calls in Python."""
    gathered: list[int] = []
    of = SitesInOne.of

    def counted(self: SitesInOne, site: int) -> Rows:
        gathered.append(site)
        return of(self, site)

    monkeypatch.setattr(SitesInOne, "of", counted)
    assert (
        len(
            re.findall(r"▄+", report(_wide(steps=100), extent=ReportExtent(most=None, folds=False)))
        )
        == 500
    )
    assert gathered
    assert len(gathered) == len(set(gathered))
    few, many = (
        _calls(partial(report, _wide(steps), extent=ReportExtent(most=None, folds=False)))
        for steps in (100, 1000)
    )
    assert many < 1.1 * few


def _calls(work: Callable[[], object]) -> int:
    """Count the calls of functions, those of C included, that a piece of work makes."""
    count = 0

    def heard(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def _wide(steps: int) -> Recording:
    """Make a recording of 1,000 sites."""
    kinds = ("out", "out.grad", "param", "update")
    infos = [_info(i, f"h.{i % 250}", kinds[i // 250]) for i in range(1000)]
    count = 1000 * steps
    columns: dict[str, Any] = {
        "step": np.repeat(np.arange(steps), 1000),
        "site": np.tile(np.arange(1000, dtype=np.int32), steps),
        "calls": np.ones(count, np.int32),
        "count": np.full(count, 64),
        "level": np.full(count, 2, np.int8),
        "active": np.zeros(0, np.uint8),
        "active.offsets": np.zeros(count + 1, np.int64),
    }
    columns |= {name: np.full(count, 0.5) for name in ("sum", "sumsq", "min", "max")}
    columns |= {
        "nonzero": np.full(count, 64),
        **{name: np.zeros(count, np.int64) for name in ("nonfinite", "nan")},
    }
    return Recording(
        Path("big.kedge"), {}, (), tuple(infos), (END,), truncated=False, table=StatsTable(columns)
    )


def _info(number: int, path: str, kind: str) -> SiteInfo:
    place = path if kind.startswith("out") else f"{path}.weight"
    return SiteInfo(
        number, f"{place}:{kind}", place, kind, "Linear", 0, (8, 8), "float32", None, (), path, None
    )
