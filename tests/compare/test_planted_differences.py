"""One thing is changed in a small program, which is watched with the default options: it is the cause that is named."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.compare.comparison import compare
from kedge.compare.verdict import Verdict, judge
from kedge.store.recording import Recording

STEPS, BATCH, SAMPLES = 10, 16, 64


class Branch(nn.Module):
    """A residual branch with what usually stands in one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x).to(self.up.weight.dtype)).float()
        return x + self.down(self.drop(F.gelu(hidden)))


class Tower(nn.Module):
    """Some branches in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*[Branch(16) for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class Program:
    """A training whose parts can be changed before it runs."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Tower()
        self.block: Branch = self.model.blocks[2]  # type: ignore[assignment]
        self.kind: type[torch.optim.Optimizer] = torch.optim.SGD
        self.rates = [0.1, 0.1]
        self.settings = {"momentum": 0.9}
        self.clip: float | None = None
        self.order, self.draws, self.scale, self.factor = 7, 1, 1.0, 1.0

    def run(self) -> None:
        model, slow = self.model, set(self.block.parameters())
        groups = [[p for p in model.parameters() if p not in slow], list(self.block.parameters())]
        given = [
            {"params": params, "lr": lr} for params, lr in zip(groups, self.rates, strict=True)
        ]
        optimizer = self.kind(given, **self.settings)
        draw = torch.Generator().manual_seed(5)
        data = self.scale * torch.randn(SAMPLES, 8, generator=draw)
        targets = torch.randint(4, (SAMPLES,), generator=draw)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.order))
        torch.manual_seed(self.draws)
        for step in range(STEPS):
            chosen = order[step * BATCH % SAMPLES :][:BATCH]
            loss = self.factor * F.cross_entropy(model(data[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()


Change = Callable[[Program], None]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Program], Recording]:
    """Record a program, by default as a user would."""
    folder = tmp_path_factory.mktemp("planted")

    def run(name: str, program: Program) -> Recording:
        place = folder / f"{name}.kedge"
        with kedge.watch(place):
            program.run()
        return Recording.open(place)

    return run


@pytest.fixture(scope="module")
def plain(watched: Callable[[str, Program], Recording]) -> Recording:
    """The program as it is."""
    return watched("plain", Program())


def scaled(program: Program) -> None:
    """Multiply all parameters of the block."""
    with torch.no_grad():
        for parameter in program.block.parameters():
            parameter.mul_(3)


def one_scaled(program: Program) -> None:
    """Multiply one parameter of the block."""
    with torch.no_grad():
        program.block.up.weight.mul_(3)


def zeroed(program: Program) -> None:
    """Begin with a matrix of zeros."""
    nn.init.zeros_(program.block.down.weight)


def coarse(program: Program) -> None:
    """Change the dtype of one layer."""
    program.block.up.to(torch.bfloat16)


def all_dropouts(program: Program) -> None:
    """Drop more in all blocks."""
    for module in program.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.4


def settings(**values: object) -> Change:
    """Set attributes of the program."""
    return lambda program: vars(program).update(values)


DROP = "blocks.2.drop (Dropout)"
PLANTED: dict[str, tuple[Change, str, str]] = {
    "everything is dropped": (
        lambda program: setattr(program.block.drop, "p", 1.0),
        "dropout",
        f"another dropout rate: {DROP} drops about 10 % in A, everything in B",
    ),
    "nothing is dropped": (
        lambda program: setattr(program.block.drop, "p", 0.0),
        "dropout",
        f"another dropout rate: {DROP} drops about 10 % in A, nothing in B",
    ),
    "all drop more": (
        all_dropouts,
        "dropout",
        "another dropout rate: blocks.0-3.drop (Dropout) drop about 10 % in A, about 40 % in B",
    ),
    "a dropout in evaluation mode": (
        lambda program: program.block.drop.eval(),
        "mode",
        f"another mode: {DROP} is in training mode in A, in evaluation mode in B",
    ),
    "a norm in evaluation mode": (
        lambda program: program.block.norm.eval(),
        "mode",
        "another mode: blocks.2.norm (BatchNorm1d) is in training mode in A, in evaluation mode in B",
    ),
    "the model in evaluation mode": (
        lambda program: program.model.eval(),
        "mode",
        "another mode: the model is in training mode in A, in evaluation mode in B",
    ),
    "other random numbers": (
        settings(draws=2),
        "random",
        "other random numbers: blocks.0.drop (Dropout) is the first to differ",
    ),
    "a frozen block": (
        lambda program: program.block.requires_grad_(requires_grad=False),
        "trainable",
        "frozen in B: blocks.2",
    ),
    "a frozen bias": (
        lambda program: program.block.up.bias.requires_grad_(requires_grad=False),
        "trainable",
        "frozen in B: blocks.2.up.bias",
    ),
    "a frozen head": (  # its gradients are large, so that the norm differs more than their number
        lambda program: program.model.head.requires_grad_(requires_grad=False),
        "trainable",
        "frozen in B: head",
    ),
    "another rate of a group": (
        settings(rates=[0.1, 0.01]),
        "rate",
        "another learning rate of some parameters: the updates of blocks.2 are 0.1 times as large in B",
    ),
    "another optimizer": (
        settings(kind=torch.optim.Adam, settings={}),
        "optimizer",
        "another optimizer: SGD in A, Adam in B",
    ),
    "another momentum": (
        settings(settings={"momentum": 0.5}),
        "optimizer",
        "other settings of the optimizer, SGD",
    ),
    "a scaled block": (
        scaled,
        "parameters",
        "5 of 28 parameters begin 3 times as large in B: blocks.2",
    ),
    "a scaled weight": (
        one_scaled,
        "parameters",
        "1 of 28 parameters begins 3 times as large in B: blocks.2.up.weight",
    ),
    "a weight of zeros": (
        zeroed,
        "parameters",
        "1 of 28 parameters begins with zeros in B: blocks.2.down.weight",
    ),
    "a layer of another dtype": (
        coarse,
        "dtype",
        "another dtype: parameters of blocks.2.up are float32 in A and bfloat16 in B",
    ),
    "the samples in another order": (
        settings(order=8),
        "order",
        "another order of the data: the same samples in other batches",
    ),
    "inputs of another scale": (
        settings(scale=2.0),
        "data",
        "another scale of the data: the inputs are 2 times as large in B",
    ),
    "a loss of another scale": (
        settings(factor=8.0),
        "scaled",
        "another scale of the loss: it and the gradients are 8 times as large in B",
    ),
}


def found(a: Recording, b: Recording) -> Verdict:
    """Compare two runs."""
    return judge(compare(a, b))


def test_the_same_program_again(
    plain: Recording, watched: Callable[[str, Program], Recording]
) -> None:
    """Nothing is changed, and nothing is named."""
    assert found(plain, watched("again", Program())).cause.code == "same"


def test_another_seed(plain: Recording, watched: Callable[[str, Program], Recording]) -> None:
    """All matrices begin with other numbers."""
    assert found(plain, watched("seed", Program(seed=1))).cause.code == "seed"


def _to_tens(headline: str) -> str:
    """Round the shares in a headline: how many values they are measured of depends on the machine."""
    return re.sub(r"about (\d+) %", lambda found: f"about {round(int(found[1]), -1)} %", headline)


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_difference_is_named(
    name: str, plain: Recording, watched: Callable[[str, Program], Recording]
) -> None:
    """The headline names what was changed, and where; seen from the other run it is of the same kind."""
    change, code, headline = PLANTED[name]
    program = Program()
    change(program)
    changed = watched(name.replace(" ", "-"), program)
    told = found(plain, changed)

    assert (told.cause.code, _to_tens(told.cause.headline)) == (code, headline)
    assert found(changed, plain).cause.code == code
