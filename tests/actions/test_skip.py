"""A skipped module does not run: its output is given, and all that follows is as if another module stood there."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import (
    ActionDisabled,
    ActionError,
    CannotCompile,
    EditError,
    NeverFiredWarning,
    NoSuchKind,
)
from tests.threaded import in_threads, replicas_of


class Block(nn.Module):
    """A residual block with a module that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.fc(x)) * scale + self.mlp(x)


def net(seed: int = 0) -> nn.Module:
    """Return two blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block())


class Given(nn.Module):
    """A module that gives what a function gives."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


VECTOR = torch.arange(4.0).expand(3, 4)
VALUES: dict[str, tuple[Any, nn.Module]] = {
    "the input": (None, nn.Identity()),
    "a tensor": (VECTOR, Given(lambda x: VECTOR.clone())),
    "a function": (lambda x: x.sin() * 2, Given(lambda x: x.sin() * 2)),
    "another module": (nn.Softmax(-1), nn.Softmax(-1)),
}


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return all that comes of a forward and a backward, and the state of the generator."""
    torch.manual_seed(3)
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, "rng": torch.get_rng_state(), **grads}


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two steps are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("path", ["0.mlp", "1.mlp", "0.fc"])
@pytest.mark.parametrize("value", VALUES)
def test_a_skipped_module_is_as_another_in_its_place(path: str, value: str) -> None:
    """Outputs, gradients and random numbers are those of a model with a module that gives the value."""
    given, stands = VALUES[value]
    model, twin, x = net(), net(), torch.randn(3, 4)
    twin.set_submodule(path, stands)
    usual = step(net(), x)
    expected = step(twin, x)

    with kedge.hook(model, path, kedge.skip(given)):
        assert alike(step(model, x), expected)
    assert alike(step(model, x), usual)


def test_nothing_inside_runs_and_hooks_of_the_module_do() -> None:
    """The program's own hooks see the inputs and the value; the ledger says why nothing inside fired."""
    model, x = net(), torch.randn(3, 4)
    seen: list[Any] = []
    for inside in model[0].mlp:
        inside.register_forward_hook(lambda *_: pytest.fail("a module inside has run"))
    model[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    with pytest.warns(NeverFiredWarning), kedge.session() as s:
        s.hook(model, "0.mlp", kedge.skip(VECTOR))
        acts = s.hook(model, "0.mlp, 0.mlp:in", kedge.record())
        s.hook(model, "0.mlp.0, 0.mlp/linear", kedge.record())
        model(x)
        ledger = s.ledger()

    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], VECTOR)
    assert torch.equal(acts["0.mlp"], VECTOR)
    assert torch.equal(acts["0.mlp:in"], x)
    for inside in ("0.mlp.0", "0.mlp/linear"):
        assert "skip(tensor) at 0.mlp:out keeps that module's forward" in ledger[inside].cause.why


def test_actions_behind_it_edit_its_value_and_those_at_the_inputs_go_before() -> None:
    """The input as an action has left it is the output, which the next action gets."""
    model, x = net().eval(), torch.randn(3, 4)
    with kedge.session() as s:
        s.hook(model, "0.mlp", kedge.skip(), kedge.scale(3))
        s.hook(model, "0.mlp:in", kedge.add(1))
        acts = s.hook(model, "0.mlp", kedge.record())
        model(x)
    assert torch.equal(acts["0.mlp"], (x + 1) * 3)


def test_of_several_the_last_gives_the_output() -> None:
    """As with other edits, each has fired, in this session and in another."""
    model, x = net(), torch.randn(3, 4)
    with kedge.session() as outer, kedge.session() as inner:
        outer.hook(model, "0.mlp", kedge.skip(), kedge.skip(lambda x: x * 2))
        inner.hook(model, "0.mlp", kedge.skip(lambda x: x * 5))
        acts = inner.hook(model, "0.mlp", kedge.record())
        model(x)
        counts = [row.fired for row in (*outer.ledger(), *inner.ledger())]
    assert torch.equal(acts["0.mlp"], x * 5)
    assert counts == [1] * len(counts)


def test_keyword_arguments_reach_the_function() -> None:
    """It is called as the forward would have been."""
    model, x = Block(), torch.randn(3, 4)
    with kedge.hook(model, ":out", kedge.skip(lambda x, *, scale: x * scale)):
        assert torch.equal(model(x, scale=2.0), x * 2)
    with kedge.hook(model, ":out", kedge.skip()):
        assert model(x=x) is x


def test_one_call_of_several_and_one_step_of_several() -> None:
    """A call's number and a schedule select what is skipped."""
    layer = nn.Linear(4, 4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    model, x = Twice(), torch.randn(3, 4)
    with kedge.hook(model, "layer#1", kedge.skip()):
        assert torch.equal(model(x), layer(x))
    with kedge.hook(model, "layer", kedge.skip(), when=kedge.at(1)):
        passes = [model(x) for _ in range(3)]
    assert torch.equal(passes[1], x)
    assert torch.equal(passes[0], passes[2])
    assert torch.equal(passes[0], layer(layer(x)))


class Recursive(nn.Module):
    """Calls itself."""

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self(x + 1, depth - 1) if depth else x


def test_a_module_that_calls_itself_is_skipped_where_that_was_asked() -> None:
    """What runs in place of a forward belongs to one call."""
    model = Recursive()
    with kedge.hook(model, "#2:out", kedge.skip(lambda x, depth: x * 10)):
        assert model(torch.ones(1), 5) == 30
    assert model(torch.ones(1), 5) == 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_skips_again(reentrant: bool) -> None:
    """The gradients through a checkpoint are those of one with the other module."""

    class Wraps(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, twin, x = Wraps(Block()), Wraps(Block()), torch.randn(3, 4)
    twin.load_state_dict(model.state_dict())
    twin.block.mlp = nn.Identity()
    with kedge.hook(model, "block.mlp", kedge.skip()):
        skipped = step(model, x)
    assert alike(skipped, step(twin, x))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(error: type[BaseException]) -> None:
    """The next call is an ordinary one, and nothing is in the `__dict__`, during the call or after it."""
    model, x = net(), torch.randn(3, 4)
    names = {*vars(model[0].mlp)}

    def fails(value: Tensor) -> Tensor:
        assert {*vars(model[0].mlp)} == names
        raise error("as asked")

    with (
        pytest.raises((error, ActionError), match="as asked"),
        kedge.hook(model, "0.mlp", kedge.skip(fails)),
    ):
        model(x)
    assert {*vars(model[0].mlp)} == names
    assert alike(step(model, x), step(net(), x))


def test_copies_and_pickles_made_inside_are_plain() -> None:
    """Also those that are made while the call is in progress."""
    model, x = net().eval(), torch.randn(3, 4)
    plain = pickle.dumps(model)
    made: list[Any] = []

    def keep(value: Tensor) -> Tensor:
        made.extend([copy.deepcopy(model), pickle.dumps(model)])
        return value

    with kedge.hook(model, "0.mlp", kedge.skip(keep)):
        model(x)
    assert made[1] == plain
    assert torch.equal(made[0](x), model(x))
    assert not made[0][0].mlp._forward_pre_hooks


def test_an_action_that_fails_is_raised_with_its_place_or_switched_off() -> None:
    """Where failures are warnings, the forward runs after all."""
    model, x = net().eval(), torch.randn(3, 4)
    usual = model(x)
    with (
        pytest.raises(ActionError, match=re.escape("at 0.mlp:out (pass 0, call 0")),
        kedge.hook(model, "0.mlp", kedge.skip(lambda: None)),
    ):
        model(x)
    with pytest.warns(ActionDisabled), kedge.session(on_error="warn") as s:
        s.hook(model, "0.mlp", kedge.skip(lambda: None))
        assert torch.equal(model(x), usual)
        s.end(quiet=True)


class Structured(nn.Module):
    """Says what it returns."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.pair(x)

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors."""
        return x, x


REFUSED = [
    (nn.LSTM(4, 4), ":out", EditError, "the forward of LSTM returns a tuple"),
    (nn.MultiheadAttention(4, 1), ":out", EditError, "returns a tuple"),
    (Structured(), ":out", EditError, "the forward of Structured returns a tuple"),
    (net(), "0.mlp:in", NoSuchKind, "only modules can be skipped"),
    (net(), "0/tanh", NoSuchKind, "only modules can be skipped; to change what an operation"),
    (net(), "0.mlp:out[0]", NoSuchKind, "skipped as a whole; leave out [0]"),
    (net(), "0.fc.weight:param", NoSuchKind, "only modules can be skipped"),
    (torch.ones(2, requires_grad=True), None, NoSuchKind, "only modules can be skipped"),
]


@pytest.mark.parametrize(("target", "selector", "kind", "text"), REFUSED)
def test_what_cannot_be_skipped_is_an_error(
    target: Any, selector: str | None, kind: type[Exception], text: str
) -> None:
    """Before anything runs, and nothing stays attached."""
    what = [one for one in (selector, kedge.skip()) if one is not None]
    with pytest.raises(kind, match=re.escape(text)):
        kedge.hook(target, *what)
    if isinstance(target, nn.Module):
        assert not [m for m in target.modules() if m._forward_pre_hooks or m._forward_hooks]


def test_a_structure_that_is_given_is_the_output() -> None:
    """What has no single tensor as its output is skipped by a function that gives all of it."""
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    with kedge.session() as s:
        s.hook(lstm, ":out", kedge.skip(lambda x: (x, (x[-1:], x[-1:]))))
        acts = s.hook(lstm, ":out", kedge.record())
        _, (h, _) = lstm(x)
    assert torch.equal(acts[":out[1.0]"], x[-1:])
    assert torch.equal(h, x[-1:])


def test_an_input_without_a_tensor_is_no_output() -> None:
    """The error says what was there instead."""
    model = Recursive()
    with (
        pytest.raises(EditError, match="this call has 5 there"),
        kedge.hook(model, ":out", kedge.skip()),
    ):
        model(5, 0)


def test_threads_and_replicas_skip_each_on_its_own() -> None:
    """One thread's call has the schedule of its own pass; a replica is skipped as its model."""
    model, x = net().eval(), torch.randn(3, 4)
    expected = torch.tanh(model[0].fc(x)) + x
    meet = threading.Barrier(2)

    def both(value: Tensor) -> Tensor:
        meet.wait()
        return value

    with kedge.hook(model, "0.mlp", kedge.skip(both)):
        outs: list[Tensor] = []
        call = lambda: outs.append(model[0](x))
        in_threads(call, call)
    assert [torch.equal(out, expected) for out in outs] == [True, True]
    with kedge.hook(model, "0.mlp", kedge.skip()):
        for replica in replicas_of(model, 2):
            assert torch.equal(replica[0](x), expected)


def test_models_that_are_found_are_skipped_in_their_first_call() -> None:
    """A hook on everywhere attaches during that call."""
    model, x = net(), torch.randn(3, 4)
    with kedge.hook("**{ReLU}", kedge.skip()) as found:
        model(x)
        assert len(found.session.ledger()) == 2
    with kedge.hook(":out", kedge.skip()):
        assert Block()(x) is x


def test_a_traced_forward_lacks_the_module() -> None:
    """`torch.jit.trace` takes in what the hook has put there."""
    model, x = net().eval(), torch.randn(3, 4)
    with kedge.hook(model, "0.mlp", kedge.skip(lambda x: x * 2)):
        traced = torch.jit.trace(model, x)
        expected = model(x)
    assert torch.equal(traced(x), expected)
    assert not torch.equal(model(x), expected)


def test_operations_of_what_stands_there_are_not_the_modules() -> None:
    """They belong to no module: the skipped forward has called nothing."""
    model, x = net().eval(), torch.randn(3, 4)
    with kedge.session() as s:
        s.hook(model, "0", kedge.skip(lambda x: x.cos()))
        cosine = s.hook(model, "0/cos", kedge.record())
        tanh = s.hook(model, "1/tanh", kedge.record())
        model(x)
        assert len(tanh) == 1
        assert len(cosine) == 0
        s.end(quiet=True)


@pytest.mark.parametrize("late", [False, True])
def test_compiled_code_skips_or_says_that_it_cannot(late: bool) -> None:
    """Where the graph may break, the module around runs uncompiled; a whole graph is an error."""
    model, x = net().eval(), torch.randn(3, 4)
    expected = model[1](torch.tanh(model[0].fc(x)) + x)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="eager", fullgraph=fullgraph)
        if late:
            fast(x)
        with kedge.session() as s:
            with pytest.warns() if late else kedge.session():
                hook = s.hook(fast, "0.mlp", kedge.skip())
            if fullgraph:
                with pytest.raises(
                    (CannotCompile, Unsupported), match="skipped inside compiled code"
                ):
                    fast(x)
                hook.remove()
            else:
                assert torch.allclose(fast(x), expected)
    torch._dynamo.reset()
