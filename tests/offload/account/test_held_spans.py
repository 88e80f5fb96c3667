"""Which tensors are held from when to when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from kedge.offload.account.over_step import SaveTimeline, over_step
from kedge.offload.saved_tensors import saved
from kedge.report.held import held_tree
from kedge.store.held_tensors import HeldSpan, TensorKind
from kedge.store.saved_account import BytesOverStep


def timeline_of(events: list[int]) -> SaveTimeline:
    """Return a timeline of saves, and of releases as their complement."""
    timeline = SaveTimeline()
    for event in events:
        if event >= 0:
            timeline.saved(event)
        else:
            timeline.released(~event)
    return timeline


def test_a_storage_is_borne_by_the_first_that_holds_it() -> None:
    """When that one is released, the next bears the bytes."""
    storages = {0: [(0, 10)], 1: [(0, 10)], 2: [(1, 5)]}
    line = over_step(
        timeline_of([0, 1, 2, ~0, ~1, ~2]),
        storages.__getitem__,
        lambda number: TensorKind(str(number)),
    )
    held = line.tensors

    assert line.at == (1, 2, 3, 4, 5, 6)
    assert line.holders == (("0", 10), ("2", 5))
    assert [kind.path for kind in held.kinds] == ["0", "1", "2"]
    assert held.spans == (
        HeldSpan(0, 1, 10, 0, 3),
        HeldSpan(1, 1, 10, 3, 4),
        HeldSpan(2, 1, 5, 2, 5),
    )


@st.composite
def steps(draw: Any) -> tuple[list[int], dict[int, list[tuple[int, int]]]]:
    """Draw saves of tensors on a few shared storages, and releases of some of them, in any order."""
    sizes = draw(st.lists(st.integers(1, 99), min_size=1, max_size=6))
    count = draw(st.integers(1, 30))
    storages = {
        number: [
            (at, sizes[at]) for at in draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
        ]
        for number in range(count)
    }
    events: list[int] = []
    alive: list[int] = []
    for number in range(count):
        events.append(number)
        alive.append(number)
        while alive and draw(st.booleans()):
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
    return events, storages


@given(steps())
def test_at_each_moment_the_spans_add_up_to_the_bytes_held(
    step: tuple[list[int], dict[int, list[tuple[int, int]]]],
) -> None:
    """However tensors share storages, and whatever is released first."""
    events, storages = step
    line = over_step(
        timeline_of(events), storages.__getitem__, lambda number: TensorKind(str(number % 5))
    )
    alive: dict[int, None] = {}
    heights = []
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
        held = {storage: size for number in alive for storage, size in storages[number]}
        heights.append(sum(held.values()))

    assert list(line.bytes) == [heights[at - 1] for at in line.at]
    assert line.peak == max(heights)
    assert sum(size for _, size in line.holders) == line.peak
    assert [line.tensors.bytes(moment) for moment in range(len(line.at))] == list(line.bytes)


def agrees(line: BytesOverStep) -> None:
    """Assert that the tensors add up to the bytes over the step, and the flame graph of the peak to the peak."""
    assert [line.tensors.bytes(moment) for moment in range(len(line.at))] == list(line.bytes)
    assert len(line.seconds) == len(line.at)
    assert list(line.seconds) == sorted(line.seconds)
    root = held_tree(line.tensors, line.peak_moment)
    tensors = [node for node, _, _ in root.walk() if node.level == "tensor"]
    assert root.bytes == sum(node.bytes for node in tensors) == line.peak
    assert line.bytes[-1] == 0


def test_the_flame_graph_of_a_language_model_has_the_bytes_of_its_report() -> None:
    """At the peak the widths add up to what the report prints, by module as there; after the backward nothing is left."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=6, n_embd=16, n_head=2, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    words = torch.randint(0, 50, (2, 8))
    report = saved(transformers.GPT2LMHeadModel(config), loss=lambda out: out.loss, backward=True)(
        words, labels=words
    )
    line = report.timeline

    agrees(line)
    assert line.peak == report.total.bytes
    paths: dict[str | None, int] = {}
    for kind, span in line.tensors.at(line.peak_moment):
        paths[kind.path] = paths.get(kind.path, 0) + span.bytes
    assert paths == {sums.path: sums.bytes for sums in report.by_module() if sums.bytes}
    assert sum(
        span.bytes for kind, span in line.tensors.at(line.peak_moment) if kind.origin == "input"
    ) == (report.inputs)
    (blocks,) = [
        node
        for node, _, _ in held_tree(line.tensors, line.peak_moment).walk()
        if node.label == "h.0-5"
    ]
    assert blocks.bytes == sum(size for path, size in paths.items() if path and ".h." in path)


class Blocks(nn.Module):
    """Blocks of which each is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_checkpoint_recomputes_one_block_after_the_other() -> None:
    """In backward the tensors of one block at a time are held again, beside the inputs of the blocks before."""
    line = saved(Blocks(), backward=True)(torch.randn(16, 8)).timeline
    agrees(line)
    seen = [
        {kind.path for kind, _ in line.tensors.at(moment) if kind.origin == "recomputed"}
        for moment in range(len(line.at))
    ]

    order = [min(paths) for paths in seen if paths]
    assert [path.split(".")[1] for path in order if path] == sorted(
        (p.split(".")[1] for p in order if p), reverse=True
    )
    assert all(len({path.split(".")[1] for path in paths if path}) <= 1 for paths in seen)
    assert {path for paths in seen for path in paths} >= {
        f"blocks.{n}.{part}" for n in range(3) for part in (1, 2)
    }
    assert line.peak > max(size for size, paths in zip(line.bytes, seen, strict=True) if not paths)


@pytest.mark.parametrize("keep", [True, False])
def test_what_the_program_keeps_of_a_recompute_does_not_count(keep: bool) -> None:
    """Autograd does not hold a recomputed tensor that the program itself still has after the backward."""
    kept: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        made = x.exp()
        kept.append(made) if keep else None
        return made.sin()

    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = checkpoint(block, super().forward(x), use_reentrant=False)
            return made

    line = saved(Keeping(4, 4), backward=True)(torch.randn(4, 4)).timeline
    agrees(line)


def test_a_moment_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are counted from the first save."""
    ticks = iter(range(10, 100, 5))
    monkeypatch.setattr("kedge.offload.account.over_step.perf_counter", lambda: next(ticks))
    function: Callable[..., Any] = saved(lambda x: x.exp().sin(), backward=True)
    line = function(torch.ones(3, requires_grad=True)).timeline

    assert line.seconds == (0, 5, 10, 15)
