"""Several recordings, written by hand: they differ in their options, their model, their length and their end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.report.runs.page import render_runs_page
from kedge.report.runs.summary import RunSummary
from kedge.report.runs.table import LeftOut, RunTable
from kedge.report.shown_run import ShownRun
from kedge.rules.registry import check
from kedge.store.recording import Recording
from tests.report.page import conftest as one_page
from tests.report.page.runs import Run

browser, tab, Watched = one_page.browser, one_page.tab, one_page.Watched

Written = Callable[..., Path]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the width of the terminal that the tests expect."""
    monkeypatch.setenv("COLUMNS", "160")


def loss_at(step: int, rate: float) -> float:
    """Return the loss of a run that learns at a rate."""
    return 2.0 * math.exp(-rate * step) + 0.1


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write a recording, and give its path."""

    def write(
        name: str,
        *options: str,
        rate: float = 0.1,
        steps: int = 12,
        bad: int | None = None,
        layers: tuple[str, ...] = ("conv1", "relu1", "fc.a"),
        ended: bool = True,
        **manifest: Any,
    ) -> Path:
        folder = tmp_path / f"{name}.kedge"
        folder.parent.mkdir(exist_ok=True)
        given = {
            "command": ["/home/ada/secret/train.py", *options],
            "started": "2026-11-21T07:00:00+00:00",
        }
        run = Run(folder, layers, **given | manifest)
        for step in range(steps):
            loss = math.nan if bad is not None and step >= bad else loss_at(step, rate)
            run.step(step, {"loss:out": loss})
        if ended:
            run.end(steps=steps, sampled=steps, seconds=float(steps) / 2)
        else:
            run.writer.close()
        return folder

    return write


def table_of(*folders: Path, left_out: tuple[LeftOut, ...] = ()) -> RunTable:
    """Return the table of some recordings."""
    return RunTable(tuple(map(summary_of, folders)), left_out)


def summary_of(
    folder: Path, *, written: bool | None = None, wrote: float | None = None
) -> RunSummary:
    """Return the summary of a recording."""
    recording = Recording.open(folder)
    shown_run = ShownRun(recording, check(recording), written=written)
    return RunSummary(folder.name.removesuffix(".kedge"), shown_run, wrote)


@pytest.fixture
def three(written: Written) -> RunTable:
    """A slow run, a fast one that breaks, and one of another model that has no end."""
    return table_of(
        written("slow", "--lr", "0.1"),
        written("fast", "--lr", "1", "--amp", rate=0.5, steps=20, bad=14),
        written("other", "--lr", "0.1", layers=("conv1", "head"), ended=False),
        left_out=(LeftOut("torn", "torn/manifest.json: it is empty"),),
    )


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Write the page of several runs to a file, and give its address."""

    def save(table: RunTable, *pages: str | None) -> str:
        file = tmp_path / "runs.html"
        file.write_text(render_runs_page(table, pages), encoding="utf-8")
        return file.as_uri()

    return save


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Path]:
    """Work in the folder of the recordings."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)
