"""On real architectures: offloading without a codec changes no bit of what training gives."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

from tests.marks import sampled

pytest.importorskip("transformers")
import kedge
from kedge.hooks.placing.stand_in import around_of
from kedge.offload.engine.policy import Choice
from kedge.offload.outcomes import OffloadAccount
from kedge.offload.stores import disk
from kedge.offload.stores.unnamed_file import Piece, UnnamedFile
from tests.architectures.training import plain, train, unlike
from tests.architectures.zoo import Architecture, architectures

MODES = {
    "rebuild": kedge.Rebuild(),
    "disk": kedge.Disk(),
    "disk alone": kedge.Disk(rebuild=False),
}
LEAST = 256
PLANS: dict[str, dict[str, Any]] = {
    "memory": {
        "to": kedge.Disk(),
        "max_memory": "10 kB",
    },  # each of them saves more in tensors of LEAST bytes and more
    "time": {"to": kedge.Disk(), "max_slowdown": 1.05},
    "time, in memory": {"to": kedge.Rebuild(), "max_slowdown": 1.05},
}
FEW_PAGES = 16 << 10
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NothingGained")


def settled(account: OffloadAccount) -> None:
    """Something was done, and nothing of it is left behind."""
    gc.collect()  # outputs of transformers are in cycles
    total = account.total
    assert total.moved or total.rebuilt, str(account)
    assert total.freed.number == total.sum("moved").number + total.sum("rebuilt").number


@pytest.mark.parametrize("mode", sampled(MODES, {"rebuild", "disk"}))
@architectures
def test_offloading_changes_no_bit_of_a_training(architecture: Architecture, mode: str) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model that keeps all in memory."""
    bare = plain(architecture)
    model = architecture.build()
    with kedge.offload(model, to=MODES[mode], min_bytes=LEAST) as account:
        offloaded = train(architecture, model)

    assert unlike(bare, offloaded) == []
    settled(account)


@architectures
def test_what_leaves_memory_comes_back_with_its_bits(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window of few pages saved tensors leave the system's memory and are read ahead, and no bit changes."""
    monkeypatch.setattr(disk, "WINDOW", FEW_PAGES)
    advise, advised = UnnamedFile.advise, set()

    def noted(file: UnnamedFile, piece: Piece, advice: int) -> None:
        advised.add(advice)
        advise(file, piece, advice)

    monkeypatch.setattr(UnnamedFile, "advise", noted)
    bare = plain(architecture)
    model = architecture.build()
    block = kedge.offload(model, to=kedge.Disk(uncached=True, checksum=True), min_bytes=LEAST)
    with block as account:
        offloaded = train(architecture, model)
        store: Any = around_of(block)._store
        left = store._files.window.out

    assert unlike(bare, offloaded) == []
    assert left > 0
    assert advised == {os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED}
    settled(account)


@pytest.mark.parametrize("limit", sampled(PLANS, {"memory", "time"}))
@architectures
def test_a_plan_changes_no_bit_of_a_training(architecture: Architecture, limit: str) -> None:
    """Four steps within a limit: from the third on a plan holds, and all that comes of them keeps its bits."""
    bare = plain(architecture, steps=4)
    model = architecture.build()
    plans: list[Any] = []
    with kedge.offload(model, min_bytes=LEAST, **PLANS[limit]) as account:
        model.register_forward_hook(
            lambda *_: plans.append(account.plan)
        )  # when the step has begun for sure
        offloaded = train(architecture, model, steps=4)

    assert unlike(bare, offloaded) == []
    assert not any(plans[:2])
    assert plans[2]
    assert plans[2].feasible
    assert limit != "memory" or any(
        choice is not Choice.KEEP for choice, _ in plans[2].choices.values()
    )
    settled(account)
