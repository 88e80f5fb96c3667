"""Programs that broke features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.testing import assert_same_bits


class Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.down(x)
        return self.up(self(y, depth - 1)) if depth else y


class Checkpointed(nn.Module):
    """Runs two layers in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=True))


def test_a_model_that_calls_itself_gives_every_call() -> None:
    """Each call of a recursion is a value of its own, in the first forward and in those that may end early."""
    model, x = Again(), torch.randn(3, 4)
    every, last = kedge.extract(model, ["down", "up"]), kedge.extract(model, "up#1")
    with torch.no_grad():
        downs = [model.down(x)]
        downs += [model.down(downs[0])]
        downs += [model.down(downs[1])]
        ups = [model.up(downs[2])]
        ups += [model.up(ups[0])]
    wanted = {f"down#{i}": v for i, v in enumerate(downs)} | {f"up#{i}": v for i, v in enumerate(ups)}
    for _ in range(3):
        assert_same_bits(every(x), wanted)
        assert_same_bits(last(x), {"up#1": ups[1]})


def test_what_a_reentrant_checkpoint_returns_has_its_graph_every_time() -> None:
    """Such a value gets its graph behind its last module, so no later forward ends before that."""
    model, x = Checkpointed(), torch.randn(3, 4, requires_grad=True)
    features = kedge.extract(model, "block", no_grad=False)
    model.block(x).square().sum().backward()
    wanted = [p.grad for p in model.block.parameters()]
    for _ in range(3):
        model.zero_grad()
        features(x)["block"].square().sum().backward()
        assert_same_bits([p.grad for p in model.block.parameters()], wanted)


def test_what_lies_in_an_argument_stays_when_the_argument_is_filled_anew() -> None:
    """A program may load every batch into the same memory."""
    model = nn.Sequential(nn.Identity(), nn.Flatten(0), nn.ReLU())
    features, buffer = kedge.extract(model, [":in", "0", "1"]), torch.empty(2, 3)
    batches = [torch.randn(2, 3) for _ in range(3)]
    taken = [features(buffer.copy_(batch)) for batch in batches]
    assert_same_bits(
        [values[name] for values in taken for name in (":in", "0")], [b for b in batches for _ in range(2)]
    )
    assert_same_bits([values["1"] for values in taken], [batch.flatten() for batch in batches])
