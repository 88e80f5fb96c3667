"""The work of judging grows with the number of sites, and not with its square."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge.report.apart import apart_in_short
from kedge.rules.judgement import judge
from kedge.rules.training.no_learning import NoLearning


def train(path: Path, modules: int) -> None:
    """Record three steps of a chain of modules."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(modules)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    block = kedge.watch(path)
    block.tell = None
    with block:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()


def calls_of(work: Any) -> int:
    """Return how many Python functions some work calls."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recordings of 60 and of 240 modules."""
    folder = tmp_path_factory.mktemp("many")
    for modules in (60, 240):
        train(folder / f"{modules}.kedge", modules)
    return folder / "60.kedge", folder / "240.kedge"


def test_judging_four_times_the_modules_is_at_most_four_times_the_work(
    recordings: tuple[Path, Path],
) -> None:
    """Reading, judging and comparing blocks take a number of calls that grows no faster than that of the sites."""

    def work(path: Path) -> None:
        recording = kedge.Recording.open(path)
        apart_in_short(recording, judge(recording).findings)

    few, many = (calls_of(lambda path=path: work(path)) for path in recordings)
    assert many < 4.2 * few


def test_rules_call_next_to_nothing_for_each_site(recordings: tuple[Path, Path]) -> None:
    """Without findings, all rules together make at most 400 calls for each further module, which has nine sites."""
    opened = [kedge.Recording.open(path) for path in recordings]
    few, many = (calls_of(lambda recording=recording: judge(recording)) for recording in opened)
    assert (many - few) / 180 < 400


def test_attaching_to_four_times_the_modules_is_at_most_four_times_the_work(tmp_path: Path) -> None:
    """The calls of a watched training grow no faster than its modules."""
    few, many = (calls_of(lambda n=n: train(tmp_path / f"{n}.kedge", n)) for n in (60, 240))
    assert many < 4.2 * few


def test_rules_that_no_time_is_left_for_are_counted(recordings: tuple[Path, Path]) -> None:
    """The judgement is that of the first rules, is not complete, and says how many are left."""
    recording, asked = kedge.Recording.open(recordings[0]), iter([False, False, True])
    judgement = judge(recording, [NoLearning()] * 5, lambda: next(asked))
    assert (judgement.rules, judgement.left, judgement.complete) == (2, 3, False)
