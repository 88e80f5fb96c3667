"""The names of models: those of the variables that hold them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from kedge.frames import variables_of
from kedge.watch.models.variables import names_in_frames
from tests.watch.watched import Memory, watch


def net() -> nn.Module:
    """Return a small model."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def call(*models: nn.Module) -> None:
    """Call each model, from a function in which all have one name."""
    for model in models:
        model(torch.randn(3, 4))


def optimizer_of(*models: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of several models."""
    return torch.optim.SGD([param for model in models for param in model.parameters()], 0.01)


def step(optimizer: torch.optim.Optimizer, *models: nn.Module) -> None:
    """Train models for a step."""
    for model in models:
        model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Trainer:
    """Holds two models, and calls them as one name."""

    def __init__(self) -> None:
        self.generator = net()
        self._critic = net()
        self.optimizer = optimizer_of(self.generator, self._critic)

    def train(self) -> None:
        """Train both for a step."""
        step(self.optimizer, self.generator, self._critic)


class System(nn.Module):
    """Holds two models, and is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = net()
        self.heads = nn.ModuleList([net(), net()])


def variables() -> None:
    """Train two models with an optimizer each."""
    first, second = net(), net()
    optimizers = optimizer_of(first), optimizer_of(second)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        step(optimizer, model)


def one_model() -> None:
    """Train a model with a criterion, and look at another one."""
    model = net()
    criterion = nn.MSELoss()
    teacher = net()
    optimizer = optimizer_of(model)
    target = teacher(torch.randn(3, 4)).detach()
    criterion(model(torch.randn(3, 4)), target).backward()
    optimizer.step()


def loose_tensor() -> None:
    """Train a model and a tensor beside it."""
    model = net()
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.01)
    for _ in range(6):
        optimizer.zero_grad()
        (model(torch.randn(3, 4)) * scale).square().mean().backward()
        optimizer.step()


def attributes() -> None:
    """Train two models that an object holds."""
    trainer = Trainer()
    trainer.train()


def in_a_module() -> None:
    """Train the parts of a module by their own calls."""
    system = System()
    step(optimizer_of(system), system.encoder, *system.heads)


def containers() -> None:
    """Train models in a list and in a dict."""
    nets = [net(), net()]
    others = {"critic": net(), "a/b": net()}
    step(optimizer_of(*nets, *others.values()), *nets, *others.values())


def folds() -> None:
    """Train a model under one name after the other."""
    for _ in range(3):
        model = net()
        step(optimizer_of(model), model)
        del model
        gc.collect()


def wrapped() -> None:
    """Train two models inside of wrappers."""
    left = nn.DataParallel(net())
    right = nn.DataParallel(net())
    step(optimizer_of(left, right), left, right)


def as_the_loss() -> None:
    """Use the name of the recorded losses, and one of a child."""
    loss = nn.MSELoss()
    model = System()
    optimizer = optimizer_of(model)
    optimizer.zero_grad()
    encoder = net()
    call(nn.Sequential(model.encoder, model.heads[0], model.heads[1]))
    target = encoder(torch.randn(3, 4)).detach()
    loss(model.encoder(torch.randn(3, 4)), target).backward()


def aliases() -> None:
    """Bind further names to a model, in a loop and by itself."""
    generator, critic = net(), net()
    for g in (generator, critic):
        g.train()
    f = generator
    step(optimizer_of(generator, critic), f, critic)


class Proxy:
    """Stands for an object that is not there."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("working outside of a request")


class Pair(NamedTuple):
    """Two models with names."""

    left: nn.Module
    right: nn.Module


def named_containers() -> None:
    """Train models in containers whose items have names."""
    pair = Pair(net(), net())
    ordered = OrderedDict(teacher=net())
    made = defaultdict(net)
    optimizer = optimizer_of(*pair, ordered["teacher"], made["student"])
    step(optimizer, *pair, ordered["teacher"], made["student"])


def executed_text() -> None:
    """Execute a text in a namespace of its own, as some notebooks do."""
    text = """if True:
        nets = {"one": net(), "two": net()}
        optimizer = optimizer_of(*nets.values())
        for each in nets.values():
            step(optimizer, each)
    """
    namespace = {"net": net, "optimizer_of": optimizer_of, "step": step}
    exec(text, namespace)


def odd_objects() -> None:
    """Have variables whose attributes cannot be read, or are no names."""
    proxy = Proxy()
    odd = Trainer()
    vars(odd)[7] = odd.generator
    vars(odd)["a b"] = odd.generator
    recursive: list[Any] = []
    recursive.append(recursive)
    own = [nn.Tanh()]
    call(*own)
    assert [proxy, odd, recursive]


def held_nowhere() -> None:
    """Call models that no variable holds."""
    list(map(torch.no_grad()(nn.Module.__call__), [net()], [torch.randn(3, 4)]))
    list(map(nn.Module.__call__, frozenset([nn.Tanh()]), [torch.randn(3, 4)]))


PROGRAMS: dict[str, tuple[Callable[[], None], list[tuple[str, str]]]] = {
    "variables of the outermost function": (variables, [("first", "first"), ("second", "second")]),
    "plain names of one model": (
        one_model, [("teacher", "teacher"), ("Sequential", ""), ("criterion", "criterion")],
    ),
    "plain names beside a tensor": (loose_tensor, [("Sequential", ""), ("tensors", "tensors")]),
    "attributes of an object": (attributes, [("generator", "generator"), ("_critic", "_critic")]),
    "attributes of a module": (
        in_a_module, [(name, name) for name in ("encoder", "heads.0", "heads.1")],
    ),
    "items of a list and a dict": (
        containers,
        [(name, name) for name in ("nets.0", "nets.1", "others.critic", "models.3")],
    ),
    "items with names": (
        named_containers,
        [(name, name) for name in ("pair.left", "pair.right", "ordered.teacher", "made.student")],
    ),
    "variables of executed text": (
        executed_text, [("nets.one", "nets.one"), ("nets.two", "nets.two")],
    ),
    "one name again and again": (
        folds, [("model", ""), ("model_2", "model_2"), ("model_3", "model_3")],
    ),
    "in wrappers": (wrapped, [("left", "left"), ("right", "right")]),
    "aliases come later": (aliases, [("generator", "generator"), ("critic", "critic")]),
    "odd objects": (odd_objects, [("own.0", "own.0")]),
    "class names": (held_nowhere, [("Sequential", ""), ("Tanh", "Tanh")]),
}  # fmt: skip
"""Programs, and the names and prefixes of their roots in the order of the first calls."""


def names(log: Memory) -> list[tuple[str, str]]:
    """Return name and prefix of each root."""
    return [(root["name"], root["prefix"]) for root in log.roots]


@pytest.mark.parametrize(("program", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_model_is_named_after_its_variable(
    program: Callable[[], None], expected: list[tuple[str, str]]
) -> None:
    """Also in a second run of the program."""
    gc.collect()  # optimizers of other tests would train others
    assert names(watch(program, every=1)) == expected
    gc.collect()
    assert names(watch(program, every=1)) == expected


def test_sites_are_told_apart_whatever_the_variables_are_called() -> None:
    """A variable is not the name where paths begin with it already, nor if the losses are called so."""
    gc.collect()
    log = watch(as_the_loss, every=1)
    assert names(log) == [
        ("Sequential", ""), ("encoder", "encoder"), ("MSELoss", "MSELoss"),
    ]  # fmt: skip
    texts = log.texts()
    assert len(texts) == len(set(texts))


def test_the_program_comes_before_a_library(tmp_path: Any, monkeypatch: Any) -> None:
    """The loop of an installed package calls the model as it likes; its variables count if no other holds it."""
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "loops.py").write_text("def fit(model, x):\n    return model(x)\n")
    monkeypatch.syspath_prepend(str(package))
    loops = __import__("loops")

    def program() -> None:
        own = nn.Tanh()
        loops.fit(own, torch.ones(2))
        loops.fit(nn.Sigmoid(), torch.ones(2))

    assert names(watch(program)) == [("own", "own"), ("model", "model")]


def test_reading_variables_keeps_nothing_alive() -> None:
    """A value of a running function is gone when the function drops it."""

    def look(frame: Any) -> None:
        assert names_in_frames([frame.f_globals]) == {}

    def program() -> Iterator[Any]:
        value = nn.Linear(1, 1)
        gone = weakref.ref(value)
        look(sys._getframe())
        del value
        yield gone()

    assert list(program()) == [None]


def test_a_function_that_asks_for_its_variables_sees_no_others() -> None:
    """What it keeps of them stays as it is."""

    def program() -> dict[str, Any]:
        options = locals()
        later = 1
        variables_of(sys._getframe())
        return options if later else {}

    assert program() == {}
