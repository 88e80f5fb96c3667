"""Blocks apart from similar ones: which they are, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.report import module_lines
from kedge.report.apart import apart_blocks, apart_in_short, sentence
from kedge.report.curves import ScaleSeries
from kedge.report.module_lines import folded, lines
from kedge.store.recording import Recording, SiteInfo

BLOCKS = 24


class Twin(nn.Module):
    """One of many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Many blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Twin() for _ in range(BLOCKS))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x)


def scaled(block: nn.Module) -> None:
    """Begin with parameters a hundred times as large."""
    with torch.no_grad():
        for parameter in block.attn.parameters():
            parameter.mul_(100)


def dead(block: nn.Module) -> None:
    """Make the block's GELU return only zeros."""
    nn.init.constant_(block.mlp[0].bias, -20.0)


def frozen(block: nn.Module) -> None:
    """Train the attention no more."""
    block.attn.requires_grad_(requires_grad=False)


def nothing(_: nn.Module) -> None:
    """Leave the block as it is."""


@pytest.mark.parametrize(
    ("fault", "place", "named"),
    [
        (scaled, 11, "h.11 is apart from similar blocks: h.11.attn has out "),
        (dead, 11, "h.11 is apart from similar blocks: h.11.mlp.0 has grad 0, the others "),
        (frozen, 11, "h.11 is apart from similar blocks: h.11.attn has update 0, the others "),
        (nothing, 11, ""),
    ],
)
def test_the_last_lines_of_a_run_name_the_block_that_is_apart(
    fault: Callable[[nn.Module], None],
    place: int,
    named: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One block of many is faulty: a line names it; no line is printed if none is."""
    torch.manual_seed(0)
    model = Stack()
    fault(model.h[place])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with kedge.watch(tmp_path / "run.kedge"):
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(4, (4,))).backward()
            optimizer.step()

    found = [line for line in capfd.readouterr().err.splitlines() if "apart from similar" in line]
    assert len(found) == bool(named)
    assert not named or found[0].startswith(f"[kedge] {named}")


def recording(scales: dict[str, float], parts: int = 2) -> Recording:
    """Build a recording of 48 blocks with some linear layers each, a few of another scale."""
    paths = [f"h.{i}.mlp.{part}" for i in range(48) for part in range(parts)]
    places = [{"site": f"{path}:out", "type": "Linear", "shape": [4, 8]} for path in paths]
    rows = [
        {"step": 0, "site": i, "count": 32, "sumsq": 32 * scales.get(path, 1.0) ** 2, "level": 2}
        for i, path in enumerate(paths)
    ]
    return Recording.build(places, rows)


def said(made: Recording) -> tuple[str, str]:
    """Return the sentence of the report, and that of a run."""
    return sentence(apart_blocks(folded(lines(made)))), apart_in_short(made, ())


def test_the_block_is_the_outermost_one_without_a_similar_line() -> None:
    """If all layers of a block are apart, the block is named; if one of its experts is, that expert."""
    both, _ = said(recording({"h.17.mlp.0": 50.0, "h.17.mlp.1": 60.0}))
    one, _ = said(recording({"h.17.mlp.5": 50.0}, parts=8))

    assert both == "h.17 is apart from similar blocks: h.17.mlp.1 has out 60.0, the others 1.00"
    assert (
        one == "h.17.mlp.5 is apart from similar blocks: h.17.mlp.5 has out 50.0, the others 1.00"
    )


def test_of_several_blocks_the_furthest_is_explained() -> None:
    """The names come in the order of the table."""
    report, run = said(
        recording({f"h.{i}.mlp.{part}": 5.0 * i for i in (7, 17, 27) for part in (0, 1)})
    )

    assert report == run
    assert (
        run
        == "h.7, h.17, h.27 are apart from similar blocks; the furthest: h.27.mlp.0 has out 135, the others 1.00"
    )


@pytest.mark.parametrize("end", [0, 47])
def test_the_ends_of_a_model_differ_by_nature(end: int) -> None:
    """The first and the last block are named in the report alone."""
    report, run = said(recording({f"h.{end}.mlp.{part}": 9.0 for part in (0, 1)}))

    assert (
        report
        == f"h.{end} is apart from similar blocks: h.{end}.mlp.0 has out 9.00, the others 1.00"
    )
    assert run == ""


def test_blocks_that_are_all_alike_are_not_named() -> None:
    """Neither by the report nor by the run."""
    assert said(recording({})) == ("", "")


def test_no_line_of_many_reads_its_own_course(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is apart is found in one table: a course is read for the lines that stand alone, and not for each module."""
    read: list[str] = []
    course = module_lines.scale_series

    def counted(recording: Recording, site: SiteInfo) -> ScaleSeries:
        read.append(site.site)
        return course(recording, site)

    monkeypatch.setattr(module_lines, "scale_series", counted)
    blocks = 300
    recording = Recording.build(
        [f"h.{n}:out" for n in range(blocks)],
        [
            {"site": n, "step": step, "count": 4, "sumsq": 4.0 if n != 7 else 4e6}
            for n in range(blocks)
            for step in range(3)
        ],
    )
    assert "h.7" in apart_in_short(recording, [])
    assert set(read) <= {"h.7:out"}
