"""Bad input: each mistake has an error of its own, which says what was asked, what was found and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import (
    ActionArity,
    ActionDisabled,
    ActionError,
    ConditionMet,
    EditError,
    InPlaceEdit,
    NeverFired,
    NeverFiredWarning,
    NoSiteMatched,
    NoSuchKind,
    NotRecorded,
    ReadError,
    SelectorError,
    WrongCall,
)


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def no_argument() -> None:
    """An action that takes nothing."""


def three(value: Tensor, event: Any, more: Any) -> None:
    """An action that takes too much."""


def keyword(value: Tensor, *, factor: float) -> None:
    """An action that needs a keyword."""


@pytest.mark.parametrize(
    ("target", "what", "error", "message"),
    [
        (
            "model",
            ("a",),
            WrongCall,
            'no action given; hook(model, "layer4", kedge.record()) takes at least one after the selector',
        ),
        (
            "model",
            (),
            WrongCall,
            'no action given; hook(model, "layer4", kedge.record()) takes at least one after the selector',
        ),
        (
            "model",
            ("a", 3),
            WrongCall,
            '3 is not an action: it cannot be called; the order is target, selector, actions; a path is a text: "3"; '
            "to put a number in the place of a value, use kedge.replace(3)",
        ),
        (
            "model",
            ("a", "b"),
            WrongCall,
            "'b' is not an action: it cannot be called; the order is target, selector, actions",
        ),
        (
            "model",
            (kedge.zero(),),
            SelectorError,
            'a model needs a selector: hook(model, "layer4", action); "**:out" selects everything, ":out" its own output',
        ),
        (
            "model",
            ("c", kedge.zero()),
            NoSiteMatched,
            '"c" matches nothing in this model; the nearest paths are "a", "b"',
        ),
        (
            "model",
            ("a", no_argument),
            ActionArity,
            "no_argument() -> 'None' is not an action: an action takes (value) or (value, event), everything else needs a default",
        ),
        (
            "model",
            ("a", three),
            ActionArity,
            "three(value: 'Tensor', event: 'Any', more: 'Any') -> 'None' is not an action: an action takes (value) or "
            "(value, event), everything else needs a default; for a hook of PyTorch use kedge.from_hook(...)",
        ),
        (
            "model",
            ("a", keyword),
            ActionArity,
            "keyword(value: 'Tensor', *, factor: 'float') -> 'None' is not an action: "
            "an action takes (value) or (value, event), everything else needs a default",
        ),
        (
            3,
            ("a", kedge.zero()),
            NoSiteMatched,
            "cannot hook 3; a target is a module, kedge.everywhere, a tensor, a dict of named tensors, an autograd node or a Python function",
        ),
        (
            torch.ones(2),
            (kedge.zero(),),
            NoSuchKind,
            '"target" does not require grad, so it has no gradient to hook; call requires_grad_() on it first',
        ),
        (
            {"z": torch.ones(2)},
            (kedge.zero(),),
            NoSuchKind,
            '"z" does not require grad, so it has no gradient to hook; call requires_grad_() on it first',
        ),
        (
            {"z": torch.ones(2, requires_grad=True) * 2},
            (":acc", kedge.zero()),
            NoSuchKind,
            '"z:acc" is .grad after accumulation, but z is not a leaf: it was made by MulBackward0 and accumulates nothing; use "z:grad"',
        ),
        (
            {"z": 3},
            (kedge.zero(),),
            NoSiteMatched,
            '"z" is a int; a target dict maps names to tensors',
        ),
        (
            {"z": torch.ones(2, requires_grad=True)},
            ("z:out", kedge.zero()),
            NoSuchKind,
            '"z:out": z has no :out; it has :grad, :acc',
        ),
        (
            (torch.ones(2, requires_grad=True) * 2).grad_fn,
            (":in.share", kedge.zero()),
            NoSuchKind,
            '":in.share": MulBackward0 has no :in.share; it has :pre, :post',
        ),
        (
            {"z": torch.ones(2, requires_grad=True)},
            ("y", kedge.zero()),
            NoSiteMatched,
            '"y" matches none of the tensors z',
        ),
    ],
)
def test_what_cannot_be_hooked_is_refused(
    target: Any, what: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """Targets, selectors and actions that do not fit are refused when they are hooked, and nothing stays behind."""
    target = Net() if isinstance(target, str) else target
    with kedge.session() as s, pytest.raises(error) as caught:
        s.hook(target, *what)

    assert type(caught.value) is error
    assert str(caught.value) == message


def test_frozen_parameters_alone_are_refused() -> None:
    """A selector that finds only frozen parameters is an error; their values can be seen all the same."""
    model = Net().requires_grad_(False)
    with kedge.session() as s:
        with pytest.raises(NoSuchKind) as caught:
            s.hook(model, "**:param.grad", kedge.record())
        h = s.hook(model, "a.bias:param", kedge.record())
        model(torch.ones(1, 2))

    assert str(caught.value) == (
        '"**:param.grad": a.weight, a.bias, b.weight and 1 more requires no grad, so there is no gradient; call requires_grad_() first'
    )
    assert torch.equal(h["a.bias"], model.a.bias)


WRONG: list[tuple[str, Callable[[Tensor], Any], str, str]] = [
    (
        "a",
        lambda v: v[:1],
        "it returned float32[1, 3] on cpu in place of float32[2, 3] on cpu",
        "forward",
    ),
    (
        "a",
        lambda v: v.double(),
        "it returned float64[2, 3] on cpu in place of float32[2, 3] on cpu",
        "forward",
    ),
    (
        "a",
        lambda v: v.to("meta"),
        "it returned float32[2, 3] on meta in place of float32[2, 3] on cpu",
        "forward",
    ),
    ("a", lambda v: 3.0, "it returned a float; return a tensor, or None to keep the value", ""),
    ("a", lambda v: (v,), "it returned a tuple; return a tensor, or None to keep the value", ""),
    (
        "a:in",
        lambda v: v.T.contiguous()[:1],
        "it returned float32[1, 2] on cpu in place of float32[2, 2] on cpu",
        "forward",
    ),
    (
        "a:out.grad",
        lambda v: v.sum(),
        "it returned float32[] on cpu in place of float32[2, 3] on cpu",
        "gradient",
    ),
    (
        "a:out.grad",
        lambda v: True,
        "it returned a bool; return a tensor, or None to keep the value",
        "",
    ),
    (
        "a.bias:param.grad",
        lambda v: v.double(),
        "it returned float64[3] on cpu in place of float32[3] on cpu",
        "gradient",
    ),
    (
        "a.bias:param.acc",
        lambda v: v.to("meta"),
        "it returned float32[3] on meta in place of float32[3] on cpu",
        "gradient",
    ),
    (
        "b:in.share",
        lambda v: v[0],
        "it returned float32[3] on cpu in place of float32[2, 3] on cpu",
        "gradient",
    ),
    (
        "a.bias:param",
        lambda v: v[:1],
        "it returned float32[1] on cpu in place of float32[3] on cpu",
        "forward",
    ),
]
ADVICE = {
    "forward": "; to change shape, dtype or device, use kedge.replace(..., reshape=True)",
    "gradient": "; a gradient must keep its shape, dtype and device",
    "": "",
}
LEAVES = {"a:in": "a:in[input]", "b:in.share": "b:in.share[input]"}


@pytest.mark.parametrize(("selector", "action", "problem", "advice"), WRONG)
def test_an_edit_that_does_not_fit_is_refused(
    selector: str, action: Any, problem: str, advice: str
) -> None:
    """A returned value of another shape, dtype or device, or no tensor, raises with site, pass, shape and what to do."""
    with pytest.raises(EditError) as caught, kedge.session() as s:
        s.hook(model := Net(), selector, action)
        model(torch.ones(2, 2)).sum().backward()

    site = LEAVES.get(selector, selector if ":" in selector else f"{selector}:out")
    moment = (
        ", backward 0" if "grad" in selector or "acc" in selector or "share" in selector else ""
    )
    shape = {"a.bias": "[3]", "a:in": "[2, 2]"}.get(
        selector if selector == "a:in" else selector.partition(":")[0], "[2, 3]"
    )
    assert str(caught.value) == (
        f"<lambda> at {site} (pass 0, call 0{moment}, float32{shape}): {problem}{ADVICE[advice]}"
    )


def test_replace_may_change_the_shape_if_it_says_so() -> None:
    """`replace(..., reshape=True)` lifts the check for forward values, and not for gradients."""
    model = Net()
    with kedge.hook(model, "a", kedge.replace(lambda v: v[:1], reshape=True)):
        assert model(torch.ones(2, 2)).shape == (1, 1)
    with (
        pytest.raises(EditError, match="a gradient must keep its shape, dtype and device$"),
        kedge.session() as s,
    ):
        s.hook(model, "a:out.grad", kedge.replace(lambda v: v[:1], reshape=True))
        model(torch.ones(2, 2)).sum().backward()


@pytest.mark.parametrize(
    "selector",
    ["a:out", "a:in", "a:out.grad", "a.bias:param.grad", "a.bias:param.acc"],
)
def test_a_change_in_place_is_refused(selector: str) -> None:
    """An action that changes its value in place gets an error that says to return a new one."""
    with pytest.raises(InPlaceEdit) as caught, kedge.session() as s:
        s.hook(model := Net(), selector, lambda v: v.mul_(2))
        model(torch.ones(2, 2)).sum().backward()

    assert str(caught.value).endswith(
        "): the action changed the value in place, but other parts of the program may share its memory; return a "
        "new tensor instead (x * 2, not x.mul_(2))"
    )
    assert str(caught.value).startswith("test_a_change_in_place_is_refused.<locals>.<lambda> at a")


def test_a_failing_action_tells_its_place() -> None:
    """What an action raises arrives with site, pass, call and shape in front, and the user's own error as its cause."""

    def broken(value: Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(ActionError) as caught, kedge.session() as s:
        s.hook(model := Net(), "b", broken)
        model(torch.ones(2, 2))

    assert type(caught.value) is ActionError
    assert str(caught.value) == (
        "test_a_failing_action_tells_its_place.<locals>.broken at b:out (pass 0, call 0, float32[2, 1]): KeyError: 'mine'"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failing_action_may_be_switched_off_with_a_warning() -> None:
    """With `on_error="warn"` the program goes on, the action is off at that site, and a warning says so once."""
    model, seen = Net(), []

    def broken(value: Tensor) -> None:
        raise ValueError("mine")

    with kedge.session(on_error="warn") as s:
        s.hook(model, "b", lambda v: seen.append("before"), broken, lambda v: v * 0)
        gradient = s.hook(model, "a:out.grad", lambda v: v[0])
        with pytest.warns(ActionDisabled) as caught:
            out = model(torch.ones(2, 2))
            out.sum().backward()
            model(torch.ones(2, 2)).sum().backward()
        assert s.ledger()["a:out.grad"].cause == (
            "its action was switched off",
            "see the warning issued when it failed",
        )
        gradient.remove()

    where = "test_a_failing_action_may_be_switched_off_with_a_warning.<locals>"
    off = "; this action is off for the rest of the session"
    assert [str(w.message) for w in caught] == [
        f"{where}.broken at b:out (pass 0, call 0, float32[2, 1]): ValueError: mine{off}",
        f"{where}.<lambda> at a:out.grad (pass 0, call 0, backward 0, float32[2, 3]): it returned float32[3] on cpu "
        f"in place of float32[2, 3] on cpu; a gradient must keep its shape, dtype and device{off}",
    ]
    assert seen == ["before", "before"]
    assert out.count_nonzero() == 0


def test_another_way_to_treat_errors_is_refused() -> None:
    """`on_error` is "raise" or "warn"."""
    with pytest.raises(ValueError, match=r"^on_error='ignore': use \"raise\" or \"warn\"$"):
        kedge.session(on_error="ignore")  # type: ignore[arg-type]


def test_a_condition_that_is_met_stops_the_program() -> None:
    """`error_if` raises with the place and what was found."""
    model = Net()
    with torch.no_grad():
        model.a.weight[0, 0] = float("nan")
    with (
        pytest.raises(ConditionMet) as caught,
        kedge.hook(model, "**", kedge.error_if(kedge.nonfinite)),
    ):
        model(torch.ones(2, 2))

    assert str(caught.value) == (
        "error_if(nonfinite) at a:out (pass 0, call 0, float32[2, 3]): nonfinite is true: 6 elements, 2 of them NaN and 0 infinite"
    )


def test_reading_what_was_never_made_says_why() -> None:
    """A record that is not there names the sites that were hooked, or the cause of the silence."""
    model = Net()
    with kedge.session() as s:
        h = s.hook(model, "a, a:out.grad", kedge.record())
        with pytest.raises(NotRecorded) as early:
            h["a"]
        with torch.no_grad():
            model(torch.ones(2, 2))
        with pytest.raises(NotRecorded) as ungraded:
            h["a:out.grad"]
        with pytest.raises(NotRecorded) as other:
            h["b"]
        h.remove()

    assert str(early.value) == (
        'nothing was recorded under "a": a:out  never fired: the model was not called (call it inside the block, or before remove()); '
        "a:out.grad  never fired: the model was not called (call it inside the block, or before remove())"
    )
    assert str(ungraded.value) == (
        'nothing was recorded under "a:out.grad": a:out.grad  never fired: its value requires no grad: the forward ran under no_grad '
        "(call the model with grad enabled)"
    )
    assert (
        str(other.value)
        == 'nothing was recorded under "b": the sites hooked here are a:out, a:out.grad'
    )


def test_the_error_about_a_call_or_leaf_that_was_not_recorded_lists_those_that_were() -> None:
    """Asking for another call or leaf than there was names what there is."""
    model = Net()
    with kedge.hook(model, "a", kedge.record()) as h:
        model(torch.ones(2, 2))
    with pytest.raises(NotRecorded) as call:
        h["a#1"]
    with pytest.raises(NotRecorded) as leaf:
        h["a:out[1]"]

    assert str(call.value).startswith('nothing was recorded under "a#1"')
    assert "a#0:out" in str(call.value)
    assert str(leaf.value).startswith('nothing was recorded under "a:out[1]"')
    assert "a#0:out" in str(leaf.value)


@pytest.mark.parametrize("name", ["*", "a, b", "a[bc]", "**{Linear}"])
def test_records_are_listed_by_the_name_of_one_site(name: str) -> None:
    """A pattern is no name."""
    with kedge.hook(model := Net(), "*", kedge.record()) as h:
        model(torch.ones(2, 2))
    with pytest.raises(SelectorError) as caught:
        h.records(name)

    assert (
        str(caught.value)
        == f'"{name}" may match several sites; records are read by the name of one, such as "layer4"'
    )


@pytest.mark.parametrize(
    ("actions", "n"), [((kedge.zero(),), 0), ((kedge.record(), kedge.record()), 2)]
)
def test_a_hook_that_records_nothing_cannot_be_read(actions: tuple[Any, ...], n: int) -> None:
    """Reading needs exactly one action that records."""
    with kedge.hook(model := Net(), "a", *actions) as h:
        model(torch.ones(2, 2))
    with pytest.raises(ReadError) as caught:
        h["a"]

    assert str(caught.value) == (
        f"this hook has {n} recording actions, so a name does not select one record; give it exactly one kedge.record() or kedge.measure()"
    )


def test_a_strict_session_raises_where_another_warns() -> None:
    """A site that did not fire is a warning at the end, an error if the session is strict, and neither if the block raises."""
    model = Net()
    message = "1 of 2 hooked sites never fired\n  a:in.grad: its value requires no grad: nothing before it is trainable, or it was detached; make something before it trainable; an input of the model needs requires_grad_()"
    with pytest.warns(NeverFiredWarning) as warned, kedge.session() as s:
        s.hook(model, "a, a:in.grad", kedge.record())
        model(torch.ones(2, 2))
    with pytest.raises(NeverFired) as raised, kedge.session(strict=True) as s:
        s.hook(model, "a, a:in.grad", kedge.record())
        model(torch.ones(2, 2))
    with pytest.raises(ZeroDivisionError), kedge.session(strict=True) as s:
        s.hook(model, "a", kedge.record())
        _ = 1 / 0

    assert [str(w.message) for w in warned] == [message]
    assert warned[0].filename == __file__
    assert str(raised.value) == message
    assert not model.a._forward_hooks


def test_an_edit_of_a_share_that_is_used_twice_is_refused() -> None:
    """A share that is complete only when parts of it have gone on cannot be edited, and the message says what can."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() + x.cos()

    with pytest.raises(EditError) as caught, kedge.session() as s:
        s.hook(model := nn.Sequential(Twice()), "0:in.share", kedge.scale(2))
        model(torch.ones(2, requires_grad=True)).sum().backward()

    assert str(caught.value) == (
        "an action returned a value at 0:in.share[x], but this call uses its input 2 times, so its share is known "
        "only after parts of it were passed on; edit :in.grad, the total, instead"
    )


def test_an_edit_of_an_output_that_cannot_be_rebuilt_says_so() -> None:
    """Where a structure refuses to be rebuilt with a new leaf, the error names the site and not Kedge's inside."""

    @dataclasses.dataclass
    class Computes:
        a: Tensor

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Computes:
            return Computes(x)

    with kedge.hook(model := nn.Sequential(Makes()), "0:out[a]", kedge.scale(2)):
        assert torch.equal(model(torch.ones(2)).a, torch.full((2,), 2.0))


@pytest.mark.parametrize("kind", ["param.grad", "param.acc"])
def test_a_lazy_parameter_has_to_be_made_first(kind: str) -> None:
    """What has no shape yet cannot be hooked: the error says to call the model once, after which it works."""
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(
        NoSuchKind, match="has no shape before the first forward.*call the model once"
    ):
        kedge.hook(model, f"0.weight:{kind}", kedge.record())
    model(torch.ones(1, 3))
    with kedge.hook(model, f"0.weight:{kind}", kedge.record()) as h:
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(h[f"0.weight:{kind}"], model[0].weight.grad)


@pytest.mark.parametrize("target", [("0", "1"), {"0"}, iter(["0"])])
def test_selectors_without_a_model_are_a_list(target: Any) -> None:
    """Another collection is no target, and the message says what to write."""
    with pytest.raises(
        NoSiteMatched, match="selectors without a model are a text or a list of texts$"
    ):
        kedge.hook(target, kedge.record())


def test_a_model_after_its_selector_is_refused() -> None:
    """A module is an action too, so this would hook every model with it."""
    with pytest.raises(
        TypeError, match=r'the model comes before the selector: hook\(model, "a", action\)'
    ):
        kedge.hook("a", Net(), kedge.record())


def test_an_action_without_its_brackets_is_an_error_that_says_so() -> None:
    """`kedge.record` makes actions and is not one."""
    with pytest.raises(
        ActionArity,
        match=r"^kedge\.record makes actions and is not one: call it, as in kedge\.record\(\.\.\.\)$",
    ):
        kedge.hook(Net(), "a", kedge.record)
