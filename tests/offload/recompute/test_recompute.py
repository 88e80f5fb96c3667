"""Modules that `kedge.offload` runs again in backward: gradients and state are those of the bare program."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.recompute.call import RecomputedCall
from tests.hook_tables import hook_tables
from tests.offload.recompute.programs import (
    SIZE,
    Residual,
    assert_same,
    blocks,
    check,
    plain_step,
    run,
    x_of,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "rebuild": {},
    "disk": {"to": kedge.Disk()},
    "disk, nothing rebuilt": {"to": kedge.Disk(rebuild=False)},
    "disk, a limit": {"to": kedge.Disk(), "max_memory": 4096},
    "disk, no memory": {"to": kedge.Disk(), "max_memory": 0},
    "a limit": {"max_memory": 1 << 20},
    "a slowdown": {"to": kedge.Disk(), "max_slowdown": 2.0},
    "cpu": {"to": kedge.Cpu()},
    "some": {"where": "1.**", "to": kedge.Disk()},
}


@pytest.mark.filterwarnings("ignore::kedge.errors.NothingGained")
@pytest.mark.filterwarnings("ignore::kedge.errors.LimitOutOfReach")
@pytest.mark.parametrize("recompute", ["[0-2]", "[02]", "1.up, 2.*", "**", "[0-2].**", ""])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_and_state_are_those_of_the_bare_program(options: str, recompute: str) -> None:
    """Whatever is named, and wherever the rest goes."""
    account = check(blocks, recompute, steps=5, **OPTIONS[options])
    assert account.total.recomputed.number == account.total.repeats
    assert account.total.recomputed.bytes > 0


def test_outcomes() -> None:
    """Each call is counted once, with what it saved and did not keep; norms and dropout save more than the input."""
    account = check(blocks, "[0-2]", steps=2)
    assert {path for path in account.rows if account.module(path).repeats} == {
        "0",
        "1",
        "2",
    }
    one = account.module("1")
    assert (one.recomputed.number, one.repeats) == (2, 2)
    assert one.recomputed.bytes // 2 >= 4 * x_of().nbytes
    assert one.repeating > 0
    assert "recomputed 3 module calls a step" in str(account)


class Meter:
    """A running mean, as programs keep it beside their modules."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, [0.0]

    def update(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.values.append(value)


class WithState(nn.Module):
    """A block that counts its calls, keeps what it saw, takes turns, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.calls = 0
        self.seen: list[int] = []
        self.by_name: dict[str, int] = {}
        self.in_turn = {"one": 0.1, "two": 0.2, "three": 0.3}
        self.meter = Meter()
        self.nested = [[0], {"a": (1, [2])}]
        self.last: Tensor | None = None
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("table", torch.ones(SIZE))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        """Return something that depends on all of it."""
        self.calls += 1
        self.seen.append(self.calls)
        self.meter.update(float(self.calls))
        self.meter_values = list(self.meter.values)
        self.nested[0].append(len(self.nested[0]))
        self.nested[1]["a"][1].append(self.calls)  # type: ignore[call-overload]
        self.by_name["calls"] = self.by_name.get("calls", 0) + len(self.seen)
        turn = next(iter(self.in_turn))
        self.in_turn[turn] = self.in_turn.pop(turn)  # at the end now
        scale = (
            self.meter.total
            + random.random()
            + np.random.rand()  # noqa: NPY002
            + self.calls
            + self.by_name["calls"]
            + self.in_turn[turn]
        )
        y = torch.tanh(self.inner(x + self.mean * scale)) * self.table
        if self.last is not None:
            y = y + 0.1 * self.last
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0))
        self.table = self.table * 1.01
        noise = torch.rand(SIZE, generator=self.generator)
        self.last = (y * noise).detach()
        return torch.nn.functional.gelu(y * noise) + torch.rand_like(y)


def test_state_of_a_module_is_as_if_it_ran_once() -> None:
    """Counters, lists, the order of a dict, buffers changed and replaced, and all generators."""
    check(lambda: nn.Sequential(WithState(), WithState(), nn.Linear(SIZE, 4)), "[01]", steps=4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(momentum: float | None) -> None:
    """Its running statistics are those of one run, also with two forwards before the backward."""

    def make() -> nn.Module:
        norm = lambda size: nn.BatchNorm1d(size, momentum=momentum)
        return nn.Sequential(Residual(norm), Residual(norm))

    def twice(model: nn.Module) -> None:
        a, b = model(x_of(1)), model(x_of(2))
        a.square().sum().backward()
        b.sum().backward()

    def evaluated(model: nn.Module) -> None:
        model.train()
        plain_step(model)
        model.eval()
        plain_step(model)

    check(make)
    check(make, step=twice, to=kedge.Disk())
    check(make, step=evaluated, steps=2)


def test_a_shared_module_called_twice() -> None:
    """Each of its calls is recomputed by itself."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual(nn.BatchNorm1d)
            self.again = self.block

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.again(torch.relu(self.block(x)))
            return y

    account = check(Twice, "block", to=kedge.Disk())
    assert account.total.recomputed.number == account.total.repeats == 6


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        """Call itself twice."""
        y = torch.tanh(self.inner(x))
        if depth:
            y = y * self(y, depth - 1) + self(x, depth=depth - 1)
        return y


@pytest.mark.parametrize("inside", [True, False])
def test_a_module_that_calls_itself(inside: bool) -> None:
    """Also with a backward after the block, whose hooks are gone then."""
    bare, _ = run(lambda: nn.Sequential(Recursive()))

    def step(model: nn.Module) -> None:
        with kedge.offload(model, recompute="0", min_bytes=0) as account:
            loss = model(x_of()).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert account.total.recomputed.number == 7

    found, _ = run(lambda: nn.Sequential(Recursive()), step)
    assert_same(bare, found)


def test_backward_after_the_block() -> None:
    """Named modules inside of named modules are run again as they ran, and compared."""

    def step(model: nn.Module) -> None:
        with kedge.offload(model, recompute="[0-2].**", to=kedge.Disk(), min_bytes=0):
            loss = model(x_of()).square().sum()
        loss.backward()

    found, _ = run(blocks, step)
    bare, _ = run(blocks)
    assert_same(bare, found)


def test_a_wrapped_layer() -> None:
    """Its calls are run again; the path of the layer itself is empty."""

    def wrapped() -> nn.Module:
        model: Any = blocks()
        for i in range(3):
            model[i] = kedge.offload(model[i], recompute="", to=kedge.Disk(), min_bytes=0)
        return model  # type: ignore[no-any-return]

    bare, _ = run(blocks)
    found, _ = run(wrapped)
    assert_same(bare, found)


def test_containers_keywords_and_one_tensor_in_several_places() -> None:
    """Inputs come again in the same structure; a list that the call appends to is not appended to again."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(SIZE, SIZE)

        def forward(
            self, q: Tensor, held: dict[str, Any], *, kv: Tensor, out: list[Tensor], note: str
        ) -> tuple[Tensor, dict[str, Any]]:
            y = torch.tanh(self.mix(q)) * held["pair"][0] * held["pair"][1]
            y = y * 2 if q is kv and kv is held["pair"][0] else y * 3
            out.append(y)
            return y, {"note": note, "y": [y.sin(), None]}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(SIZE, SIZE)
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            out: list[Tensor] = []
            y, more = self.inner(h, {"pair": (h, x)}, kv=h, out=out, note="a")
            assert len(out) == 1
            self.length = len(out)
            return y + more["y"][0] + out[0]

    for to in (kedge.Rebuild(), kedge.Disk()):
        check(Outer, "inner", to=to)


def test_no_grad_and_inference() -> None:
    """There is nothing to do, and nothing is counted."""

    def step(model: nn.Module) -> None:
        with torch.no_grad():
            model(x_of())
        with torch.inference_mode():
            model(x_of())

    account = check(blocks, "[0-2]", step)
    assert not account.total.recomputed.number


def test_an_error_in_the_forward() -> None:
    """The program catches it and goes on."""

    class Fails(Residual):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise ValueError("no")
            return y

    def step(model: Any) -> None:
        model[1].fails = True
        with pytest.raises(ValueError, match="no"):
            model(x_of())
        with pytest.raises(ValueError, match="no"):
            model(x_of())
        model[1].fails = False
        plain_step(model)

    check(lambda: nn.Sequential(Residual(), Fails()), step=step, to=kedge.Disk())


def test_an_interrupt_in_the_forward() -> None:
    """PyTorch calls no hook then; later saves are not those of the call that was left."""

    class Stops(Residual):
        stops = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.stops:
                raise KeyboardInterrupt
            return y

    def step(model: Any) -> None:
        model[1].inner.stops = True
        with pytest.raises(KeyboardInterrupt):
            model(x_of())
        model[1].inner.stops = False
        plain_step(model)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stops()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    for recompute in ("[01], 1.inner", "1", "1.inner"):  # what comes first is named, or is not
        check(lambda: nn.Sequential(Residual(), Around()), recompute, step)

    model = nn.Sequential(Residual(), Around())
    with pytest.raises(KeyboardInterrupt), kedge.offload(model, recompute="[01], 1.inner"):
        model(x_of())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_retained_graphs_and_second_derivatives() -> None:
    """Each backward runs the calls again."""

    def step(model: nn.Module) -> None:
        x = x_of().requires_grad_()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()

    check(blocks, "[0-2]", step)
    check(blocks, "[0-2].**", step, to=kedge.Disk())


def test_a_backward_inside_of_the_forward() -> None:
    """As for an energy whose gradient is the output."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))

        def forward(self, x: Tensor) -> Tensor:
            if not x.requires_grad:
                x = x.clone().requires_grad_()
            energy = self.energy(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x + force

    check(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), Force(), Force()), "[12]")
    # A second run of the module around it ends where this one begins.
    make = lambda: nn.Sequential(nn.Sequential(nn.Linear(SIZE, SIZE), Force()))
    check(make, "0, 0.1", steps=4)

    def step(model: nn.Module) -> None:
        with kedge.offload(model, recompute="0.1", min_bytes=0):
            plain_step(model)

    check(make, "0, 0.1", step, steps=4)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_modes_that_the_call_changes_for_a_while() -> None:
    """A second run that stops in between does not leave them so."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(SIZE)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.eval()
            y: Tensor = self.norm(x)
            self.norm.train()
            return y

    model = nn.Sequential(nn.Linear(SIZE, SIZE), Frozen())
    with kedge.offload(model, recompute="1", min_bytes=0):
        for _ in range(4):
            model(x_of()).square().sum().backward()
            assert model[1].norm.training


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recompute", ["0", "0.inner", "0, 0.inner"])
def test_the_models_own_checkpoints(recompute: str, reentrant: bool) -> None:
    """Inside of a named module, and around one."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual(nn.BatchNorm1d)
            self.other = Residual()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            y: Any = checkpoint(self.inner, x, use_reentrant=reentrant)
            z: Tensor = self.other(y)
            return z

    make = lambda: nn.Sequential(nn.Sequential(), nn.Linear(SIZE, SIZE), Own())
    recompute = recompute.replace("0", "2")
    bare, _ = run(make)
    found, _ = run(
        make, around=lambda model: kedge.offload(model, recompute=recompute, min_bytes=0)
    )
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    keep = [(n, v) for n, v in bare if not n.endswith(statistics)]
    assert_same(keep, [(n, v) for n, v in found if not n.endswith(statistics)])


def test_outputs_changed_in_place() -> None:
    """After the call, where the bare program may do so."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Residual(), nn.Linear(SIZE, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.block(x)
            h += 1
            h.mul_(2)
            y: Tensor = self.last(h)
            return y

    check(Adds, "block")
    check(Adds, "block", to=kedge.Disk())


def test_hooks_of_the_program() -> None:
    """Those of the module change its inputs and outputs once; those inside of it run again, as under PyTorch's checkpoint."""
    heard: list[str] = []

    def make() -> nn.Module:
        model = nn.Sequential(Residual(), Residual())
        block = model[0]
        block.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
        block.register_forward_hook(lambda _m, _a, out: out * 3)
        block.up.register_forward_hook(lambda _m, _a, out: heard.append("up") or out + 1)
        block.register_forward_hook(lambda _m, _a, _o: heard.append("block"), always_call=True)
        return model

    check(make)


class Cache:
    """Keys of all layers, as transformers have them."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []

    def update(self, layer: int, key: Tensor) -> Tensor:
        """Return all keys of a layer, with a new one."""
        while len(self.layers) <= layer:
            self.layers.append({})
        known = self.layers[layer]
        if "key" in known:
            key = torch.cat([known["key"], key])
        known["key"] = key
        return key


class Cached(nn.Module):
    """A layer that writes to a cache."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.fc, self.number = nn.Linear(SIZE, SIZE), number

    def forward(self, x: Tensor, *, cache: Cache | None) -> Tensor:
        """Attend to all keys."""
        key = self.fc(x)
        if cache is not None:
            key = cache.update(self.number, key)
        return torch.softmax(x @ key.T, -1) @ key


class Decoder(nn.Module):
    """Runs its layers twice with one cache, which it keeps or drops."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.layers = nn.ModuleList(Cached(i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        cache = Cache()
        for part in (x[:3], x[3:]):
            y = part
            for layer in self.layers:
                y = layer(y, cache=cache)
        self.lengths = [len(layer["key"]) for layer in cache.layers]
        if self.keeps:
            self._cache = cache
        return y


@pytest.mark.parametrize("keeps", [True, False])
def test_a_cache_that_the_calls_write_to(keeps: bool) -> None:
    """It is as it was when the call began, and has each entry once; also if the program has dropped it."""
    for to in (kedge.Rebuild(), kedge.Disk()):
        check(lambda: Decoder(keeps=keeps), "layers.*", to=to)
    model = Decoder(keeps=True)
    with kedge.offload(model, recompute="layers.*", min_bytes=0):
        model(x_of()).sum().backward()
    assert [len(layer["key"]) for layer in model._cache.layers] == [8, 8, 8]


def test_nothing_is_held_longer_than_its_graph() -> None:
    """Calls and what they saved are freed without Python's garbage collector, also if no backward runs."""

    class Probed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            self.probe = self.up(x)
            self.probes = [self.probe, (self.probe,)]
            alive.append(weakref.ref(self.probe))
            y: Tensor = self.down(torch.tanh(self.probe))
            return y

    alive: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(Probed(), Probed())
    gc.collect()
    gc.disable()
    try:
        with kedge.offload(model, recompute="*", min_bytes=0):
            for backward in (True, True, False, False, False, False):
                loss = model(x_of()).square().sum()
                if backward:
                    loss.backward()
        del loss
        assert sum(each() is not None for each in alive) <= 4  # the newest, and a second run's
        assert sum(type(each) is RecomputedCall for each in gc.get_objects()) <= 2
    finally:
        gc.enable()


class Slotted:
    """Holds a tensor where it is not looked for."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("hold", [Slotted, lambda value: lambda: value, lambda value: (value,)])
def test_what_a_module_holds_is_not_held_longer(hold: Callable[[Tensor], Any]) -> None:
    """The offload knows a module from call to call, and holds no tensor of earlier calls."""

    class Holds(Residual):
        held: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.held = hold(x)
            return super().forward(x)

    alive: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(Residual(), Holds())
    with kedge.offload(model, recompute="1", min_bytes=0):
        for _ in range(4):
            h = model[0](x_of())
            alive.append(weakref.ref(h))
            model[1](h).sum().backward()
    del h
    assert [each() is not None for each in alive] == [False, False, False, True]


def test_parameters_of_a_functional_call_are_not_held() -> None:
    """They may lead to the graph of an inner step of an optimizer."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Residual())
    with kedge.offload(model, recompute="1", min_bytes=0):
        adapted = {name: param * 2 for name, param in model.named_parameters()}
        torch.func.functional_call(model, adapted, (x_of(),)).sum().backward()
        alive = [weakref.ref(each) for each in adapted.values()]
        del adapted
        assert not any(each() is not None for each in alive)


def test_a_normal_number_that_numpy_had_left_over() -> None:
    """NumPy draws two, and returns the second one later: here between forward and backward."""

    def step(model: nn.Module) -> None:
        np.random.randn()  # noqa: NPY002
        loss = model(x_of()).sum()
        np.random.randn()  # noqa: NPY002
        loss.backward()
        found.append(np.random.randn())  # noqa: NPY002

    found: list[float] = []
    check(blocks, "[0-2]", step)
    assert found[:3] == found[3:]


def test_two_offloads_that_name_one_module() -> None:
    """It has one checkpoint."""

    def step(model: nn.Module) -> None:
        with (
            kedge.offload(model, recompute="[12]", min_bytes=0),
            kedge.offload(model, recompute="1, 1.up", to=kedge.Disk(), min_bytes=0),
        ):
            plain_step(model)

    check(blocks, "[0-2]", step)


def test_hooks_are_gone_after_the_block_and_after_a_late_backward() -> None:
    """A second run after the block places them for its length."""
    model = blocks()
    tables = hook_tables(model)
    with kedge.offload(model, recompute="**", min_bytes=0):
        loss = model(x_of()).sum()
    assert hook_tables(model) == tables
    loss.backward()
    assert hook_tables(model) == tables


def test_copies_and_pickles() -> None:
    """A copied or unpickled layer recomputes by itself."""
    layer = kedge.offload(Residual(), recompute="", to=kedge.Disk(), min_bytes=0)
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        each(x_of()).sum().backward()
        assert each.account.total.repeats == 1
    assert "recompute=''" in repr(layer)
