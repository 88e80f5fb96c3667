"""Operations outside of modules: of a function's calls, and of the program's own code."""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import EditError, NeverFiredWarning, NoSuchKind
from tests.threaded import in_threads


def turn(x: Tensor, times: int = 2) -> Tensor:
    """Call a few operations, those of a name in a loop."""
    for _ in range(times):
        x = torch.relu(x) * 2
    return x.sum(-1)


class Rotates(nn.Module):
    """Calls a function, and has operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return turn(self.fc(x).relu()) * 3

    def score(self, x: Tensor) -> Tensor:
        """Work on the output outside of the forward."""
        return self(x).sigmoid().sum()


def trained(model: nn.Module, loss: Callable[[Tensor], Tensor], steps: int = 3) -> list[Tensor]:
    """Train and return losses, weights and the state of the generator."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(torch.randn(3, 4)))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(value.detach().clone())
    return [*found, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two are equal to the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def loss_of(out: Tensor) -> Tensor:
    """Return a loss with two operations of one name."""
    value = F.dropout(out, 0.5).square() + 1
    return (value + 2).mean()


def test_a_function_has_the_operations_of_its_calls() -> None:
    """Each call counts its own, also inside of a module; what is outside of it does not fire."""
    torch.manual_seed(0)
    model, x = Rotates(), torch.randn(3, 4)
    with kedge.hook(turn, "/relu, /mul#1, /sum:in", kedge.record(keep=None)) as acts:
        turn(x)
        torch.relu(x)
        model(x)
    assert list(acts) == ["/relu#0", "/relu#1", "/mul#1", "/sum:in[0]"]
    first, second = acts.records("/relu#1")
    assert (first.event.pass_, second.event.pass_, second.event.call) == (0, 1, 0)
    assert torch.equal(first.value, (x.relu() * 2).relu())
    assert torch.equal(second.value, (model.fc(x).relu().relu() * 2).relu())


def test_the_code_of_a_loop_counts_from_one_backward_to_the_next() -> None:
    """The loss and its gradient are sites; what modules, optimizers and the backward do is none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with kedge.session() as s:
        acts = s.hook("/add, /mean, /mul, /relu", kedge.record(keep=None))
        grads = s.hook("/add#1:out.grad, /mean:in.grad", kedge.record(keep=None))
        losses = trained(model, loss_of)
        s.end(quiet=True)
    assert acts.names() == ["/add#0", "/add#1", "/mean", "/add#2"]  # the last: clip_grad_norm_
    means = acts.records("/mean")
    assert [record.event.pass_ for record in means] == [0, 1, 2]
    assert [record.event.step for record in means] == [0, 1, 2]
    for record, loss in zip(means, losses[:3], strict=True):
        assert torch.equal(record.value, loss)
    for record in grads.records("/add#1:out.grad"):
        assert torch.equal(record.value, torch.full((3, 4), 1 / 12))


@pytest.mark.parametrize("target", ["block", "function"])
def test_observing_changes_no_bit(target: str) -> None:
    """Losses, weights and random numbers of a training with dropout are those without hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    twin = copy.deepcopy(model)
    expected = trained(twin, loss_of)
    where: tuple[Any, ...] = () if target == "block" else (loss_of,)
    with kedge.hook(*where, "/*:out, /*:in, /*:out.grad, /*:in.grad", kedge.record()) as hooked:
        found = trained(model, loss_of)
        assert len(hooked) > 5
        hooked.end(quiet=True)
    assert alike(found, expected)


def test_edits_go_on_into_the_program() -> None:
    """Of a result, an input and a gradient, as for the operations of modules."""
    x = torch.randn(3, 4, requires_grad=True)
    with kedge.session() as s:
        s.hook(turn, "/relu#1", kedge.scale(3))
        s.hook(turn, "/sum:in", kedge.add(1))
        s.hook(turn, "/mul#0:out.grad", kedge.zero())
        out = turn(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, ((x.relu() * 2).relu() * 3 * 2 + 1).sum(-1))
    assert not grad.any()
    with kedge.hook("/mul", kedge.scale(5)):
        scaled = x * 2
    assert torch.equal(scaled, x * 10)


def test_fused_attention_stays_fused() -> None:
    """No mode is on in the modules that ask for one: their results differ in their last bits."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        expected = [model(x) * 2, attention(x, x, x)[0] * 2]
        for where in ((), (turn,)):
            with kedge.hook(*where, "/mul, /relu", kedge.record()) as hooked:
                found = [model(x) * 2, attention(x, x, x)[0] * 2]
                hooked.end(quiet=True)
            assert alike(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("target", ["block", "function", "part"])
def test_a_recompute_edits_again(target: str, reentrant: bool) -> None:
    """Gradients through a checkpoint are those without one."""

    def outer(value: Tensor) -> Tensor:
        value = value * 1.5
        return checkpoint(turn, value, use_reentrant=reentrant) + 1

    def plain(value: Tensor) -> Tensor:
        return turn(value * 1.5) + 1

    where = {"block": ((), ()), "function": ((turn,), (turn,)), "part": ((outer,), (plain,))}
    of_checkpoint, of_plain = where[target]

    def gradient(function: Callable[[Tensor], Tensor], where: tuple[Any, ...]) -> list[Tensor]:
        x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_()
        with kedge.hook(*where, "/relu", lambda value: value.square()):
            out = function(x)
            out.sum().backward()
        return [out.detach(), x.grad]

    assert alike(gradient(outer, of_checkpoint), gradient(plain, of_plain))


def test_a_method_is_hooked_on_its_object() -> None:
    """Another object of the class has other operations; a partial is its function."""
    torch.manual_seed(0)
    one, other, x = Rotates(), Rotates(), torch.randn(3, 4)
    with kedge.hook(one.score, "/sigmoid, /sum", kedge.record(keep=None)) as acts:
        other.score(x)
        one.score(x)
    assert len(acts.records("/sigmoid")) == len(acts.records("/sum")) == 1
    assert torch.equal(acts["/sigmoid"], one(x).sigmoid())
    with kedge.hook(functools.partial(turn, times=3), "/relu#2", kedge.record()) as acts:
        turn(x, 3)
    assert list(acts) == ["/relu#2"]


def test_a_function_that_calls_itself_numbers_its_calls() -> None:
    """The outer one goes on counting its own."""

    def deeper(x: Tensor, depth: int) -> Tensor:
        x = x + 1
        if depth:
            x = deeper(x, depth - 1)
        return x + 10

    with kedge.hook(deeper, "/add", kedge.record(keep=None)) as acts:
        deeper(torch.zeros(1), 2)
    found = [
        (r.event.call, int(r.value)) for name in ("/add#0", "/add#1") for r in acts.records(name)
    ]
    assert found == [(0, 1), (1, 2), (2, 3), (2, 13), (1, 23), (0, 33)]


def test_values_of_a_call_that_is_over_are_kept_to_the_next_operation() -> None:
    """Its frame goes with the next operation, whichever it is."""
    alive: list[weakref.ref[Any]] = []

    def works(x: Tensor) -> Tensor:
        inside = x.relu()
        alive.append(weakref.ref(inside))
        return inside.sum()

    x = torch.ones(3)
    with kedge.hook(works, "/relu", lambda value: None):
        works(x)
        x + 1
        gc.collect()
        assert alive[0]() is None


class Doubles(TorchFunctionMode):
    """A mode of the program."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.exp else out


def test_modes_of_the_program_end_in_their_own_order() -> None:
    """Also those that began before the hook and end before it, and a block of `torch.device`."""
    x = torch.ones(2)
    for mode in (Doubles(), torch.device("meta")):
        with mode:
            hooked = kedge.hook("/exp", kedge.record(keep=None))
            inside = _get_current_function_mode_stack()
            x.exp()
        assert len(inside) == 2
        assert len(_get_current_function_mode_stack()) == 1
        with mode:
            x.exp()
        x.exp()
        assert [row.fired for row in hooked.session.ledger()] == [3]
        hooked.remove()
        assert _get_current_function_mode_stack() == []


def test_a_default_device_may_change_in_the_block() -> None:
    """Its mode expects to be the lowest."""
    try:
        torch.set_default_device("meta")
        with kedge.hook("/exp", kedge.record()) as acts:
            torch.set_default_device(None)
            torch.ones(2).exp()
            torch.set_default_device("cpu")
        assert not acts["/exp"].is_meta
    finally:
        torch.set_default_device(None)
    assert _get_current_function_mode_stack() == []


def test_sessions_see_what_the_others_pass_on() -> None:
    """Two sessions edit one after the other, and neither sees the edits of the other as operations."""
    x = torch.ones(2)
    expected = (x.exp() + 1) * 10
    with kedge.session() as outer, kedge.session() as inner:
        outer.hook("/exp", kedge.add(1))
        inner.hook("/exp", kedge.scale(10))
        adds = outer.hook("/add, /mul", kedge.record())
        muls = inner.hook(test_sessions_see_what_the_others_pass_on, "/add, /mul", kedge.record())
        out = x.exp()
        assert not len(adds)
        assert not len(muls)
        outer.end(quiet=True)
        inner.end(quiet=True)
    assert torch.equal(out, expected)


def test_a_pause_and_an_error_leave_no_mode() -> None:
    """A paused session sees nothing, and goes on where it was; an error in a module puts the mode back."""
    x = torch.ones(2)

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("as asked")

    with kedge.session() as s:
        acts = s.hook("/exp", kedge.record(keep=None))
        s.pause()
        assert _get_current_function_mode_stack() == []
        x.exp()
        s.resume()
        with pytest.raises(ValueError, match="as asked"):
            Fails()(x)
        x.exp()
        assert len(acts.records("/exp")) == 1
    assert _get_current_function_mode_stack() == []


def test_other_threads_are_not_seen() -> None:
    """A mode belongs to the thread that hooked; the ledger names that."""
    x = torch.ones(2)
    with (
        pytest.warns(NeverFiredWarning, match=re.escape("turn() has called no operation on this")),
        kedge.hook(turn, "/relu", kedge.record()),
    ):
        in_threads(lambda: turn(x))


def gelus(x: Tensor) -> Tensor:
    """Call one operation."""
    return F.gelu(x)


VALUE = torch.ones(2)
CAUSES: list[tuple[tuple[Any, ...], Callable[[Tensor], Any], str]] = [
    ((gelus,), gelus, "gelus() called no relu: it called gelu"),
    ((), lambda x: x.exp(), "the code outside of modules called no relu: it called exp"),
    ((), lambda x: None, "no operation ran outside of modules on this thread"),
    ((torch.compile(gelus, backend="eager"),), torch.compile(gelus, backend="eager"), "compiled"),
]


@pytest.mark.parametrize(("where", "run", "why"), CAUSES)
def test_what_did_not_fire_has_a_cause(
    where: tuple[Any, ...], run: Callable[[Tensor], Any], why: str
) -> None:
    """The ledger says what ran instead."""
    with pytest.warns(NeverFiredWarning, match=re.escape(why)):
        with kedge.hook(*where, "/relu", kedge.record()):
            run(VALUE)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ((turn, "fc"), '"fc": turn() has operations, such as "/relu:out", and no modules'),
        ((turn, "fc/relu"), '"fc/relu": turn() has operations'),
        ((turn, ":out"), '":out": turn() has operations'),
        ((turn, "/relu:saved"), "an operation has no :saved"),
        (("/relu, **:out",), "hook that separately"),
    ],
)
def test_other_sites_are_an_error(what: tuple[Any, ...], text: str) -> None:
    """A function has no modules, and one selector is of one target."""
    with pytest.raises(NoSuchKind, match=re.escape(text)):
        kedge.hook(*what, kedge.record())
    assert _get_current_function_mode_stack() == []


def test_an_edit_that_would_be_lost_is_an_error() -> None:
    """In the forward of a `torch.autograd.Function`, and of an in-place call whose result is dropped."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = torch.ones(2, requires_grad=True)
    with (
        kedge.hook("/exp", kedge.scale(2)),
        pytest.raises(EditError, match="torch.autograd.Function"),
    ):
        Own.apply(x)
    with kedge.hook("/add_", kedge.scale(2)), pytest.raises(EditError, match="works in place"):
        x.detach().add_(1)


def test_compiled_models_are_what_they_are() -> None:
    """They run in the block as outside of it, and the loss behind them is a site."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = fast(x).square().mean()
    for where in ((), (test_compiled_models_are_what_they_are,)):
        with kedge.hook(*where, "/mean", kedge.record()) as acts:
            out = fast(x).square().mean()
        assert torch.equal(out, expected)
        assert torch.equal(acts["/mean"], expected)
    torch._dynamo.reset()
