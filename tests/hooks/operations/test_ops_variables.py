"""Variables of a forward are sites, by their names: the results that its lines assign to them."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import NeverFiredWarning, NoSiteMatched, NoSuchKind


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors that it has made before its last operation."""
    a = a * 2
    return a, b - 1


def doubled(x: Tensor) -> Tensor:
    """Return the result of an operation at once."""
    return x.mul(2)


class Block(nn.Module):
    """Assigns in each way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.gru = nn.LayerNorm(4), nn.Linear(4, 8), nn.GRU(4, 4)
        self.acts = nn.ModuleList([nn.ReLU(), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        hidden = self.norm(x)
        hidden = self.fc(hidden)
        left, right = hidden.chunk(2, -1)
        for act in self.acts:
            left = act(left)
        one = other = doubled(left)
        hidden: Tensor = one * right + other
        hidden += 1
        if (total := hidden.sum()) > 1e9:
            return total
        rows, _ = self.gru(hidden)
        rows, hidden = both(rows, hidden)
        factor = 0.5
        return rows * factor + hidden + residual


def net() -> nn.Module:
    """Return two blocks."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def by_hand(block: Any, x: Tensor) -> dict[str, Tensor]:
    """Return the values of the variables, by their names and numbers."""
    found = {"hidden=#0": block.norm(x)}
    found["hidden=#1"] = block.fc(found["hidden=#0"])
    found["left=#0"], found["right="] = found["hidden=#1"].chunk(2, -1)
    found["left=#1"] = found["left=#0"].relu()
    found["left=#2"] = found["left=#1"].tanh()
    found["one="] = found["other="] = found["left=#2"] * 2
    found["hidden=#2"] = found["one="] * found["right="] + found["other="]
    found["hidden=#3"] = found["hidden=#2"] + 1
    found["total="] = found["hidden=#3"].sum()
    found["rows="], found["_="] = block.gru(found["hidden=#3"])
    return found


def test_each_assignment_has_the_value_that_it_assigns() -> None:
    """Of operations and modules, whole and in parts, in a chain, in an expression, in a loop, and in place."""
    model, x = net(), torch.randn(3, 4)
    with kedge.hook(model, "0/*=", kedge.record(copy=True)) as acts:
        model(x)
        ledger = acts.session.ledger()
    expected = by_hand(model[0], x)
    assert {*acts.names()} == {f"0/{name}" for name in expected}
    for name, value in expected.items():
        assert torch.equal(acts[f"0/{name}"], value), name
    assert len(ledger) == 1


def test_patterns_of_operations_select_no_variables() -> None:
    """Nothing fires twice."""
    model, x = net(), torch.randn(3, 4)
    with kedge.session() as s:
        ops = s.hook(model, "0/*", kedge.record())
        some = s.hook(model, "0/*=, !0/hidden=", kedge.record())
        model(x)
    assert not [name for name in ops.names() if "=" in name]
    assert "0/left=#0" in some.names()
    assert not [name for name in some.names() if "hidden" in name]
    assert list(kedge.select("**/left=").on(model)) == list(kedge.select("[01]/left=").on(model))


EDITS = ["left=#2", "right=", "hidden=#0", "one=", "rows=", "hidden=#3"]


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_goes_on_into_the_forward(name: str) -> None:
    """As if the line had assigned the other value."""
    model, x = net(), torch.randn(3, 4)
    with kedge.hook(model, f"0/{name}", kedge.scale(3)):
        out = model[0](x)
    block: Any = model[0]
    h = dict.fromkeys(EDITS, 1)
    h[name] = 3
    hidden = block.fc(block.norm(x) * h["hidden=#0"])
    left, right = hidden.chunk(2, -1)
    left, right = left.relu().tanh() * h["left=#2"], right * h["right="]
    other = left * 2 * h["one="]  # one value, whichever of its two names is edited
    hidden = (other * right + other + 1) * h["hidden=#3"]
    rows = block.gru(hidden)[0] * h["rows="]
    assert torch.allclose(out, rows * 2 * 0.5 + (hidden - 1) + x)


def test_gradients_of_variables_are_those_of_their_values() -> None:
    """Read and edited, also of a module's output."""
    model, x = net(), torch.randn(3, 4)
    with kedge.session() as s:
        grads = s.hook(model, "0/hidden=:out.grad, 0/rows=:out.grad", kedge.record())
        outs = s.hook(model, "0.norm:out.grad, 0.gru:out.grad[0]", kedge.record())
        model(x).sum().backward()
    assert torch.equal(grads["0/hidden=#0:out.grad"], outs["0.norm:out.grad"])
    assert torch.equal(grads["0/rows=:out.grad"], outs["0.gru:out.grad[0]"])
    model.zero_grad()
    with kedge.hook(model, "0/rows=:out.grad", kedge.zero()):
        model(x).sum().backward()
    assert not model[0].gru.weight_hh_l0.grad.any()


def test_the_value_of_a_modules_output_is_what_all_its_hooks_have_left() -> None:
    """Also of hooks that are added later, by the program and in other sessions."""
    model, x = net(), torch.randn(3, 4)
    with kedge.session() as s, kedge.session() as later:
        acts = s.hook(model, "0/hidden=#0", kedge.record())
        later.hook(model, "0.norm", kedge.scale(2))
        handle = model[0].norm.register_forward_hook(lambda module, args, output: output + 1)
        model(x)
        assert torch.equal(acts["0/hidden="], model[0].norm(x))
        handle.remove()
    assert torch.equal(acts["0/hidden="], F.layer_norm(x, (4,)) * 2 + 1)


def test_several_sessions_edit_one_after_the_other() -> None:
    """An operation that one passes on is assigned by the same line."""
    model, x = net(), torch.randn(3, 4)
    with kedge.session() as one, kedge.session() as two:
        one.hook(model, "0/one=", kedge.add(1))
        two.hook(model, "0/one=", kedge.scale(2))
        two.hook(model, "0/mul", lambda value: None)
        acts = two.hook(model, "0/one=", kedge.record())
        model(x)
    expected = by_hand(model[0], x)["one="]
    assert torch.equal(acts["0/one="], (expected + 1) * 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_edits_again(reentrant: bool) -> None:
    """Gradients through a checkpoint are those without one."""
    x = torch.randn(3, 4)

    class Wraps(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.checkpointed = Block(), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            if self.checkpointed:
                return checkpoint(self.block, x, use_reentrant=reentrant)
            return self.block(x)

    def gradients(model: nn.Module) -> list[Tensor]:
        with kedge.hook(model, "block/hidden=#1, block/left=#2", lambda value: value.square()):
            y = x.clone().requires_grad_()
            model(y).sum().backward()
        return [y.grad, *(p.grad for p in model.parameters())]

    found, expected = gradients(Wraps(True)), gradients(Wraps(False))
    assert all(map(torch.equal, found, expected))


def test_observing_changes_nothing() -> None:
    """Outputs, gradients, pickles and names of attributes are those of a plain model; hooks are gone at the end."""
    model, x = net(), torch.randn(3, 4)
    plain, names = pickle.dumps(model), [{*vars(module)} for module in model.modules()]

    def step() -> list[Tensor]:
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = step()
    model.zero_grad()
    with kedge.hook(model, "**/*=:out, **/*=:out.grad", kedge.record()):
        assert all(map(torch.equal, step(), expected))
        model.zero_grad()
        assert pickle.dumps(model) == plain
        assert all(map(torch.equal, [copy.deepcopy(model)(x).detach()], expected))
        assert [{*vars(module)} for module in model.modules()] == names
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function around another, as libraries put one around a forward."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hidden = function(*args, **kwargs)
        return hidden + 0

    return wrapper


class Decorated(nn.Module):
    """Has a forward inside another function, with a variable of the same name."""

    @decorated
    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 3
        return hidden + 1


def test_a_decorated_forward_has_the_variables_of_the_inner_one() -> None:
    """Those of the decorator are its own."""
    model, x = Decorated(), torch.randn(2)
    with kedge.hook(model, "/hidden=", kedge.record()) as acts:
        model(x)
    assert acts.names() == ["/hidden="]
    assert torch.equal(acts["/hidden="], x * 3)


def test_a_function_has_variables_too() -> None:
    """And the code outside of functions and modules has none."""
    x = torch.randn(2)
    with kedge.hook(both, "/a=", kedge.scale(5)) as hooked:
        assert torch.equal(both(x, x)[0], x * 2 * 5)
        assert "fired 1 time" in str(hooked.session.ledger())
    with pytest.raises(NoSuchKind, match="variables are those of a forward or a function"):
        kedge.hook("/a=", kedge.record())


def wrapped(function: Callable[..., Any], *, how: str) -> Callable[..., Any]:
    """Wrap a function as libraries do that follow PyTorch's, so that its result is kept for a while."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if how == "changed":
            result = function(*args, **kwargs)
            if args:
                result = result + 1
            return result
        if how == "one of two":
            result = function(*args, **kwargs)
            return result if args else None
        if not args:
            raise ValueError
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError from error
        for each in args:
            str(each)
        return result

    return call


@pytest.mark.parametrize("how", ["the same", "changed", "one of two"])
def test_a_wrapper_may_keep_a_result_that_it_returns(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is returned on every way is seen, also if PyTorch's functions are wrapped; if not, the cause is the wrapper."""
    monkeypatch.setattr(torch, "relu", wrapped(torch.relu, how=how))

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(x)
            return hidden * 2

    model, x = Calls(), torch.randn(3)
    expected = model(x) * 3
    with kedge.session() as s:
        acts = s.hook(model, "/hidden=", kedge.record(), kedge.scale(3))
        found = model(x)
        ledger = str(s.ledger())
        s.end(quiet=True)
    if how == "the same":
        assert torch.equal(acts["/hidden="], x.relu())
        assert torch.equal(found, expected)
    elif how == "changed":  # by an operation, whose result is returned
        assert torch.equal(acts["/hidden="], x.relu() + 1)
    else:
        assert re.search(r"assigned hidden what wrapped\.<locals>\.call returned, which", ledger)
        assert "test_ops_variables.py:" in ledger


MISSING = [
    ("0/hiden=", 'Block.forward() has no such variable; did you mean "hidden="?'),
    ("0/x=", 'it is an argument: hook ":in[x]" of the module'),
    ("0/residual=", "residual = x, assigns what another variable holds"),
    ("0/factor=", "factor = 0.5, assigns a constant"),
    ("0.norm/y=", "LayerNorm.forward() has no such variable; it assigns none"),
    ("**/nowhere=", "no such variable"),
]


@pytest.mark.parametrize(("selector", "text"), MISSING)
def test_what_is_no_such_variable_is_an_error(selector: str, text: str) -> None:
    """Before the model runs, with what there is."""
    model = net()
    with pytest.raises(NoSiteMatched, match=re.escape(text)):
        kedge.hook(model, selector, kedge.record())
    with pytest.raises(NoSuchKind, match="a variable has no :in; it has :out, :out.grad"):
        kedge.hook(model, "0/hidden=:in", kedge.record())


def test_the_ledger_names_the_lines_that_were_not_seen() -> None:
    """What a function of Python's returns after more work is no site; neither is a number that was not reached."""
    model, x = net(), torch.randn(3, 4)
    with pytest.warns(NeverFiredWarning, match="assigned it less often: the last is hidden=#3"):
        with kedge.session() as s:
            s.hook(model, "0/rows=, 0/hidden=#7", kedge.record())
            model(x)
            ledger = s.ledger()
    assert "rows, hidden = both(rows, hidden), assigns what is not the result" in str(ledger)

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left, right = both(x, x)
            return left + right

    with pytest.warns(
        NeverFiredWarning, match="assigned left what both returned, which may not be"
    ):
        with kedge.hook(other := Other(), "/left=", kedge.record()):
            other(x)


def test_compiled_code_says_that_it_has_none() -> None:
    """As for its operations."""
    model, x = net(), torch.randn(3, 4)
    expected = model(x)
    fast = torch.compile(model, backend="eager")
    with pytest.warns(NeverFiredWarning, match="inside compiled code"):
        with kedge.hook(fast, "0/hidden=", kedge.record()):
            torch.testing.assert_close(fast(x), expected)
    torch._dynamo.reset()
