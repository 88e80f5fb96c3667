"""Keepers of saved tensors and threads: PyTorch's hooks hold on one thread alone, a keeper on all that call the model."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from kedge.hooks.saved.keeper import SavingPlace, keep
from kedge.hooks.saved.pairs import pair_stack

top = torch._C._autograd._top_saved_tensors_default_hooks


class ByThread:
    """A keeper that takes everything, and writes down in which thread and place."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None, int]] = []

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        self.seen.append((threading.current_thread().name, place.path, place.call))
        return [value.detach().clone()]

    def unpack(self, packed: Any) -> Tensor:
        found: Tensor = packed[0]
        return found


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).tanh()).exp()


FORWARD = [("", 0), ("fc", 1), ("fc", 1), ("", 0)]


@pytest.fixture
def switching() -> Iterator[None]:
    """Switch between threads as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], None], number: int = 4) -> None:
    """Run a function at the same time in several threads, raising what one of them raises."""
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), name=f"worker-{i}") for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def replicas(model: nn.Module, number: int) -> list[nn.Module]:
    """Make replicas as `DataParallel` does: their hooks are those of the model."""
    made = []
    for _ in range(number):
        replica = model._replicate_for_data_parallel()  # type: ignore[operator]
        for name, child in model._modules.items():
            if child is not None:
                twin = child._replicate_for_data_parallel()  # type: ignore[operator]
                twin._parameters = dict(child._parameters)
                replica._modules[name] = twin
        made.append(replica)
    return made


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ambient", [True, False])
def test_each_thread_that_calls_the_model_is_seen(ambient: bool, shared: bool) -> None:
    """The model itself, or its replicas, called from several threads: each call is seen, with its own places."""
    model, keeper = Twice(), ByThread()
    plain = copy.deepcopy(model)
    inputs = [torch.full((2, 3), float(i)) for i in range(4)]
    for x in inputs:
        plain(x).sum().backward()
    found: list[Any] = [None] * 4
    left: list[Any] = []
    with ExitStack() as stack:
        keep(stack, model, keeper, ambient=ambient)
        models = [model] * 4 if shared else replicas(model, 4)

        def work(i: int) -> None:
            assert top(True) is None
            for _ in range(3):
                found[i] = torch.autograd.grad(models[i](inputs[i]).sum(), list(model.parameters()))
            left.append((top(True), pair_stack.pairs, pair_stack.lives))

        in_threads(work)

    for i in range(4):
        mine = [(path, call) for thread, path, call in keeper.seen if thread == f"worker-{i}"]
        assert len(mine) == 3 * len(mine[: len(mine) // 3])
        assert {path for path, _ in mine} == {"", "fc"}
        assert {call for path, call in mine if path == "fc"} == {0, 1}
    assert left == [(None, [], [])] * 4
    for i, param in enumerate(plain.parameters()):
        assert torch.allclose(sum(grads[i] for grads in found), param.grad)


def test_a_pair_of_that_thread_comes_first() -> None:
    """A pair that a thread of the program has put around its call keeps what it takes."""
    model, keeper = Twice(), ByThread()

    def work(i: int) -> None:
        with save_on_cpu():
            model(torch.ones(1, 3)).sum().backward()
        assert top(True) is None

    with ExitStack() as stack:
        keep(stack, model, keeper, ambient=True)
        in_threads(work, 1)

    assert keeper.seen == []


def test_a_failure_in_a_thread_leaves_nothing_there() -> None:
    """An exception in a forward on another thread takes the pair off with the call."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2))
    left: list[Any] = []

    def work(i: int) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 3))
        left.append((top(True), pair_stack.pairs, pair_stack.lives))

    with ExitStack() as stack:
        keep(stack, model, ByThread(), ambient=True)
        in_threads(work, 2)

    assert left == [(None, [], [])] * 2


def test_a_block_that_ends_while_a_thread_is_inside_a_call() -> None:
    """The thread finishes as if there were no keeper, and at its next save nothing is left on it."""
    model, keeper, stack = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ByThread(), ExitStack()
    inside, ended = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert ended.wait(30)

    model[0].register_forward_hook(wait)
    left: list[Any] = []

    def work(i: int) -> None:
        model(torch.ones(1, 3)).exp().sum().backward()
        left.append((top(True), pair_stack.pairs, pair_stack.lives))

    keep(stack, model, keeper, ambient=True)
    thread = threading.Thread(target=in_threads, args=(work, 1))
    thread.start()
    assert inside.wait(30)
    stack.close()
    ended.set()
    thread.join()

    assert [path for _, path, _ in keeper.seen] == ["0"]
    assert left == [(None, [], [])]
    assert all(p.grad is not None for p in model.parameters())


def test_a_backward_in_another_thread_unpacks_there() -> None:
    """What one thread has packed another one may unpack."""
    model, keeper = Twice(), ByThread()
    model(torch.ones(1, 3)).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with ExitStack() as stack:
        keep(stack, model, keeper, ambient=True)
        loss = model(torch.ones(1, 3)).sum()
        in_threads(lambda i: loss.backward(), 1)

    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(plain, model.parameters(), strict=True)
        if p.grad is not None
    )
