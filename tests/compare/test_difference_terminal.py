"""The difference of two runs in the terminal, compared whole."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent
from typing import Any
from zlib import crc32

import pytest
from rich.console import Console

from kedge.compare.comparison import compare
from kedge.compare.verdict import judge
from kedge.report.compare.head import Names
from kedge.report.compare.terminal import render
from kedge.store.recording import Recording
from tests.compare.operations import GELU
from tests.compare.stories import NET, Layer, from_step, story

A = {"command": ["train.py", "--lr", "0.1"], "torch": "2.13.0", "device": "cpu"}
B = {"command": ["train.py", "--lr", "0.2", "--fast"], "torch": "2.13.0", "device": "cuda"}


def drawn(
    a: Recording, b: Recording, width: int = 100, tolerance: float = 0.0, **options: Any
) -> str:
    """Draw the difference of two runs."""
    found, stream = compare(a, b, tolerance), io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    render(found, judge(found), Names("a.kedge", "other.kedge"), console, **options)
    return stream.getvalue()


def lines(a: Recording, b: Recording, **options: Any) -> list[str]:
    """Draw the difference of two runs, as lines."""
    return drawn(a, b, **options).splitlines()


def later(
    first: Callable[[str, int], float], second: Callable[[str, int], float]
) -> Callable[[str, int], float]:
    """Multiply by both."""
    return lambda text, step: first(text, step) * second(text, step)


def test_another_learning_rate() -> None:
    """Why, where and by how much stand above; below how the difference grows, and where each module parts."""
    factor = later(
        from_step(1, 2.0, "*:update"), from_step(2, 1.01, "*.weight:param", "*:out", "*:in")
    )
    text = drawn(
        story(manifest=A, steps=range(12)), story(manifest=B, steps=range(12), factor=factor)
    )

    assert text == dedent("""\
        A  a.kedge      train.py --lr 0.1
        B  other.kedge  train.py --lr 0.2 --fast
           command: --lr 0.1 → --lr 0.2 --fast
           device: cpu → cuda

        ✗ another learning rate: the updates of all 3 parameters are 2 times as large in B
          first difference: step 1, stem.weight:update: rms 0.8956 in A, 1.791 in B, B is 2.00 times A
          at step 1 parameters, forward and gradients are equal to the last bit; 1 compared step before it
          is equal

                    forward                  backward
        step 0      ························ ························
        step 1      ························ ████····████····████····
        step 2      ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆ ████····████····████····
        step 4      ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆ ████····████····████····
        step 6      ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆ ████····████····████····
        step 8      ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆ ████····████····████····
        step 11     ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆ ████····████····████····
        · equal, ▁ under 1e-7 apart, each higher block ten times more, █ over 0.1

        module           step first in                 A        B    apart   at end steps
        stem                1 weight:update rms    0.896     1.79    0.500    0.500 ·███████████
        mid                 1 weight:update rms     1.57     3.13    0.500    0.500 ·███████████
        head                1 weight:update rms    0.533     1.07    0.500    0.500 ·███████████
        (Net)               2 in rms                1.75     1.77   9.9e-3   9.9e-3 ··▆▆▆▆▆▆▆▆▆▆
        relu                2 in rms                1.00     1.01   9.9e-3   9.9e-3 ··▆▆▆▆▆▆▆▆▆▆
        act                 2 in rms               0.575    0.581   9.9e-3   9.9e-3 ··▆▆▆▆▆▆▆▆▆▆
        no module is equal in all steps

        27 sites of 6 modules aligned by name; 12 steps measured in both (0 to 11)
    """)


def test_the_operation_of_second_runs() -> None:
    """It stands below the cause, with its line in either program."""
    found, stream = compare(story(), story(factor=from_step(2, 2.0, "mid:in"))), io.StringIO()
    verdict = replace(judge(found), operation=GELU)
    console = Console(file=stream, width=120, highlight=False)
    render(found, verdict, Names("a.kedge", "b.kedge"), console)

    expected = dedent("""\
          operation: gelu at model.py:41 gets other arguments: approximate is not given in A, 'tanh' in B
          A  model.py:41: gelu  h = F.gelu(h)
          B  model.py:41: gelu  h = F.gelu(h, approximate='tanh')
          it gets equal inputs in both, and its result is not equal
          the second runs have written: net.pt
    """)
    assert expected in dedent(stream.getvalue()).replace("\n  ", "\n")


def test_equal_runs() -> None:
    """Equal runs take five lines."""
    assert drawn(story(), story()) == dedent("""\
        A  a.kedge
        B  other.kedge

        ✓ no difference
          108 values of 27 sites in 4 steps are equal to the last bit

        27 sites of 6 modules aligned by name; 4 steps measured in both (0 to 3)
    """)


def test_what_could_not_be_aligned_is_said() -> None:
    """Other names, other types, and what only one run has, are listed below."""
    layers = [
        NET[0],
        replace(NET[1], type="GELU"),
        replace(NET[2], path="dense", key="mid"),
        Layer("drop", "Dropout"),
        *NET[3:],
    ]
    text = lines(story(layers=[*NET, Layer("tail", "LSTM", (9, 9), (4, 9))]), story(layers=layers))

    assert text[-6:] == [
        "27 sites of 6 modules aligned 4 by name, 1 by structure, 1 as changed; 4 steps measured in both (0",
        "to 3)",
        "  mid is dense in B: 1 module",
        "  changed: relu is ReLU in A, GELU in B",
        "  only in A: tail (LSTM)",
        "  only in B: drop (Dropout)",
    ]


def test_rounding_is_described_in_ulps() -> None:
    """A small difference is given with as many digits as tell the two apart, relative, and in ulps."""
    text = lines(story(), story(factor=from_step(1, 1 + 2.0**-20, "mid:out")))

    assert text[3] == "✗ rounding: the same arithmetic in a different order"
    assert text[4].startswith("  first difference: step 1, mid:out: ")
    assert " ".join(text[4:6]).endswith("9.5e-7 apart, 8.00 ulp of   float32")


def test_only_the_first_modules_are_shown() -> None:
    """The table is short; how many more part, and how many never do, is said."""
    layers = [Layer(f"fc{i}", "Linear") for i in range(20)]
    factor = from_step(1, 1.5, *(f"fc{i}:out" for i in range(3, 20)))
    short, whole = (
        lines(story(layers=layers), story(layers=layers, factor=factor), **o)
        for o in ({}, {"most": None})
    )

    assert (
        "5 modules more differ: --all shows every one; 4 modules are equal to the last bit in all steps"
        in short
    )
    assert len(whole) == len(short) + 5
    assert "4 modules are equal to the last bit in all steps" in whole


def test_few_steps_in_full_are_said() -> None:
    """Where runs measured other steps, it is said how many are common in full and how to have more."""
    a, b = (
        story(steps=range(6), light=frozenset({1, 2, 3, 4})),
        story(steps=range(6), light=frozenset({1, 2, 4, 5})),
    )

    assert drawn(a, b).endswith(
        "6 steps measured in both (0 to 5), 1 of them in full; to\ncompare every step, record both with --every 1 --budget none\n"
    )


@pytest.mark.parametrize("steps", [1, 5, 90])
@pytest.mark.parametrize("depth", [1, 60])
def test_every_line_fits(steps: int, depth: int) -> None:
    """No line is wider than the terminal, however deep the model and long the run; none ends in spaces."""
    layers = [
        Layer(f"encoder.layers.{i}.attention.projection", "Linear", (8, 8)) for i in range(depth)
    ]
    a, b = (
        story(layers=layers, steps=range(steps), factor=f)
        for f in (from_step(0, 1.0), from_step(0, 1.1, "*:out"))
    )

    for width in (80, 100, 140, 200):
        text = lines(a, b, width=width)
        assert max(map(len, text)) <= width
        assert [line for line in text if line != line.rstrip()] == []


def test_something_not_finite_is_a_cross() -> None:
    """Infinite distances are crosses, and the table says how many elements."""
    text = lines(story(), story(broken=lambda text, step: text == "mid:out" and step >= 2))

    assert "nonfinite 0 in A, 1 in B, one of them is not" in text[4]
    assert any(line.startswith("step 2      ········✗✗✗✗············") for line in text)
    assert any(line.endswith("█ over 0.1, ✗ not finite") for line in text)


def test_a_tolerance_hides_what_it_allows() -> None:
    """What is within the tolerance is drawn as equal."""
    factor = later(from_step(0, 1.01, "*:in"), from_step(2, 1.5, "act:out"))
    text = lines(story(), story(factor=factor), tolerance=0.05)

    assert "step 1      ························ ························" in text
    assert "5 modules are equal within the tolerance in all steps" in text


@pytest.mark.parametrize("kind", ["loss", "param"])
def test_runs_that_share_no_module_have_neither_map_nor_table(kind: str) -> None:
    """Where only losses or parameters can be compared, the verdict stands alone."""
    sites = [
        {
            "id": 0,
            "site": f"a:{kind}",
            "path": "a",
            "kind": kind,
            "type": "",
            "shape": [2],
            "dtype": "float32",
        }
    ]

    def recording(scale: float) -> Recording:
        rows = [
            {"step": n, "site": 0, "count": 2, "sum": scale, "sumsq": scale**2 * 2, "level": 2}
            for n in range(3)
        ]
        return Recording.build(sites, rows, roots=[], manifest={})

    assert "first difference: step 0" in drawn(recording(1.0), recording(3.0))


def test_blocks_that_part_alike_share_a_line() -> None:
    """The first to part stands alone; the others fold where they diverge in the same step at the same site."""
    layers = [
        Layer(f"h.{i}.{part}", "Linear", (8, 8)) for i in range(12) for part in ("attn", "mlp")
    ]
    factor = later(
        from_step(1, 1.001, "*.attn:out", "*.mlp:out"), from_step(1, 90.0, "h.7.mlp:out")
    )

    drawn = lines(story(layers=layers), story(layers=layers, factor=factor), width=120)

    at = next(i for i, line in enumerate(drawn) if line.startswith("module "))
    table = [line.split()[:2] for line in drawn[at + 1 : drawn.index("", at)]]
    assert table == [
        ["h.0.attn", "1"],
        ["h.0-6,8-11.mlp", "1"],
        ["h.7.mlp", "1"],
        ["h.1-11.attn", "1"],
        ["1", "module"],
    ]


def test_a_table_of_wide_spreads_fits_a_narrow_terminal() -> None:
    """It goes without the last distances, and without the values of A and B; no line is wrapped, and each name can be read."""
    layers = [
        Layer(f"model.h.{i}.{part}", "Linear", (8, 8))
        for i in range(12)
        for part in ("attn", "mlp")
    ]

    def scale(text: str, step: int) -> float:
        return 1.234 * 10.0 ** -(5 + crc32(text.encode()) % 3)

    def parting(text: str, step: int) -> float:
        return 1 + 0.001 * (1 + crc32(text.encode()) % 4) * (step > 0)

    runs = story(layers=layers, factor=scale), story(layers=layers, factor=later(scale, parting))

    for width, titles in ((80, ["apart"]), (140, ["A", "B", "apart", "at", "end"])):
        text = lines(*runs, width=width)
        at = next(i for i, line in enumerate(text) if line.startswith("module "))
        assert [title for title in text[at].split()[4:] if title != "steps"][
            : len(titles)
        ] == titles
        assert max(map(len, text)) <= width
        assert text[at + 2].startswith("model.h.0-11.mlp ")


def test_blocks_of_one_side_alone_share_a_name() -> None:
    """A deeper model has them all at the end."""
    short, long = (
        [Layer(f"h.{i}.mlp", "Linear", (8, 8)) for i in range(count)] for count in (2, 9)
    )

    assert "only in B: h.2-8.mlp (Linear)" in drawn(story(layers=short), story(layers=long))
