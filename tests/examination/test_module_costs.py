"""`kedge.sites` with arguments: parameters, shapes, multiply-adds, memory and time of each module."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import KedgeError, WrongCall
from kedge.examination.module_costs import ModelCosts
from tests.hook_tables import hook_tables


class Net(nn.Module):
    """A convolution, a normalisation, a frozen head, a module that is called twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 10))
        self.head.requires_grad_(requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, 4, 4] to [n, 10]."""
        self.calls += 1
        x = self.act(self.act(self.norm(self.conv(x))))
        return self.head(x + random.random())


@pytest.fixture
def costs() -> ModelCosts:
    """What the modules take with two images."""
    return kedge.sites(Net(), torch.randn(2, 3, 4, 4))


def test_multiply_adds_are_those_of_the_formulas(costs: ModelCosts) -> None:
    """A convolution has one for each weight and place, a linear layer one for each weight, of each sample."""
    assert costs["conv"].multiply_adds == 2 * 16 * 8 * 3 * 9
    assert costs["head.1"].multiply_adds == costs["head"].multiply_adds == 2 * 128 * 10
    assert costs[""].multiply_adds == costs["conv"].multiply_adds + costs["head"].multiply_adds
    assert costs["norm"].multiply_adds == 0


def test_parameters_and_shapes(costs: ModelCosts) -> None:
    """A module has the parameters of all inside it, whether they were used or not."""
    assert (costs["conv"].parameters, costs["conv"].trainable) == (8 * 27 + 8, 8 * 27 + 8)
    assert (costs["head"].parameters, costs["head"].trainable) == (1290, 0)
    assert costs[""].parameters == sum(param.numel() for param in Net().parameters())
    assert costs["conv"].outputs == ((2, 8, 4, 4),)
    assert costs["act"].calls == 2
    assert [row.path for row in costs] == ["", "conv", "norm", "act", "head", "head.0", "head.1"]
    with pytest.raises(KeyError, match="unused"):
        costs["unused"]


def test_memory_for_backward_is_that_of_the_account() -> None:
    """The same figures as those of `kedge.saved`, with all modules inside."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 4, 4)
    account = kedge.saved(model)(x)

    saved = {sums.path: sums.bytes for sums in account.by_module(inner=True)}
    costs = kedge.sites(model, x)
    assert costs[""].saved == account.total.bytes > 0
    assert {row.path: row.saved for row in costs if row.saved} == {
        path: nbytes for path, nbytes in saved.items() if nbytes
    }


def test_every_module_has_a_time(costs: ModelCosts) -> None:
    """A module's time includes those inside it."""
    assert all(row.forward > 0 for row in costs)
    assert costs[""].forward > costs["head"].forward > costs["head.1"].forward


def test_nothing_is_left_behind() -> None:
    """Statistics, counters, gradients, random numbers and hooks are as before, in either mode of gradients."""
    model, x = Net(), torch.randn(2, 3, 4, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = hook_tables(model)
    states: tuple[Any, ...] = (random.getstate(), torch.get_rng_state())

    with torch.no_grad():
        costs = kedge.sites(model, x)

    assert costs[""].saved > 0
    assert model.calls == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert hook_tables(model) == hooks


def test_the_table_has_the_totals_and_folds_blocks() -> None:
    """Blocks that are alike share a line, with the mean of their times."""
    model = nn.Sequential(
        nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(20))
    )
    costs = kedge.sites(model, torch.ones(3, 4))
    lines = str(costs).splitlines()

    names = [line.split()[0] for line in lines]
    assert names[1:] == ['""', "0", "1", "1.0", "1-20.1", "2-20", "2-20.0", "total:"]
    assert lines[-1].startswith("total: 420 parameters, 1.01k multiply-adds, ")
    assert len(costs.table(folded=False).splitlines()) == 1 + 62 + 1
    assert costs._repr_html_().count("<tr") == 8


def test_arguments_that_do_not_fit_are_explained() -> None:
    """The model's own error comes through, with what was given."""
    with pytest.raises(RuntimeError):
        kedge.sites(Net(), torch.ones(2, 5))
    with pytest.raises((KedgeError, TypeError)):
        kedge.sites(3, torch.ones(2))  # type: ignore[arg-type]


def test_a_keyword_is_an_argument_of_the_model() -> None:
    """Whatever its name."""
    assert kedge.sites(nn.Linear(3, 2), input=torch.ones(1, 3))[""].multiply_adds == 6


def test_a_graph_of_before_can_still_be_run_backward() -> None:
    """Running statistics are put back without a change that autograd would count."""
    model, x = Net(), torch.randn(2, 3, 4, 4)
    loss = model(x).sum()
    kedge.sites(model, x)
    loss.backward()
    assert model.conv.weight.grad is not None


class Moody(nn.Module):
    """A model that skips layers at random, takes what it needs out of its batch, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.seen: list[int] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Map [n, 4] to [n, 4]."""
        x = batch.pop("x").add_(1)
        self.seen.append(len(self.seen))
        if len(self.seen) > 1:
            raise ValueError("called again")
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x


def test_all_calls_begin_alike() -> None:
    """With the same random numbers, attributes and arguments, and these are left alone."""
    model, x = Moody(), torch.zeros(3, 4)
    batch = {"x": x}
    random.seed(0)
    costs = kedge.sites(model, batch)
    random.seed(0)
    called = [f"layers.{i}" for i in range(8) if random.random() < 0.5]

    assert [row.path for row in costs] == ["", *called]
    assert all(row.forward > 0 for row in costs)
    assert batch["x"] is x
    assert not x.any()
    assert not model.seen


class Late(nn.Module):
    """A model that makes a layer and a parameter in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 4] to [n, 4]."""
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))
        return self.layer(x) * self.scale


def test_modules_made_in_a_call_are_taken_away_with_its_parameters() -> None:
    """Else the model would have one without the other."""
    model = Late()
    kedge.sites(model, torch.ones(2, 4))
    assert not list(model.children())
    model(torch.ones(2, 4))


def test_a_lazy_module_stays_what_its_first_call_made_it() -> None:
    """With its parameters, buffers and attributes."""
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    assert kedge.sites(model, torch.randn(4, 3))["0"].parameters == 20
    assert type(model[0]) is nn.Linear
    assert (model[0].in_features, model[1].num_features) == (3, 5)


@pytest.mark.parametrize(
    "look",
    [
        kedge.sites,
        kedge.examine,
        kedge.operations,
        lambda model, x: kedge.saved(model)(x),
        lambda model, x: kedge.recipes.saliency(model, 1)(x),
    ],
    ids=["sites", "examine", "operations", "saved", "saliency"],
)
def test_a_first_call_may_give_buffers_their_values(look: Any) -> None:
    """Those of lazy modules have none to be copied before."""
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    look(model, torch.randn(4, 3))
    assert (model[0].in_features, model[1].num_features) == (3, 5)


def test_modules_in_torchscript_have_no_row() -> None:
    """They run without hooks; a model that is one is refused."""
    scripted = torch.jit.script(nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    costs = kedge.sites(model, torch.randn(3, 4))
    assert [row.path for row in costs] == ["", "0"]
    assert int(scripted.num_batches_tracked) == 0
    with pytest.raises(WrongCall, match="TorchScript"):
        kedge.sites(scripted, torch.randn(3, 4))
    assert kedge.saved(scripted)(torch.randn(3, 4)).total.bytes > 0


class Cache:
    """What a model has seen, in an object, as a cache of keys and values."""

    def __init__(self) -> None:
        self.layers = [torch.ones(1, 4)]


class Cached(nn.Module):
    """A model whose cache grows with each call."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Return all that was seen."""
        cache.layers[0] = torch.cat([cache.layers[0], x])
        return cache.layers[0]


def test_objects_among_the_arguments_are_put_back() -> None:
    """Each call finds the same content, and so does the program afterwards."""
    cache = Cache()
    costs = kedge.sites(Cached(), torch.ones(2, 4), cache=cache)
    assert costs[""].outputs == ((3, 4),)
    assert len(cache.layers[0]) == 1


class Proxy:
    """Stands for an object that is not there."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("working outside of a request")


def test_objects_that_cannot_be_read_are_left_alone() -> None:
    """Among the arguments, and as attributes of a module, which may also be run again."""

    class Asking(nn.Linear):
        def forward(self, x: Tensor, request: Any = None) -> Tensor:
            return super().forward(x).tanh()

    model = nn.Sequential(Asking(64, 64))
    model[0].request = Proxy()
    assert len(kedge.sites(model[0], torch.ones(2, 64), Proxy())) == 1
    with kedge.offload(model, recompute="0") as account:
        model(torch.ones(512, 64)).sum().backward()
    assert account.total.repeats == 1
