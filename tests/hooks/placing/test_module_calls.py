"""The calls under way are those that are under way, however a call ends, on every thread and in every recompute."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kedge.hooks.placing.module_calls import (
    CallTracker,
    ModuleCalls,
    OpenCalls,
    given_to,
    hear,
    is_repeated,
)
from kedge.stderr import Shield
from tests.hook_tables import hook_tables

Heard = list[tuple[str, tuple[str, ...], str]]


class Calls(nn.Module):
    """Calls its parts one after the other, and does what it is told with each."""

    def __init__(self, *parts: nn.Module, by: Callable[..., Any] = lambda part, x: part(x)) -> None:
        super().__init__()
        self.parts, self.by = nn.ModuleList(parts), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = self.by(part, x)
        return x


class Raises(nn.Module):
    """Raises what it is told to."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return x


class Follower:
    """Writes down what a tracker says: what happened, the calls around it, and which call it is."""

    def __init__(self, **options: Any) -> None:
        self.heard: Heard = []
        self.tracker: CallTracker[str, str] = CallTracker(self.begin, self.end, **options)

    def begin(self, calls: OpenCalls[str], subject: str, module: nn.Module, given: Any) -> str:
        note = f"{subject}#{calls.count(subject)}"
        self.heard.append(("begin", tuple(calls.notes), note))
        return note

    def end(self, calls: OpenCalls[str], note: str, output: Any) -> None:
        self.heard.append(("end" if output is not None else "raised", tuple(calls.notes), note))

    def under_way(self) -> list[str]:
        return self.tracker.open.notes


@contextmanager
def following(model: nn.Module, **options: Any) -> Iterator[Follower]:
    """Follow all modules of a model that have no parts in a list, and take the hooks down."""
    follower = Follower(**options)
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            follower.tracker.follow(module, name.replace("parts.", ""), outermost=not name)
    before = hook_tables()
    try:
        yield follower
    finally:
        follower.tracker.close()
        assert hook_tables() == before


def graded() -> torch.Tensor:
    """Make an input."""
    return torch.ones(2, requires_grad=True)


def test_calls_begin_and_end_inside_each_other() -> None:
    """Each is reported with the calls around it, the outermost first."""
    model = Calls(nn.ReLU(), Calls(nn.Tanh()))
    with following(model) as follower:
        model(graded())

    assert follower.heard == [
        ("begin", (), "#0"),
        ("begin", ("#0",), "0#0"),
        ("end", ("#0",), "0#0"),
        ("begin", ("#0",), "1#0"),
        ("begin", ("#0", "1#0"), "1.0#0"),
        ("end", ("#0", "1#0"), "1.0#0"),
        ("end", ("#0",), "1#0"),
        ("end", (), "#0"),
    ]


def test_a_module_is_counted_within_the_outermost_call() -> None:
    """One that runs several times has several numbers, and begins with 0 in the next forward."""
    shared = nn.ReLU()
    model = Calls(shared, shared)
    with following(model) as follower:
        model(graded())
        model(graded())

    assert [note for what, _, note in follower.heard if what == "begin"] == ["#0", "0#0", "0#1"] * 2


def test_a_module_that_calls_itself_ends_innermost_first() -> None:
    """Two calls of one module are two."""

    class Again(nn.Module):
        def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return self(x, times - 1) if times else x

    model = Again()
    with following(model) as follower:
        model(graded())

    assert [note for what, _, note in follower.heard if what == "end"] == ["#2", "#1", "#0"]


def test_a_call_that_raises_ends() -> None:
    """Its end is reported without a value, the calls around it continue, and nothing is left behind."""
    model = Calls(Raises(ZeroDivisionError))
    with following(model) as follower:
        with pytest.raises(ZeroDivisionError):
            model(graded())
        assert follower.under_way() == []

    assert follower.heard[2:] == [("raised", ("#0",), "0#0"), ("raised", (), "#0")]


def suppressing(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a part, whatever becomes of it."""
    with suppress(BaseException):
        part(x)
    return x


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_call_that_was_interrupted_ends_with_the_one_around_it(
    error: type[BaseException],
) -> None:
    """PyTorch calls no hook for it; the end of the call around it takes it along, without a word of its own."""
    model = Calls(Calls(Raises(error)), by=suppressing)
    with following(model) as follower:
        model(graded())
        assert follower.under_way() == []

    assert follower.heard[3:] == [("end", (), "#0")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_an_interrupt_left_is_gone_when_the_model_is_called_next(
    error: type[BaseException],
) -> None:
    """It is known from the frames, so no call is thought to be inside one that is over."""
    raising = Raises(error)
    model = Calls(raising)
    with following(model) as follower:
        with pytest.raises(error):
            model(graded())
        assert follower.under_way() == ["#0", "0#0"]
        raising.error = None
        follower.heard.clear()
        model(graded())

    assert follower.heard[:2] == [("begin", (), "#0"), ("begin", ("#0",), "0#0")]


def test_what_an_interrupt_left_is_gone_when_another_model_is_called() -> None:
    """Two models that one tracker follows are not inside each other for that."""
    model, other = Calls(Raises(KeyboardInterrupt)), nn.ReLU()
    with following(model) as follower:
        follower.tracker.follow(other, "other", outermost=True)
        with pytest.raises(KeyboardInterrupt):
            model(graded())
        other(graded())

    assert follower.heard[-2:] == [("begin", (), "other#0"), ("end", (), "other#0")]


def test_an_outermost_module_inside_another_is_inside_it() -> None:
    """It is looked for what an interrupt has left, and nothing is taken away that still runs."""
    inner, follower = nn.ReLU(), Follower()
    model = Calls(Calls(inner))
    follower.tracker.follow(model, "model", outermost=True)
    follower.tracker.follow(inner, "inner", outermost=True)
    model(graded())
    follower.tracker.close()

    assert ("begin", ("model#0",), "inner#0") in follower.heard
    assert follower.under_way() == []


def test_a_forward_that_is_a_generator_ends_when_it_returns() -> None:
    """What it calls later, or never as it is left half-way, is called from outside of it."""
    part = nn.ReLU()

    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.part(x)
            yield self.part(x)

    model = Yields()
    with following(model) as follower:
        steps = model(graded())
        next(steps)
        steps.close()
        model(graded())

    assert [entry[:2] for entry in follower.heard] == [("begin", ()), ("end", ())] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_followed_and_stops_early(reentrant: bool) -> None:
    """Where the backward needs no more of it the recompute ends in the midst of a call; none is left."""
    model = Calls(
        Calls(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
        by=lambda p, x: checkpoint(p, x, use_reentrant=reentrant),
    )
    with following(model) as follower:
        out = model(graded())
        follower.heard.clear()
        out.sum().backward()
        assert follower.under_way() == []

    assert follower.heard[0] == ("begin", (), "0#0")
    assert len([entry for entry in follower.heard if entry[0] == "begin"]) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_can_be_left_out(reentrant: bool) -> None:
    """Neither its beginning nor its end is reported; a call of the program's that is under way around it stays."""
    inner = Calls(nn.Linear(2, 2), nn.Tanh())
    repeated = lambda p, x: checkpoint(p, x, use_reentrant=reentrant)

    def differentiating(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = repeated(part, x)
        out.sum().backward(retain_graph=True)
        assert follower.under_way() == ["#0"]
        return out

    model = Calls(inner, by=differentiating)
    with following(model, skip=is_repeated) as follower:
        model(graded())

    assert [note for what, _, note in follower.heard if what == "begin"] == [
        "#0",
        "0#0",
        "0.0#0",
        "0.1#0",
    ]
    assert len(follower.heard) == 8


def test_a_replica_can_be_left_out() -> None:
    """`DataParallel` makes it for one call, with the hooks of what it stands for."""
    model = nn.ReLU()
    replica: Any = nn.ReLU()
    with following(model, skip=is_repeated) as follower:
        replica.__dict__ |= {name: table for name, table in vars(model).items() if "hooks" in name}
        replica._is_replica = True
        replica(graded())
        model(graded())

    assert follower.heard == [("begin", (), "#0"), ("end", (), "#0")]


def test_each_thread_has_calls_of_its_own() -> None:
    """What runs in another thread is not inside what runs here."""

    def elsewhere(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=part, args=(x,))
        thread.start()
        thread.join()
        return x

    model = Calls(nn.ReLU(), by=elsewhere)
    with following(model) as follower:
        model(graded())

    assert follower.heard[1:3] == [("begin", (), "0#0"), ("end", (), "0#0")]


def test_a_call_under_way_can_be_joined() -> None:
    """A module is followed from the midst of its call, with what it was given."""
    follower, seen, part = Follower(), [], nn.ReLU()
    model = Calls(part)

    def join(module: nn.Module, args: Any) -> None:
        seen.append(given_to(model)[0][0] is x)
        follower.tracker.follow(model, "late")
        follower.tracker.follow(part, "part")
        follower.tracker.join(model, "late")

    x, handle = graded(), model.register_forward_pre_hook(join)
    model(x)
    handle.remove()
    follower.tracker.close()

    assert seen == [True]
    assert follower.heard == [
        ("begin", (), "late#0"),
        ("begin", ("late#0",), "part#0"),
        ("end", ("late#0",), "part#0"),
        ("end", (), "late#0"),
    ]


def test_every_module_can_be_followed_at_once() -> None:
    """By hooks that stand on none, and are taken down again."""
    follower, before = Follower(), hook_tables()
    follower.tracker.follow_all("any")
    Calls(nn.ReLU())(graded())
    follower.tracker.close()

    assert [(what, len(around)) for what, around, _ in follower.heard] == [
        ("begin", 0),
        ("begin", 1),
        ("end", 1),
        ("end", 0),
    ]
    assert hook_tables() == before


def test_a_followed_module_hides_it() -> None:
    """Copies and pickles made meanwhile are those of the plain module, and what follows it is gone afterwards."""
    model = nn.Linear(2, 2)
    plain, tables = pickle.dumps(model), hook_tables(model)
    with following(model):
        assert pickle.dumps(model) == plain
        assert hook_tables(copy.deepcopy(model)) == tables

    assert hook_tables(model) == tables


def test_compiled_code_is_not_followed(compiled: Callable[..., Any]) -> None:
    """The parts that a compiler captures run without hooks, and are captured without a break; the model's own call is seen."""
    model = Calls(nn.ReLU())
    with following(model) as follower:
        out = compiled(model, backend="eager", fullgraph=True)(graded())

    assert torch.equal(out, torch.ones(2))
    assert follower.heard == [("begin", (), "#0"), ("end", (), "#0")]


def test_what_fails_is_reported_once_and_the_calls_go_on() -> None:
    """With a shield around it a follower does not end the program."""
    told: list[str] = []

    def begin(*_: Any) -> None:
        raise ValueError("no")

    tracker: CallTracker[None, None] = CallTracker(
        begin, shield=Shield("following", "it ends", tell=told.append)
    )
    model = nn.ReLU()
    tracker.follow(model, None)
    model(graded())
    model(graded())
    tracker.close()

    assert [text.split(" (")[0] for text in told] == ["following failed: ValueError: no"]


def test_without_a_shield_what_fails_is_the_programs_error() -> None:
    """Nothing is hidden."""

    def begin(*_: Any) -> None:
        raise ValueError("no")

    tracker: CallTracker[None, None] = CallTracker(begin)
    model = nn.ReLU()
    tracker.follow(model, None)
    with pytest.raises(ValueError, match="no"):
        model(graded())
    tracker.close()


def test_arguments_are_heard() -> None:
    """By position and by name, as each call begins."""
    heard: list[Any] = []
    model, x = Calls(), graded()
    with ExitStack() as stack:
        hear(stack, model, heard.append)
        model(x)
        model(x=x)
    model(x)

    assert [(len(args), list(kwargs)) for args, kwargs in heard] == [(1, []), (0, ["x"])]


def test_spans_know_the_innermost_call_and_the_one_around_it() -> None:
    """Also after an interrupt, and outside of all there is none."""
    raising = Raises(KeyboardInterrupt)
    model, seen = Calls(raising), []
    spans = ModuleCalls(lambda tensor: (id(tensor),))
    spans.add(model, ["", "parts.0"], str)
    with pytest.raises(KeyboardInterrupt):
        model(graded())
    raising.error = None
    handle = raising.register_forward_pre_hook(
        lambda *_: seen.append((spans.innermost, spans.around))
    )
    x = graded()
    model(x)
    handle.remove()
    spans.close()

    assert seen == [(("parts.0", 0), ("", 0))]
    assert spans.innermost == (None, 0)
    assert id(x) in spans.entered


def test_a_call_that_begins_after_the_hooks_are_removed_keeps_nothing_alive() -> None:
    """PyTorch runs the hooks that it has collected for a call, also those that one of them has removed."""
    module = nn.Identity()
    follower = Follower()
    module.register_forward_pre_hook(lambda *_: follower.tracker.close())
    follower.tracker.follow(module, "it", outermost=True)

    module(torch.ones(1))

    assert follower.tracker.open.called == []
    assert follower.heard == []


def test_who_has_followed_calls_is_freed_without_the_garbage_collector() -> None:
    """What was noted of the calls may be the activations of a model."""
    follower = Follower()
    follower.tracker.follow(nn.Identity(), "it")
    alive = weakref.ref(follower)
    gc.disable()
    try:
        follower.tracker.close()
        del follower
        assert alive() is None
    finally:
        gc.enable()
