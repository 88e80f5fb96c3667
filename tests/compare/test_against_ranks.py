"""What held in a good run of two ranks is asked of other runs of two ranks."""

from __future__ import annotations

import pytest
import torch.distributed

from kedge.compare import departures
from kedge.store.recording import Recording
from tests.cli.test_run_ranks import Launcher

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
]

PROGRAM = """
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn

    fault, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    model = net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    if fault != "apart":
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = 0 if fault == "same" else rank
    numbers = torch.Generator().manual_seed(seed + 10 + own)
    for step in range(steps):
        x = torch.randn(16, 6, generator=numbers)
        y = x[:, :3].argmax(1)
        if fault == "scaled" and rank == 1:
            x = 30 * x
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Runs the program under torchrun."""
    launcher = Launcher(tmp_path_factory.mktemp("ranks"))
    launcher.write(PROGRAM)
    return launcher


def recorded(launcher: Launcher, *words: str) -> Recording:
    """Record the program on two ranks."""
    name = "-".join(words)
    done = launcher(2, "kedge", "run", "-q", "-o", f"{name}.kedge", "train.py", *words)
    assert done.returncode == 0, done.stderr
    return Recording.open(launcher.folder / f"{name}.kedge")


@pytest.fixture(scope="module")
def good(launcher: Launcher) -> Recording:
    """The good run."""
    return recorded(launcher, "right", "0", "40")


def test_all_holds_in_a_healthy_repetition(launcher: Launcher, good: Recording) -> None:
    """With another seed and length."""
    assert departures(recorded(launcher, "right", "5", "60"), good) == ()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("apart", "ranks", "all 4 parameters: equal on all 2 ranks in each measured step of the"),
        ("same", "ranks", ":in: the ranks had inputs of their own in the good run, and all 2 have"),
        ("scaled", "inputs", "inputs: :in has a size of"),
    ],
)
def test_a_rank_that_departs_is_told(
    launcher: Launcher, good: Recording, fault: str, kind: str, words: str
) -> None:
    """A model of its own, the data of another rank, or data of another scale on one of them."""
    found = departures(recorded(launcher, fault, "7", "40"), good)

    told = [each.message for each in found if each.evidence.kind == kind]
    assert any(words in message for message in told), [each.message for each in found]
