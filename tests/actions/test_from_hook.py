"""Forward hooks of PyTorch's kind as actions: they do as `register_forward_hook` would, once in each call."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import ActionArity, ActionDisabled, EditError, InPlaceEdit, NoSuchKind


@dataclass
class Result:
    """A structured output."""

    logits: Tensor
    name: str


class Net(nn.Module):
    """A module whose output is what it was made with."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = self.fc(x)
        return self.make(x if mask is None else x * mask)


MAKES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, (x + 1, "text"), None),
    "dict": lambda x: OrderedDict(a=x, b=[x * 2]),
    "dataclass": lambda x: Result(x, "name"),
}


def doubled(value: Any) -> Any:
    """Return a structure with each tensor doubled."""
    if isinstance(value, Tensor):
        return value * 2
    if isinstance(value, dict):
        return type(value)((key, doubled(each)) for key, each in value.items())
    if isinstance(value, (tuple, list)):
        return type(value)(map(doubled, value))
    return Result(doubled(value.logits), value.name) if isinstance(value, Result) else value


def flat(value: Any) -> list[Tensor]:
    """Return the tensors of a value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Result):
        return [value.logits]
    children = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return [t for child in children for t in flat(child)]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_hook_gets_and_replaces_what_pytorch_gives_it(make: Callable[[Tensor], Any]) -> None:
    """The module, its arguments and its whole output, once in each call; what it returns is the output."""
    model, x, calls = Net(make), torch.randn(2, 4), []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append((module, args[0], type(output)))
        return doubled(output)

    handle = model.register_forward_hook(hook)
    plain = model(x)
    handle.remove()
    with kedge.hook(model, ":out", kedge.from_hook(hook)):
        ours = model(x)
    assert type(ours) is type(plain)
    assert all(map(torch.equal, flat(ours), flat(plain)))
    assert calls[0] == calls[1]
    assert len(calls) == 2


def test_a_hook_with_keyword_arguments_gets_them() -> None:
    """As under ``with_kwargs=True``; the signature shows which of the two it is."""
    model, mask, seen = Net(MAKES["tuple"]), torch.zeros(4), []
    with kedge.hook(
        model,
        ":out",
        kedge.from_hook(lambda m, args, kwargs, out: seen.append((len(args), kwargs))),
    ):
        model(torch.randn(2, 4), mask=mask)
    assert seen == [(1, {"mask": mask})]


@pytest.mark.parametrize(
    "returns",
    [lambda a: (a[0] * 0,), lambda a: a[0] * 0, lambda a: None],
    ids=["tuple", "value", "none"],
)
def test_a_pre_hook_replaces_the_arguments(returns: Callable[[Any], Any]) -> None:
    """All that are given by position; one value stands for a tuple of it."""
    model, x, mask = Net(MAKES["tensor"]), torch.randn(2, 4), torch.ones(4)
    pre = lambda module, args: returns(args)
    handle = model.register_forward_pre_hook(pre)
    plain = model(x, mask=mask)
    handle.remove()
    with kedge.hook(model, ":in", kedge.from_hook(pre)):
        assert torch.equal(model(x, mask=mask), plain)


def test_hooks_and_actions_run_in_their_order_on_a_structured_output() -> None:
    """The hook sees all tensors as the actions before it left them, and those after it see what it returned."""
    model, seen = Net(MAKES["tuple"]), []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        seen.append([float(t.sum()) for t in flat(output)])
        return (output[0] + 1, (output[1][0] + 2, output[1][1]), None)

    with kedge.session() as s:
        s.hook(model, ":out", kedge.zero(), kedge.from_hook(hook), kedge.scale(10))
        acts = s.hook(model, ":out", kedge.from_hook(hook), kedge.record())
        out = model(torch.randn(1, 4))
    assert seen == [[0, 0], [40, 80]]
    assert [t[0, 0].item() for t in flat(out)] == [11, 22]
    assert torch.equal(acts[":out[1.0]"], out[1][0])


def test_events_are_counted_by_tensor_and_the_hook_runs_once_a_call() -> None:
    """The ledger counts as for every action; the hook runs once in each of three calls."""
    model, calls = Net(MAKES["tuple"]), []
    with kedge.session() as s:
        s.hook(model, ":out", kedge.from_hook(lambda m, a, o: calls.append(o)))
        for _ in range(3):
            model(torch.randn(1, 4))
        assert s.ledger()[":out"].fired == 6
    assert len(calls) == 3


def test_one_call_of_several_is_chosen_by_its_number() -> None:
    """``#1`` is the second call of the module in a pass, for a hook too."""
    fc, seen = nn.Linear(4, 4), []
    model = nn.Sequential(fc, nn.ReLU(), fc)
    with kedge.hook(model, "0#1", kedge.from_hook(lambda m, a, o: seen.append(a[0]))):
        model(torch.randn(2, 4))
    assert (len(seen), bool((seen[0] >= 0).all())) == (1, True)


def test_a_new_shape_is_allowed_and_another_structure_is_not() -> None:
    """A site keeps the structure of its value, and what is in it beside tensors."""
    model, x = Net(MAKES["tuple"]), torch.randn(2, 4)
    with kedge.hook(model, ":out", kedge.from_hook(lambda m, a, o: (o[0][:1], *o[1:]))):
        assert model(x)[0].shape == (1, 4)
    for change in (
        lambda o: o[0],
        list,
        lambda o: (o[0], (o[1][0], "other"), None),
        lambda o: o[:1],
    ):
        with pytest.raises(EditError, match="keeps the structure"):
            with kedge.hook(
                model, ":out", kedge.from_hook(lambda m, a, o, change=change: change(o))
            ):
                model(x)


def test_a_hook_may_not_work_in_place() -> None:
    """Also not on a tensor that is not the first."""
    model = Net(MAKES["tuple"])
    with pytest.raises(InPlaceEdit, match="return a new one"):
        with kedge.hook(model, ":out", kedge.from_hook(lambda m, a, o: [o[1][0].zero_(), None][1])):
            model(torch.randn(2, 4))


def test_what_cannot_be_right_is_refused_when_it_is_attached() -> None:
    """Backward hooks, other numbers of arguments, other kinds of sites, and single tensors of a call."""
    model = Net(MAKES["tuple"])
    for wrong, message in (
        (lambda module, grad_input, grad_output: None, "is a backward hook"),
        (lambda grad: None, "is not a forward hook"),
        (lambda a, b, c, d, e: None, "is not a forward hook"),
        (lambda a, b, *, c: None, "is not a forward hook"),
        (max, "are unknown"),
    ):
        with pytest.raises(ActionArity, match=message):
            kedge.from_hook(wrong)
    forward, pre = kedge.from_hook(lambda m, a, o: None), kedge.from_hook(lambda m, a: None)
    for action, site in (
        (forward, ":in"),
        (pre, ":out"),
        (forward, "fc:out.grad"),
        (forward, "/add"),
        (forward, ":out[0]"),
    ):
        with pytest.raises(NoSuchKind, match="from_hook"):
            kedge.hook(model, site, action)


def test_a_failing_hook_is_named() -> None:
    """Its error has the place, as that of every action; the rest of its answer does not reach the next call."""
    model, times = Net(MAKES["tuple"]), []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        times.append(1)
        return (output[0] * 0, (output[1][0] * 0, "text"), None)

    def fails(value: Tensor, event: Any) -> None:
        if len(times) == 1 and event.site.leaf == "0":
            raise ZeroDivisionError

    with kedge.session() as s:
        s.hook(model, ":out", kedge.from_hook(hook), fails)
        with pytest.raises(Exception, match="fails at :out"):
            model(torch.randn(2, 4))
        out = model(torch.randn(2, 4))
    assert len(times) == 2
    assert not any(t.any() for t in flat(out))


def test_a_hooked_module_leaves_compiled_code(compiled: Callable[..., Any]) -> None:
    """A graph has no event, so Dynamo runs that part uncompiled, with the hook."""
    model, x, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4), []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(module)
        return output * 2

    with kedge.hook(model, "0", kedge.from_hook(hook)):
        out = compiled(model, backend="eager")(x)
    assert seen == [model[0]]
    assert torch.equal(out, (model[0](x) * 2).relu())


def test_one_hook_serves_every_model() -> None:
    """With `everywhere`, as PyTorch's hook on all modules."""
    seen = []
    with kedge.hook(
        kedge.everywhere, "**", kedge.from_hook(lambda m, a, o: seen.append(type(m).__name__))
    ):
        nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))(torch.randn(2, 4))
    assert seen == ["Linear", "LSTM", "Sequential"]


def pair() -> nn.Module:
    """Return a module with two outputs, x and x + 1."""
    return Net(lambda x: (x, x + 1))


def test_a_hook_that_removes_itself_answers_for_its_call_alone() -> None:
    """Its answer holds for all tensors of that call, and none is left for a later one, nor kept."""
    model, refs = nn.Sequential(pair()), []

    def once(module: nn.Module, args: Any, output: Any) -> Any:
        handle.remove()
        new = output[0] * 10, output[1] * 10
        refs.extend(map(weakref.ref, new))
        return new

    action = kedge.from_hook(once)
    for _ in range(2):
        x = torch.randn(2, 4)
        plain = model(x)
        handle = kedge.hook(model, "0", action)
        same = [
            torch.equal(ours, 10 * theirs) for ours, theirs in zip(model(x), plain, strict=True)
        ]
        same += map(torch.equal, model(x), plain)
        assert same == [True] * 4
        gc.collect()
        assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("make", [MAKES["tensor"], MAKES["tuple"]], ids=["tensor", "tuple"])
def test_a_hook_may_call_its_module(make: Callable[[Tensor], Any]) -> None:
    """The call inside has an answer of its own, also if it is the model that is called again."""
    model, x, depth = Net(make), torch.zeros(2, 4), [0]

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if depth[0]:
            return None
        depth[0] = 1
        return doubled(module(args[0] + 1))

    handle = model.register_forward_hook(hook)
    plain = model(x)
    handle.remove()
    depth[0] = 0
    with kedge.hook(model, ":out", kedge.from_hook(hook)):
        ours = model(x)
    assert all(map(torch.equal, flat(ours), flat(plain)))


def test_a_hook_runs_in_a_call_without_tensors() -> None:
    """Once, and it counts once; what it returns may not differ."""

    class Sometimes(nn.Module):
        def forward(self, give: Any = None) -> Any:
            return give

    model, seen = Sometimes(), []
    with kedge.session(strict=True) as s:
        s.hook(model, ":out", kedge.from_hook(lambda m, a, o: seen.append((a, o))))
        s.hook(model, ":in", kedge.from_hook(lambda m, a: seen.append(a)))
        model()
        model((1, "text"))
        assert s.ledger()[":out"].fired == 2
    assert seen == [(), ((), None), ((1, "text"),), (((1, "text"),), (1, "text"))]
    with pytest.raises(EditError, match=r"at \[0\], 2 in place of 1"):
        with kedge.hook(model, ":out", kedge.from_hook(lambda m, a, o: (2, "text"))):
            model((1, "text"))
    with (
        pytest.warns(ActionDisabled, match="ZeroDivisionError"),
        kedge.session(on_error="warn") as s,
    ):
        s.hook(model, ":out", kedge.from_hook(lambda m, a, o: 1 / 0))
        model()
        model()
        s.end(quiet=True)


def test_what_is_no_tensor_is_compared_by_value() -> None:
    """An array by its elements, and NaN is as NaN."""
    array = np.array([1.0, math.nan])
    for value, other in (
        (array, array * 2),
        (math.nan, 1.0),
        ("text", "other"),
        (array, array[:1]),
    ):
        model, again = Net(lambda x, v=value: [x, v]), copy.deepcopy(value)
        x = torch.randn(2, 4)
        with kedge.hook(model, ":out", kedge.from_hook(lambda m, a, o, v=again: [o[0] * 2, v])):
            assert torch.equal(model(x)[0], model.fc(x) * 2)
        with (
            pytest.raises(EditError, match=r"the first difference is at \[1\]"),
            kedge.hook(model, ":out", kedge.from_hook(lambda m, a, o, v=other: [o[0] * 2, v])),
        ):
            model(x)


def test_an_action_may_call_a_hook_at_one_tensor_alone() -> None:
    """With several, the hook would run for each of them."""
    hook = kedge.from_hook(lambda m, a, o: doubled(o))
    model, x = Net(MAKES["tensor"]), torch.randn(2, 4)
    with kedge.hook(model, ":out", lambda value, event: hook(value, event)):
        assert torch.equal(model(x), model.fc(x) * 2)
    two = pair()
    with pytest.raises(EditError, match="pass it to hook directly"):
        with kedge.hook(two, ":out", lambda value, event: hook(value, event)):
            two(x)
