"""What cannot be watched costs only itself, and is reported once with its cause; everything after it is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kedge.testing import assert_same_bits
from tests.watch.watched import descend, net, watched


class Refusing(nn.Linear):
    """A layer that takes no hooks."""

    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no hooks here")

    register_forward_pre_hook = register_forward_hook


class Nameless(nn.Linear):
    """A layer whose methods and operators all raise, or lie."""

    def _refused(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("not here")

    named_modules = named_children = named_parameters = children = modules = parameters = (
        buffers
    ) = _refused
    __eq__ = __hash__ = __bool__ = __iter__ = __repr__ = extra_repr = _refused

    def __len__(self) -> int:
        return 0


class Untabled(nn.Linear):
    """A layer whose table of modules cannot be read by others."""

    def __getattribute__(self, name: str) -> Any:
        if name == "_modules" and self.__dict__.get("closed"):
            raise KeyError("closed\nfor good")
        return super().__getattribute__(name)


class UntoldError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Untold(nn.Linear):
    """A layer that refuses hooks with such an error."""

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        raise UntoldError


class Own(torch.Tensor):
    """A tensor that answers to nobody but PyTorch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.closed:
            raise TypeError("not for you")
        return super().__torch_function__(func, types, args, kwargs or {})

    closed = False


def train(layer: nn.Module, params: list[nn.Parameter], x: Tensor, steps: int = 2) -> None:
    """Train a few steps."""
    optimizer = torch.optim.SGD(params, 0.01)
    layer.__dict__["closed"] = True
    for _ in range(steps):
        optimizer.zero_grad()
        layer(x).pow(2).mean().backward()
        optimizer.step()


def a_layer(kind: type[nn.Linear]) -> Callable[[], None]:
    """Return a program that trains one layer."""

    def program() -> None:
        layer = kind(4, 4)
        train(layer, [layer.weight, layer.bias], torch.ones(2, 4))

    return program


def a_part(kind: type[nn.Linear]) -> Callable[[], None]:
    """Return a program that trains a model with such a layer."""

    def program() -> None:
        first, part = nn.Linear(4, 4), kind(4, 4)
        train(nn.Sequential(first, part), [first.weight], torch.ones(2, 4))

    return program


def on_meta() -> None:
    """Train without data."""
    layer = nn.Linear(4, 4, device="meta")
    train(layer, list(layer.parameters()), torch.ones(2, 4, device="meta"))


def in_part_on_meta() -> None:
    """Train a model of which a part has no data."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.meta = nn.Linear(4, 4), nn.Linear(4, 4, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return self.real(x)

    mixed = Mixed()
    train(mixed, list(mixed.parameters()), torch.ones(2, 4))


def fake() -> None:
    """Train on fake tensors."""
    with FakeTensorMode():
        layer = nn.Linear(4, 4)
        train(layer, list(layer.parameters()), torch.ones(2, 4))


LOST: dict[str, tuple[Callable[[], None], list[str]]] = {
    "meta": (on_meta, []),
    "a part on meta": (in_part_on_meta, []),
    "fake": (fake, []),
    "methods that raise": (a_layer(Nameless), []),
    "a part whose methods raise": (a_part(Nameless), []),
    "no hooks": (
        a_layer(Refusing),
        ["[kedge] the model Refusing cannot be watched: RuntimeError: no hooks here ("],
    ),
    "a part without hooks": (
        a_part(Refusing),
        [
            "[kedge] 1 in Sequential cannot be watched: RuntimeError: no hooks here (",
            "[kedge] the calls inside Sequential cannot be watched: RuntimeError: no hooks here (",
        ],
    ),
    "an error without a text": (
        a_layer(Untold),
        ["[kedge] the model Untold cannot be watched: UntoldError ("],
    ),
    "a closed table": (
        a_layer(Untabled),
        [r"[kedge] the model Untabled cannot be watched: KeyError: 'closed\nfor good' ("],
    ),
}


@pytest.mark.parametrize(("program", "told"), LOST.values(), ids=LOST.keys())
def test_one_thing_costs_itself_alone(
    program: Callable[[], None], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The model that is trained afterwards is measured in every step, with the bits of a run without Kedge."""
    torch.manual_seed(0)
    plain = net()
    descend(plain, 4)
    torch.manual_seed(0)
    model = net()

    def both(watch: Any) -> None:
        with torch.random.fork_rng():
            program()
        descend(model, 4)

    log = watched(both)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, begun in zip(lines, told, strict=True):
        assert line.startswith(begun)
        assert line.endswith("; everything else is")
    named = {entry["id"]: entry["site"] for entry in log.entries}
    measured = {(named[row["site"]], row["step"]) for row in log.rows}
    assert len([step for site, step in measured if site.endswith("0:out")]) >= 4
    assert_same_bits(model.state_dict(), plain.state_dict())
    unseen = [event["detail"]["name"] for event in log.events if event["kind"] == "unseen"]
    assert len(unseen) == len(told)


def test_a_value_that_cannot_be_described_does_not_end_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tensor of the program's class raises at whatever it is asked."""

    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x).as_subclass(Own)
            Own.closed = True
            return out

    def program(watch: Any) -> None:
        Closing()(torch.ones(2, 4))
        Own.closed = False
        descend(net(), 3)

    try:
        log = watched(program)
    finally:
        Own.closed = False
    assert max(row["step"] for row in log.rows) == 2
    capsys.readouterr()


def test_a_thread_that_trains_while_the_watch_ends_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Work that waited for its turn while the watch ended is not begun any more."""
    began, ended = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def train_late(watch: Any) -> None:
        began.set()
        watch._on_first_call(nn.Linear(4, 4), ())
        ended.set()

    def program(watch: Any) -> None:
        descend(net(), 2)
        end = watch.record.end

        def wait(*args: Any) -> Any:  # the thread arrives while the watch ends and holds the lock
            threads.append(threading.Thread(target=train_late, args=(watch,)))
            threads[0].start()
            began.wait()
            return end(*args)

        watch.record.end = wait

    watched(program)
    threads[0].join()
    assert ended.is_set()
    assert capsys.readouterr().err == ""
