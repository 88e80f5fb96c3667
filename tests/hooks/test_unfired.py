"""Causes of sites that never fired, where the program changes the model in the block."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import kedge

KINDS = "a, a:in, a:out.grad, a.0, a.0:saved, a/relu, a.0/linear, a.0.weight:param"


class Part(nn.Sequential):
    """A layer and an operation."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Replacing(nn.Module):
    """Makes one of its children anew in each forward, as some attention layers of big_bird do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.a = Part()
        return self.b(self.a(x))


@pytest.mark.parametrize("site", KINDS.split(", "))
def test_a_module_that_the_forward_replaces_is_the_cause(site: str) -> None:
    """The path is called, but the hooked object is not there any more."""
    model = Replacing()
    s = kedge.session()
    s.hook(model, f"{site}, b", kedge.record())
    model(torch.randn(1, 2)).sum().backward()
    ledger = s.ledger()
    s.end(quiet=True)

    assert ledger["b"].fired == 1
    cause = next(entry.cause for entry in ledger if entry.site.path != "b")
    assert cause.why.startswith("another module is at its path now")


def test_a_module_that_is_removed_has_that_cause() -> None:
    """Neither it nor what was inside it is part of the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    s = kedge.session()
    s.hook(model, "**", kedge.record())
    model[1] = None
    s.hook(model, "0", kedge.record())
    model[0](torch.randn(1, 2))
    ledger = s.ledger()
    s.end(quiet=True)
    assert {ledger[site].cause.why for site in ("1", "1.0")} == {
        "it is no longer part of the model"
    }


@pytest.mark.parametrize("site", ["0:out.grad", "0.weight:param.grad", "1"])
def test_an_action_that_raised_is_the_cause(site: str) -> None:
    """Also in a backward, which did reach the site."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    s = kedge.session()
    s.hook(model, site, lambda value: value[:1])
    with pytest.raises(kedge.errors.EditError):
        model(torch.randn(3, 2)).sum().backward()
    cause = s.ledger()[site].cause
    s.end(quiet=True)

    assert cause == ("its action raised an error each time", "see the error")


def test_the_gradient_of_an_input_says_how_to_get_it() -> None:
    """An input has a gradient only if it requires one."""
    model = nn.Sequential(nn.Linear(2, 2))
    s = kedge.session()
    s.hook(model, ":in.grad", kedge.record())
    model(torch.randn(3, 2)).sum().backward()
    cause = s.ledger()[":in.grad"].cause
    s.end(quiet=True)

    assert cause.remedy.endswith("; an input of the model needs requires_grad_()")


class ManyUnused(nn.Module):
    """Calls none of many modules, and reads an attribute of one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for i in range(number):
            setattr(self, f"m{i}", nn.Dropout(0.5))
        self.used = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.m1.p


def test_the_source_of_a_class_is_parsed_once_for_all_its_silent_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once the class and once its forward, however many sites and sessions are explained."""
    read, source_of = [], inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda of: read.append(of) or source_of(of))
    model = ManyUnused(40)
    for _ in range(2):
        with kedge.session() as s:
            s.hook(model, "*", kedge.record())
            model(torch.ones(1, 2))
            ledger = s.ledger()
            s.end(quiet=True)
    assert read.count(ManyUnused) == read.count(ManyUnused.forward) == 1
    assert ledger["m1"].cause.why == "bypassed: ManyUnused.forward reads its p without calling it"
    assert ledger["m2"].cause.why == "never called while the hook was attached"


def test_a_session_that_ends_quietly_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a watched run, whose ledger has been written by then."""
    s = kedge.session()
    s.hook(ManyUnused(3), "*", kedge.record())
    monkeypatch.setattr("kedge.hooks.ledger.explain", lambda tap, session: pytest.fail("explained"))
    s.end(quiet=True)


X = torch.ones(1, 2)


def chain(*between: nn.Module) -> nn.Sequential:
    """Return two layers with something between them."""
    return nn.Sequential(nn.Linear(2, 2), *between, nn.Linear(2, 2))


class Cut(nn.Module):
    """Passes a value on without its graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Under(nn.Module):
    """Calls a layer in a mode."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.layer, self.mode = nn.Linear(2, 2), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            x = self.layer(x)
        return x.clone()


def why(model: nn.Module, site: str, run: Callable[[], Any], others: str = "") -> str:
    """Return the cause of a silent site."""
    s = kedge.session()
    s.hook(model, ", ".join(filter(None, (site, others))), kedge.measure())
    run()
    cause = s.ledger()[site].cause
    s.end(quiet=True)
    assert cause is not None
    return str(cause.why)


class Halves(nn.Module):
    """Returns two halves that one operation made."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x * 2).chunk(2, -1)


@pytest.mark.parametrize(("unused", "used"), [(0, 1), (1, 0)])
def test_one_of_several_results_that_is_not_used_is_told_apart(unused: int, used: int) -> None:
    """The operation's backward ran, for the other result: nothing is cut off."""
    model, x = Halves(), torch.randn(2, 4, requires_grad=True)

    assert (
        why(model, f":out.grad[{unused}]", lambda: model(x)[used].sum().backward())
        == "the differentiated value does not depend on this tensor, only on others of the same operation or checkpoint"
    )


def test_a_hook_that_removes_itself_has_fired() -> None:
    """Sites that it did not get to were not passed by: the forward was still running."""
    model = chain()
    with pytest.warns(kedge.errors.NeverFiredWarning) as said:
        handle = kedge.hook(model, "0, 1", lambda value: handle.remove())
        model(X)
    assert str(said[0].message) == (
        "1 of 2 hooked sites never fired\n  1:out: a forward was still running, and had not called it; "
        "keep the hook until the forward has returned"
    )


@pytest.mark.parametrize("called", [False, True])
def test_a_hook_that_was_removed_early_says_so(*, called: bool) -> None:
    """Nothing is said of the backward that ran after it."""
    model = chain()
    handle = kedge.hook(model, "0:out.grad", kedge.record())
    out = model(X) if called else None
    with pytest.warns(kedge.errors.NeverFiredWarning, match="the hook was removed before"):
        handle.remove()
    assert out is None or out.sum().backward() is None


def test_hooks_that_came_late_saw_no_call() -> None:
    """What was called before is no other path of the forward, and no failure of an action."""
    model, s = chain(), kedge.session()
    s.hook(model, "0", kedge.record())
    model(X)
    late = s.hook(model, "0, 1", kedge.measure())
    assert {entry.cause.why for entry in late.ledger()} == {
        "the model was not called again after it was hooked"
    }
    s.end(quiet=True)


def test_another_model_that_was_called_is_not_this_one() -> None:
    """The passes of each model are its own."""
    model, other = chain(), chain()
    with kedge.session() as s:
        s.hook(other, "0", kedge.measure())
        assert why(model, "0", lambda: other(X)) == "the model was not called"
        other(X)


def test_a_cut_is_named_by_the_calls_around_it() -> None:
    """The last call without a gradient, and the next one with one."""
    model = chain(Cut())
    cause = why(model, "0:out.grad", lambda: model(X).sum().backward(), "2:out.grad")
    assert cause == 'the backward that ran did not reach it; it reached "2", which returned later'


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mode_around_one_call_is_distinguished_from_one_around_all(mode: Any) -> None:
    """The first is in the model, the second in the program."""
    model = chain(Under(mode))
    inner = why(model, "1.layer:out.grad", lambda: model(X))
    assert (
        inner
        == f"its value requires no grad: the forward had grad, but this call was under {mode.__name__}"
    )

    def whole() -> None:
        with mode():
            model(X)

    assert (
        why(model, "0:out.grad", whole)
        == f"its value requires no grad: the forward ran under {mode.__name__}"
    )


def test_under_vmap_the_transform_is_the_cause() -> None:
    """Values are of the transform and show no gradient, though the parameters get theirs."""
    model = chain()

    def run() -> None:
        torch.func.vmap(model)(torch.ones(3, 2)).sum().backward()

    assert why(model, "0:out.grad", run).startswith(
        "it ran in a transform of torch.func, such as vmap"
    )


def test_a_reentrant_checkpoint_without_a_graded_input_is_the_cause() -> None:
    """No backward runs it again."""
    model = chain()

    def run() -> None:
        hidden = torch.utils.checkpoint.checkpoint(model[0], X, use_reentrant=True)
        model[1](hidden).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert why(model, "0:out.grad", run).startswith(
            "it ran in a reentrant checkpoint without a graph"
        )


def test_an_interrupt_is_not_a_failure_of_the_action() -> None:
    """The action had not returned."""
    model, s = chain(), kedge.session()

    def interrupt(value: Tensor) -> None:
        raise KeyboardInterrupt

    s.hook(model, "0", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert (
        s.ledger()["0"].cause.why
        == "each call ended before its action had returned, as by an interrupt"
    )
    s.end(quiet=True)


def _refused(model: nn.Module) -> None:
    """Call a model with an input that its second layer refuses."""
    with pytest.raises(RuntimeError):
        model(X)


@pytest.mark.parametrize(
    ("site", "cause"),
    [
        (":out", "each of its calls raised an error"),
        ("1:out", "each of its calls raised an error"),
        ("1:out.grad", "each of its calls raised an error"),
        (
            "2:out",
            "never called while the hook was attached: each forward raised an error before that",
        ),
    ],
)
def test_an_error_of_the_program_is_the_cause(site: str, cause: str) -> None:
    """A call that raised has no value without tensors, and the forward took no other path."""
    model = chain(nn.Linear(3, 3))
    assert why(model, site, lambda: _refused(model)) == cause


def test_a_hook_in_pytorchs_form_is_not_called_when_its_module_raises() -> None:
    """PyTorch calls Kedge's own hook then, and the user's would have received None as output."""
    model, seen = chain(nn.Linear(3, 3)), []
    s = kedge.session()
    s.hook(model, "1", kedge.from_hook(lambda module, args, output: seen.append(output)))
    _refused(model)
    s.end(quiet=True)
    assert seen == []


def test_a_module_that_returns_none_while_an_error_is_handled_did_not_raise() -> None:
    """The error is the program's, and was caught before the module was called."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            pass

    def handle() -> None:
        try:
            int("no number")
        except ValueError:
            model(X)

    model = Nothing()
    assert why(model, ":out", handle) == "its value contains no tensor: NoneType with no tensor"


def test_a_gradient_that_was_not_asked_for_is_not_said_to_be_cut_off() -> None:
    """autograd.grad() and backward(inputs=) leave out gradients on which nothing else depends."""
    model, s = chain(), kedge.session()
    s.hook(model, "*.weight:param.grad, 0.weight:param.acc", kedge.measure())
    torch.autograd.grad(model(X).sum(), model[1].weight)
    model(X).sum().backward(inputs=[model[1].weight])
    ledger = s.ledger()
    s.end(quiet=True)
    remedies = [entry.cause.remedy for entry in ledger if entry.cause is not None]
    assert len(remedies) == 2
    assert all("backward(inputs=) asked for other gradients only" in each for each in remedies)
