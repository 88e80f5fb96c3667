"""Hooks without a block: attaching them again warns, and they can be removed without their handles."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import AttachedTwice, WrongCall
from kedge.hooks.handle import Hooked
from kedge.recipes import Ablation


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A small model; what a test leaves on it is removed."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    yield net
    kedge.audit(net).remove()


def a_cell(model: nn.Module) -> None:
    """Do what a notebook cell does whose handle the next run overwrites."""
    kedge.hook(model, "1", kedge.scale(2))


def test_a_cell_that_runs_twice_gets_a_warning(model: nn.Module) -> None:
    """Each run says how many hooks were there before, at the line that attaches one more."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a_cell(model)
    with pytest.warns(
        AttachedTwice, match=r"^scale\(2\) is attached at 1:out again, and an earlier one is "
    ) as told:
        a_cell(model)
    assert told[0].filename == __file__
    with pytest.warns(
        AttachedTwice, match="and 2 earlier ones are still in place, so all of them run"
    ):
        a_cell(model)

    x = torch.randn(2, 3)
    assert torch.allclose(model[:2](x), model[1](model[0](x)))
    assert len(kedge.audit(model).of("forward")) > 0


def test_what_has_no_handle_can_be_removed(model: nn.Module) -> None:
    """All of it, with the number of actions; hooks of others and of a block stay, and then everything is as before."""
    kept = model[0].register_forward_hook(lambda module, args, output: None)
    before = kedge.audit(model)
    x = torch.randn(2, 3)
    plain = model(x)
    a_cell(model)
    s = kedge.session()
    s.hook(model, "0, 2", kedge.record())
    with kedge.hook(model, "1", kedge.record()) as acts:
        assert kedge.audit(model).remove() == 3
        assert torch.equal(model(x), plain)
        assert acts["1"].shape == (2, 4)

    assert kedge.audit(model) == before
    assert kedge.audit(model).remove() == 0
    kept.remove()


def test_a_session_keeps_its_hooks_on_other_models(model: nn.Module) -> None:
    """Only those on the audited model go."""
    other, s = nn.Linear(3, 3), kedge.session()
    s.hook(model, "0", kedge.record())
    acts = s.hook(other, ":out", kedge.record())

    assert kedge.audit(model).remove() == 1
    other(torch.randn(1, 3))
    assert len(acts) == 1
    s.end()


@pytest.mark.parametrize(
    "another",
    [
        lambda model: kedge.hook(model, "0", kedge.scale(2)),
        lambda model: kedge.hook(model, "1", kedge.scale(3)),
        lambda model: kedge.hook(nn.Sequential(model[0], nn.ReLU()), "1", kedge.scale(2)),
        lambda model: kedge.hook(model, "1:out.grad", kedge.scale(2)),
    ],
    ids=["site", "action", "model", "kind"],
)
def test_another_hook_is_not_the_same(
    another: Callable[[nn.Module], Hooked], model: nn.Module
) -> None:
    """Of another site, action or model nothing is said."""
    a_cell(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = another(model)
    assert handle.end is not None
    handle.end(quiet=True)


def test_functions_are_the_same_by_their_code(model: nn.Module) -> None:
    """A function that a cell defines anew is the same; another one of the same name is not."""

    def action(factor: float) -> Callable[[Tensor], Tensor]:
        return (lambda value: value * 2) if factor == 2 else (lambda value: value + 1)

    kedge.hook(model, "1", action(2))
    kedge.hook(model, "1", action(1))
    with pytest.warns(AttachedTwice, match="again"):
        kedge.hook(model, "1", action(2))


def test_functions_with_other_names_enclosed_are_others(model: nn.Module) -> None:
    """Two functions of one factory, for two names, are intended; with the same name, the second one gets a warning."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def act(value: Tensor) -> None:
            kept[name] = value

        return act

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kedge.hook(model, "1", keep("a"))
        kedge.hook(model, "1", keep("b"))
    model(torch.randn(1, 3))
    assert kept.keys() == {"a", "b"}
    with pytest.warns(AttachedTwice, match="again"):
        kedge.hook(model, "1", keep("b"))


def test_another_schedule_is_not_the_same(model: nn.Module) -> None:
    """The same action in other steps is intended; in the same steps it gets a warning, even if a cell makes the schedule anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for when in (
            kedge.at(0),
            kedge.at(5),
            kedge.every(2),
            lambda step: step > 7,
            lambda step: step < 3,
            None,
        ):
            kedge.hook(model, "1", kedge.scale(2), when=when)
    for when in (kedge.at(5), kedge.every(2), lambda step: step > 7, None):
        with pytest.warns(AttachedTwice, match="again, and an earlier one is"):
            kedge.hook(model, "1", kedge.scale(2), when=when)


def without(channel: int) -> Callable[[Tensor], Tensor]:
    """Return an action that depends on a channel."""

    def cut(value: Tensor) -> Tensor:
        return value * (torch.arange(value.shape[1]) != channel)

    return cut


class Tally:
    """Counts values."""

    def __init__(self) -> None:
        self.seen = 0

    def see(self, value: Tensor) -> None:
        """Count one."""
        self.seen += 1


@pytest.mark.parametrize(
    "action",
    [
        without,
        lambda number: lambda value, by=number: value * by,
        lambda number: Tally().see,
        lambda number: nn.Linear(4, 4),
        lambda number: kedge.add(torch.full((4,), float(number))),
        lambda number: kedge.replace(without(number)),
        lambda number: kedge.error_if(lambda value: bool(value.sum() > number)),
        lambda number: Ablation(torch.full((4,), float(number))),
        lambda number: Ablation(kedge.replace(without(number))),
    ],
    ids=[
        "closure",
        "default",
        "method",
        "module",
        "tensor",
        "function",
        "condition",
        "ablation",
        "within",
    ],
)
def test_actions_that_differ_inside_are_not_told(
    action: Callable[[int], Any], model: nn.Module
) -> None:
    """Two channels, two directions and two objects are meant, although they have one name; one of them again is not."""
    kept = action(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kedge.hook(model, "1", kept)
        kedge.hook(model, "1", action(2))
    with pytest.warns(AttachedTwice, match="and an earlier one is still"):
        kedge.hook(model, "1", kept)


def test_actions_that_are_made_again_get_a_warning(model: nn.Module) -> None:
    """By the cell that makes them, with the same numbers."""
    for action in (
        without,
        lambda number: Ablation(kedge.scale(number)),
        lambda number: kedge.replace(without(number)),
    ):
        kedge.hook(model, "1", action(1))
        with pytest.warns(AttachedTwice, match="and an earlier one is still"):
            kedge.hook(model, "1", action(1))


def test_blocks_are_not_told(model: nn.Module) -> None:
    """A block removes its hooks itself: one in another, and one after another, are meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with (
                kedge.hook(model, "1", kedge.record()),
                kedge.hook(model, "1", kedge.record()),
                kedge.session() as s,
            ):
                s.hook(model, "1", kedge.record())
                model(torch.randn(1, 3))
        handle = kedge.hook(model, "1", kedge.record())
        model(torch.randn(1, 3))
        handle.remove()
        a_cell(model)


def test_a_warning_that_is_an_error_leaves_no_hook(model: nn.Module) -> None:
    """All or nothing, here too."""
    a_cell(model)
    before = kedge.audit(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttachedTwice):
            a_cell(model)
    assert [entry.notes for entry in kedge.audit(model)] == [entry.notes for entry in before]


def test_only_a_model_has_its_hooks_removed() -> None:
    """For a tensor the handle is needed; an audit that was pickled has lost the model."""
    for audit in (kedge.audit(torch.ones(2)), pickle.loads(pickle.dumps(kedge.audit(nn.ReLU())))):
        with pytest.raises(WrongCall, match=r"kedge\.audit\(model\)\.remove\(\)"):
            audit.remove()
