"""Kedge's own operations are no part of the program: its modes, profilers and pairs of hooks do not see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kedge
from kedge.torch_internals.own_work import OwnWork, is_watched, own_work, programs_work

pytestmark = [
    pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning"),
    pytest.mark.filterwarnings("ignore::kedge.errors.NothingGained"),
]

Around = Callable[[nn.Module], AbstractContextManager[Any]]


class Net(nn.Module):
    """Layers that work in place, keep running statistics, and call operations in their own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.norm = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Twice through an operation of its own."""
        return self.last(F.gelu(torch.tanh(self.norm(self.act(self.first(x))))) * 2)


class Dispatched(TorchDispatchMode):
    """Counts the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts the functions that it sees, and the attributes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        self.seen[f"{owner}.{func.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps."""
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def by_dispatch(run: Callable[[], None]) -> Any:
    """Count the operations that a dispatch mode sees."""
    with Dispatched() as mode:
        run()
    return mode.seen


def by_function(run: Callable[[], None]) -> Any:
    """Count the calls that a function mode sees."""
    with Called() as mode:
        run()
    return mode.seen


def by_flops(run: Callable[[], None]) -> Any:
    """Count floating-point operations."""
    with FlopCounterMode(display=False) as mode:
        run()
    return mode.get_total_flops()


def by_profiler(run: Callable[[], None]) -> Any:
    """Count the events of a profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return Counter({event.key: event.count for event in found.key_averages()})


def by_old_profiler(run: Callable[[], None]) -> Any:
    """Count the events of the older one."""
    with torch.autograd.profiler.profile(use_kineto=False) as found:
        run()
    return Counter(event.name for event in found.function_events)


def by_saved(run: Callable[[], None]) -> Any:
    """Count the calls of a pair of the program's own."""
    seen: Counter[str] = Counter()

    def pack(value: Tensor) -> Tensor:
        seen["packed"] += 1
        return value

    def unpack(value: Tensor) -> Tensor:
        seen["unpacked"] += 1
        return value

    with saved_tensors_hooks(pack, unpack):
        run()
    return seen


COUNTERS = {
    each.__name__: each
    for each in (by_dispatch, by_function, by_flops, by_profiler, by_old_profiler, by_saved)
}
ALL = "**:out, **:in, **:out.grad, **:in.grad, **:param, **:param.grad, **:param.acc"
OBSERVERS: dict[str, Around] = {
    "measure": lambda model: kedge.hook(model, ALL, kedge.measure()),
    "share": lambda model: kedge.hook(model, "**:in.share", kedge.measure()),
    "record": lambda model: kedge.hook(model, ALL, kedge.record()),
    "copies": lambda model: kedge.hook(model, ALL, kedge.record(copy=True)),
    "error_if": lambda model: kedge.hook(model, ALL, kedge.error_if(kedge.nonfinite)),
    "operations": lambda model: kedge.hook(
        model, "**/*:out, **/*:in, **/*:out.grad", kedge.record()
    ),
    "measured operations": lambda model: kedge.hook(model, "**/*:out", kedge.measure()),
    "everywhere": lambda model: kedge.hook(kedge.everywhere, "**:out", kedge.measure()),
    "tensors": lambda model: kedge.hook(
        {"w": next(model.parameters())}, "w:grad, w:acc", kedge.record()
    ),
}
KEEPERS: dict[str, Around] = {
    "saved": lambda model: kedge.hook(model, "**:saved", kedge.measure()),
    "a block": lambda model: kedge.hook(":saved", kedge.measure()),
    "rebuild": lambda model: kedge.offload(model, min_bytes=1),
    "disk": lambda model: kedge.offload(model, to=kedge.Disk(), min_bytes=1),
    "memory": lambda model: kedge.offload(to=kedge.Cpu(), min_bytes=1),
}


def plain(model: nn.Module) -> AbstractContextManager[Any]:
    """Hook nothing."""
    return nullcontext()


def counted(count: Callable[..., Any], around: Around, *, inside: bool) -> Any:
    """Return what is counted in two steps of a new model."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    if inside:

        def run() -> None:
            with around(model):
                train(model, optimizer)

        return count(run)
    with around(model):
        return count(lambda: train(model, optimizer))


@pytest.mark.parametrize("inside", [False, True], ids=["hooked before", "hooked inside"])
@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_what_the_program_counts_is_the_same_with_observers(
    observer: str, name: str, inside: bool
) -> None:
    """Whether the hooks were there before the mode or profiler, or came inside of it."""
    found = counted(COUNTERS[name], OBSERVERS[observer], inside=inside)

    assert found == counted(COUNTERS[name], plain, inside=inside)


@pytest.mark.parametrize("inside", [False, True], ids=["hooked before", "hooked inside"])
@pytest.mark.parametrize("name", [name for name in COUNTERS if name != "by_saved"])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_the_program_counts_is_the_same_while_saved_tensors_are_kept(
    keeper: str, name: str, inside: bool
) -> None:
    """They are looked at, moved and rebuilt below the program's modes; with any pair of hooks PyTorch calls `detach` more."""
    found = counted(COUNTERS[name], KEEPERS[keeper], inside=inside)
    known = counted(COUNTERS[name], plain, inside=inside)
    if name == "by_dispatch":
        found.pop("aten.detach.default")
        known.pop("aten.detach.default")

    assert found == known


@pytest.mark.parametrize("count", [by_dispatch, by_function, by_profiler])
@pytest.mark.parametrize(
    "action",
    [
        lambda value: value * 1,
        kedge.scale(1.0),
        kedge.error_if(lambda value: bool((value * 1).isnan().any())),
    ],
    ids=["a function", "an edit", "a condition"],
)
def test_operations_of_the_programs_own_are_seen(count: Callable[..., Any], action: Any) -> None:
    """A user's function, and an edit, are part of what the program computes."""
    found = counted(count, lambda model: kedge.hook(model, "first:out", action), inside=False)

    assert sum(found.values()) > sum(counted(count, plain, inside=False).values())


def test_a_mode_that_refuses_operations_does_not_matter() -> None:
    """Kedge's operations do not reach it."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert not any(
                name in str(func)
                for name in ("isfinite", "eq.", "ne.", "abs", "amax", "clone", "all.")
            )
            return func(*args, **(kwargs or {}))

    model = Net().eval()
    with Refusing(), kedge.session() as session:
        session.hook(model, "**:out", kedge.record(copy=True))
        session.hook(model, "**:out", kedge.error_if(kedge.nonfinite))
        model(torch.randn(2, 6))


def test_modes_are_put_back_in_their_order_whatever_happens() -> None:
    """Also after an error, and with a mode that the program's part has left on the stack."""
    outer, inner, function = Dispatched(), Dispatched(), Called()
    with outer, inner, function:
        with pytest.raises(ZeroDivisionError), OwnWork(), programs_work():
            torch.ones(2).add(1)
            raise ZeroDivisionError
        assert is_watched()
        with own_work():
            assert not is_watched()
            with own_work():  # one is enough
                torch.ones(2).mul(2)
            torch.ones(2).mul(2)
        torch.ones(2).sub(1)
    assert not is_watched()
    assert "aten.mul.Tensor" not in outer.seen
    assert outer.seen == inner.seen
    assert outer.seen["aten.sub.Tensor"] == outer.seen["aten.add.Tensor"] == 1


def test_modes_in_which_tensors_have_no_data_stay_in_force() -> None:
    """What belongs to PyTorch's own machinery is not taken off, and subclasses work as ever."""
    with FakeTensorMode(), Dispatched() as mode, own_work():
        made = torch.ones(2) + 1
    assert type(made).__name__ == "FakeTensor"
    assert not mode.seen


def test_a_subclass_is_recorded_as_it_is() -> None:
    """Its `__torch_function__` is called below the modes, too."""

    class Marked(Tensor):
        pass

    model = nn.Identity()
    with Called(), kedge.hook(model, ":out", kedge.record()) as acts:
        model(torch.ones(2).as_subclass(Marked))
    assert type(acts[""]) is Marked
