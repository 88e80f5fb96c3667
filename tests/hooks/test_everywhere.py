"""Hooks on every model that is called in a session: found at its first call, named after its class, removed with the block."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import (
    ActionArity,
    ConditionMet,
    NeverFired,
    NeverFiredWarning,
    NoSuchKind,
    Recompiled,
    SelectorError,
)
from kedge.hooks.everywhere import SitePattern

ALL = "**, **:in, **:out.grad, **:in.grad, **:in.share, **:param, **:param.grad, **:param.acc, **:saved"


class Small(nn.Module):
    """A layer, and operations of its own."""

    def __init__(self, out: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(4, out)

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return torch.relu(self.fc(x)) * scale


class Pair(nn.Module):
    """Two of them, one in a checkpoint if asked."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.checkpointed = Small(), Small(), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.one, x, use_reentrant=False) if self.checkpointed else self.one(x)
        return self.two(x)


def paths(hooked: Any) -> list[str]:
    """Return the sites of a handle's ledger that fired."""
    return [str(entry.site) for entry in hooked.ledger() if entry.fired]


def test_every_model_called_in_the_block_is_hooked_under_its_class_name(
    tables: Callable[..., Any],
) -> None:
    """Models present and future, and criteria; of two of one class, the second has a number.

    Nothing stays on any of them.
    """
    first, second, x = Small(), Small(), torch.randn(2, 4)
    before = tables(first, second)
    with kedge.hook(kedge.everywhere, "**:out", kedge.record()) as acts:
        made = Pair()
        loss = nn.MSELoss()(made(second(first(x))), x)
        assert torch.equal(acts["Small_2:out"], second(first(x)))
        assert list(paths(acts)) == [
            "Small:out", "Small.fc:out", "Small_2:out", "Small_2.fc:out",
            "Pair:out", "Pair.one:out", "Pair.one.fc:out", "Pair.two:out", "Pair.two.fc:out", "MSELoss:out",
        ]  # fmt: skip
    assert torch.equal(acts["MSELoss"], loss)
    assert tables(first, second) == before


def test_a_selector_without_a_model_is_for_every_model() -> None:
    """The short form of `everywhere`, as text and as a `Selector`, of a hook and of a session."""
    model, x = Small(), torch.randn(2, 4)
    with kedge.session() as s:
        text = s.hook("**{Linear}:out", kedge.record())
        value = s.hook(kedge.select("fc"), kedge.record())
        model(x)
    with kedge.hook("fc", kedge.record()) as alone:
        model(x)
    assert torch.equal(text["Small.fc"], alone["Small.fc"])
    assert torch.equal(text["Small.fc"], value["Small.fc"])
    with pytest.raises(SelectorError, match="selects everything"):
        kedge.hook(kedge.everywhere, kedge.record())


def test_each_kind_of_site_fires_as_often_as_on_a_model_that_is_given() -> None:
    """From the first call on, for the model itself too: inputs by name, gradients, parameters, saves and operations."""
    x, scale = torch.randn(2, 4, requires_grad=True), torch.tensor(2.0)
    counts: list[dict[str, int]] = []
    for where in ((Small(),), (kedge.everywhere,)):
        model: Any = where[0] if isinstance(where[0], nn.Module) else Small()
        with kedge.session() as s:
            s.hook(*where, f"{ALL}, /relu, /mul:in, /mul:out.grad, fc#1", lambda value: None)
            model(x, scale=scale).sum().backward()
            entries = [(str(e.site), e.fired) for e in s.ledger()]
            s.end(quiet=True)
        counts.append(
            {site.removeprefix("Small").removeprefix("."): fired for site, fired in entries}
        )
    given, found = counts
    assert found == given
    assert found[":in"] == 2
    assert found["/relu:out"] == 1


def test_observing_everything_changes_no_bit() -> None:
    """Outputs, gradients and the state of the random generator are identical, dropout and a checkpoint included."""
    torch.manual_seed(1)
    model = nn.Sequential(Pair(checkpointed=True), nn.Dropout(0.5), nn.LSTM(4, 3))
    x = torch.randn(5, 2, 4)

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        y = x.clone().requires_grad_()
        out, (h, c) = model(y)
        (out.square().sum() + h.sum() + c.sum()).backward()
        return [out.detach(), y.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]

    bare = [t.clone() for t in step()]
    with kedge.hook(f"{ALL}, **/relu", kedge.record()) as seen:
        observed = step()
        seen.end(quiet=True)
    assert all(map(torch.equal, bare, observed))


def test_edits_apply_in_the_first_call_also_to_arguments_by_name() -> None:
    """The inputs of a model are edited before its first forward, by position and by name, and its output after it."""
    x, scale = torch.randn(2, 4), torch.tensor(2.0)
    for selector, action, wanted in (
        (":in[x]", kedge.zero(), lambda m: m(torch.zeros(2, 4), scale=scale)),
        (":in[scale]", kedge.scale(3), lambda m: m(x, scale=scale * 3)),
        (":out", kedge.add(1), lambda m: m(x, scale=scale) + 1),
        ("/relu", kedge.zero(), lambda m: torch.zeros(2, 4)),
    ):
        model = Small()
        given = {"scale": scale}
        with kedge.hook(kedge.everywhere, selector, action):
            out = model(x, **given)
        assert torch.equal(out, wanted(model))
        assert given["scale"] is scale


def test_a_forward_pre_hook_of_the_model_itself_comes_after_the_actions_in_the_first_call_alone() -> (
    None
):
    """PyTorch has collected it before the model is found; the parts of the model have no such first call."""
    model, seen = Small(), []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 1,))
    model.fc.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 2,))
    with kedge.hook(
        ":in[x], fc:in", lambda value, event: seen.append((str(event.site), value[0, 0].item()))
    ):
        model(torch.full((2, 4), 5.0))
        model(torch.full((2, 4), 5.0))
    assert seen == [
        ("Small:in[x]", 5), ("Small.fc:in[input]", 2), ("Small:in[x]", 1), ("Small.fc:in[input]", 2)
    ]  # fmt: skip


def test_actions_run_in_the_order_in_which_they_were_attached() -> None:
    """Also between hooks of everywhere, those on the model itself, and a hook added when the model was known."""
    model, x = Small(), torch.randn(2, 4)
    with kedge.session() as s:
        s.hook(kedge.everywhere, ":out", kedge.add(1))
        model(x)
        s.hook(model, ":out", kedge.scale(2))
        s.hook(kedge.everywhere, ":out", kedge.add(3))
        out = model(x)
    assert torch.equal(out, (model(x) + 1) * 2 + 3)


def test_a_pattern_that_matched_nothing_is_reported_with_its_cause() -> None:
    """By term: the models called and the nearest paths; or that none was called.

    A strict session raises.
    """
    model, x = Small(), torch.randn(2, 4)
    with pytest.warns(NeverFiredWarning) as said, kedge.hook("fd, **{Linear}", kedge.record()):
        model(x)
    message = str(said[0].message)
    assert "fd: no model that was called has it: Small" in message
    assert 'the nearest paths are "fc"' in message
    assert "1 of 2 hooked sites never fired" in message

    excluding = kedge.hook("fc, !**{Linear}", print)
    with pytest.warns(NeverFiredWarning, match="its exclusions remove everything"), excluding:
        model(x)
    with (
        pytest.warns(NeverFiredWarning, match="no model was called; call one inside the block"),
        kedge.hook("**", print),
    ):
        pass
    with pytest.raises(NeverFired, match="Conv2d"), kedge.session(strict=True) as s:
        s.hook(kedge.everywhere, "**{Conv2d}:out.grad", kedge.record())
        model(x)
    with kedge.session() as s:
        s.hook("nothing", kedge.record())
        entry = s.ledger()["nothing"]
        s.end(quiet=True)
    assert isinstance(entry.site, SitePattern)


def test_a_site_that_never_fired_has_the_cause_of_its_model() -> None:
    """As for a model that is given: a layer that the forward leaves out is named."""

    class Skips(Small):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.fc.forward(x)

    with (
        pytest.warns(
            NeverFiredWarning, match=r"Skips.fc:out: Skips.forward calls its .forward\(\) directly"
        ),
        kedge.hook("**", print),
    ):
        Skips()(torch.randn(2, 4))


def test_what_no_model_can_have_is_refused_at_once(tables: Callable[..., Any]) -> None:
    """A kind of tensors, an action of three arguments: all or nothing, and no global hook stays."""
    with kedge.session() as s:
        before = tables()
        with pytest.raises(NoSuchKind, match="belongs to tensors"):
            s.hook(kedge.everywhere, "**:grad", kedge.record())
        with pytest.raises(ActionArity):
            s.hook("**", lambda a, b, c: None)
        assert tables() == before
        assert not s.ledger().entries


def test_an_action_that_fails_when_a_model_is_found_leaves_nothing(
    tables: Callable[..., Any],
) -> None:
    """The error reaches the program at that call; the hooks of that model are gone, as the global one is after the block."""
    model = Small()
    before = tables(model)

    class Unfit:
        def bind(self, site: Any) -> Any:
            raise NoSuchKind(f"unfit for {site}")

    with kedge.session() as s:
        s.hook("fc", Unfit())
        with pytest.raises(NoSuchKind, match="unfit for Small.fc:out"):
            model(torch.randn(2, 4))
        s.end(quiet=True)
    assert tables(model) == before
    with (
        pytest.raises(ConditionMet, match=r"Small.fc:out"),
        kedge.hook("**", kedge.error_if(lambda v: True)),
    ):
        model(torch.randn(2, 4))
    assert tables(model) == before


def test_a_part_called_before_its_model_is_a_model_of_its_own() -> None:
    """Each module is hooked once: the part keeps the name of its class, and the model has the rest."""
    model, x = Pair(), torch.randn(2, 4)
    with kedge.hook("**", kedge.record()) as acts:
        model.two(x)
        model(x)
    assert paths(acts) == [
        "Small:out",
        "Small.fc:out",
        "Pair:out",
        "Pair.one:out",
        "Pair.one.fc:out",
    ]


def test_a_session_that_begins_during_a_call_names_the_parts_after_their_model() -> None:
    """The model that is running holds them; it is hooked for its next call itself."""
    seen: list[list[str]] = []

    class Opens(Pair):
        def forward(self, x: Tensor) -> Tensor:
            with kedge.session() as s:
                s.hook("**{Linear}, **:in", kedge.record())
                out = super().forward(x)
                seen.append([str(e.site) for e in s.ledger() if e.fired])
                s.end(quiet=True)
            return out

    Opens()(torch.randn(2, 4))
    assert seen == [
        [
            "Opens.one.fc:out",
            "Opens.two.fc:out",
            "Opens.one:in",
            "Opens.one.fc:in",
            "Opens.two:in",
            "Opens.two.fc:in",
        ]
    ]


def test_a_part_that_comes_later_has_the_name_of_its_model() -> None:
    """Such as a new head, or an adapter: it is hooked at its first call, from its inputs on."""
    model, x = Pair(), torch.randn(2, 4)
    with kedge.session() as s:
        acts = s.hook("**{Linear}, **{Linear}:in", kedge.record(keep=None))
        model(x)
        model.two.fc = nn.Linear(4, 3)
        model(x)
        s.hook("one", kedge.scale(2))
        model.two.fc = nn.Linear(4, 2)
        out = model(x)
    assert out.shape == (2, 2)
    assert [tuple(t.shape) for _, t in acts.records("Pair.two.fc:out")] == [(2, 4), (2, 3), (2, 2)]
    assert len(acts.records("Pair.two.fc:in")) == 3
    assert len(acts.records("Pair.one.fc:out")) == 3


def test_a_direct_forward_shows_the_parts_alone() -> None:
    """`model.forward(x)` calls no hook of the model: each part is found as a model of its own."""
    with kedge.hook("**", kedge.record()) as acts:
        Pair().forward(torch.randn(2, 4))
    assert paths(acts) == ["Small:out", "Small.fc:out", "Small_2:out", "Small_2.fc:out"]


def test_models_that_come_and_go_are_freed_and_continue_one_name() -> None:
    """A loss module for each step: one name, one line in the ledger with all its calls, and no hooks of those gone."""
    gone = []
    with kedge.session() as s:
        acts = s.hook(f"{ALL}, **/relu", kedge.record())
        sizes = []
        for _ in range(5):
            model = Small()
            model(torch.randn(2, 4)).sum().backward()
            gone.append(weakref.ref(model))
            del model
            gc.collect()
            sizes.append((len(s.taps), len(s.targets), len(acts.taps)))
        assert [ref() for ref in gone] == [None] * 5
        assert sizes[1:] == sizes[1:2] * 4
        assert s.ledger()["Small:out"].fired == 5
        assert s.ledger()["Small.fc.weight:param.grad"].fired == 5
        s.end(quiet=True)


def test_steps_go_on_after_the_model_that_made_them_is_gone() -> None:
    """The optimizer of a later model makes the steps then."""
    with kedge.session() as s:
        s.hook("**", kedge.record())
        for n in range(1, 3):
            model = Small()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            assert s.clock.step == 3 * n
            del model, optimizer


def test_a_step_counts_once_for_a_model_that_is_hooked_twice() -> None:
    """By itself, and as one of all."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kedge.session() as s:
        s.hook("**", kedge.record())
        s.hook(model, "fc", kedge.record())
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        assert s.clock.step == 3


def test_threads_that_call_a_model_at_once_are_all_seen() -> None:
    """The hooks are attached once, and the other threads wait for them."""
    model, x = Pair(), torch.randn(2, 4)
    start = threading.Barrier(4)

    def call() -> None:
        start.wait()
        model(x)

    with kedge.session() as s:
        s.hook("**{Linear}", kedge.record(keep=None))
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [entry.fired for entry in s.ledger()] == [4, 4]


def test_a_model_that_calls_itself_stays_in_one_pass() -> None:
    """Also in its first call, whose hooks PyTorch does not run itself."""

    class Again(Small):
        def forward(self, x: Tensor, times: int = 2) -> Tensor:  # type: ignore[override]
            return self(self.fc(x), times - 1) if times else x

    model, x = Again(), torch.randn(2, 4)
    events = []
    for where in ((model,), (kedge.everywhere,)):
        with kedge.session() as s:
            s.hook(*where, "**", lambda value: None)
            model(x)
            model(x)
            events.append([(e.site.kind, e.call, e.pass_) for e, _ in s.timeline()])
    assert events[0] == events[1]


def test_a_pause_takes_the_global_hook_out_too() -> None:
    """What is called in the pause is found when it is called after it."""
    first, second, x = Small(), Pair(), torch.randn(2, 4)
    with kedge.session() as s:
        s.hook("**{Linear}", kedge.record())
        first(x)
        s.pause()
        assert not modules._global_forward_pre_hooks
        second(x)
        first(x)
        s.resume()
        second(x)
        assert [(str(e.site), e.fired) for e in s.ledger()] == [
            ("Small.fc:out", 1), ("Pair.one.fc:out", 1), ("Pair.two.fc:out", 1)
        ]  # fmt: skip


def test_a_removed_hook_finds_no_more_models() -> None:
    """`remove()` on the handle: the rest of the session goes on."""
    x = torch.randn(2, 4)
    with kedge.session() as s:
        gone, stays = s.hook("**", kedge.record()), s.hook("**{Linear}", kedge.record())
        Small()(x)
        gone.remove()
        model = Pair()
        model(x)
        assert paths(gone) == ["Small:out", "Small.fc:out"]
        assert paths(stays)[-2:] == ["Pair.one.fc:out", "Pair.two.fc:out"]


def test_compiled_models_are_hooked_in_their_graph(compiled: Callable[..., Any]) -> None:
    """A model compiled in the block compiles once; one compiled before it compiles again, with a warning of Kedge alone."""
    model, x = Small(), torch.randn(2, 4)
    fast = compiled(model, backend="eager")
    with kedge.hook("**{Linear}", kedge.record()) as acts:
        fast(x)
        fast(x)
    assert torch.equal(acts["Small.fc"], model.fc(x))
    fast(x)
    with pytest.warns(Recompiled), kedge.session() as s:
        s.hook("**{Linear}", kedge.record())
        fast(x)
        assert [(str(e.site), e.fired) for e in s.ledger()] == [("Small.fc:out", 1)]


def test_scripted_models_are_named_as_the_cause() -> None:
    """They run without Python, and take no hooks."""
    scripted = torch.jit.freeze(torch.jit.trace(Small().eval(), torch.randn(2, 4)))
    with (
        pytest.warns(NeverFiredWarning, match="only scripted modules were called"),
        kedge.hook("**", print),
    ):
        scripted(torch.randn(2, 4))


def test_parameters_without_a_shape_are_hooked_from_the_second_call_on() -> None:
    """A lazy model gives them one in its first forward; without a second one this is reported."""
    x = torch.randn(2, 4)
    with kedge.hook("**:param.grad", kedge.record()) as grads:
        model = nn.LazyLinear(3)
        model(x)
        model(x).sum().backward()
    assert torch.equal(grads["LazyLinear.weight:param.grad"], model.weight.grad)
    with (
        pytest.warns(NeverFiredWarning, match="no shape before its first forward"),
        kedge.hook("**:param.grad", print),
    ):
        nn.LazyLinear(3)(x)


def test_a_record_is_read_by_any_of_a_module_s_names() -> None:
    """The name of the class stands before each of them."""
    model = Pair()
    model.same = model.one
    with kedge.hook("**, **:param", kedge.record()) as acts:
        model(torch.randn(2, 4))
    assert torch.equal(acts["Pair.same.fc"], acts["Pair.one.fc"])
    assert torch.equal(acts["Pair.same.fc.weight:param"], model.one.fc.weight)


def test_a_copy_made_in_the_block_is_a_model_of_its_own() -> None:
    """It has none of the hooks of the original until it is called."""
    model, x = Small(), torch.randn(2, 4)
    with kedge.hook("**{Linear}", kedge.record()) as acts:
        model(x)
        twin = copy.deepcopy(model)
        assert not twin.fc._forward_hooks
        twin(x)
    assert paths(acts) == ["Small.fc:out", "Small_2.fc:out"]


def test_a_shared_part_is_hooked_once_under_its_first_model() -> None:
    """Two models with one encoder: each call of it is one event, whichever of them makes it."""
    shared, x = Small(), torch.randn(2, 4)
    first, second = nn.Sequential(shared), nn.ModuleDict({"e": shared, "h": nn.Linear(4, 2)})
    second.forward = lambda y: second["h"](second["e"](y))  # type: ignore[method-assign]
    with kedge.hook("**{Linear}", kedge.record(keep=None)) as acts:
        first(x)
        second(x)
    assert [(str(e.site), e.fired) for e in acts.ledger()] == [
        ("Sequential.0.fc:out", 2),
        ("ModuleDict.h:out", 1),
    ]


def test_everywhere_says_what_it_is() -> None:
    """In a session at a prompt, and in messages."""
    assert repr(kedge.everywhere) == "kedge.everywhere"
    model = Small()
    with kedge.hook("fc", kedge.record()):
        model(torch.randn(2, 4))
        assert "finds the models of kedge.everywhere" in str(kedge.audit(model))


@pytest.mark.parametrize(
    "selector",
    [
        "enc",
        "enc:in",
        "enc:out.grad",
        "enc:saved",
        "enc/linear",
        "enc.weight:param",
        "enc.weight:param.grad",
    ],
)
def test_a_path_in_a_model_names_a_part_that_was_called_before_it(selector: str) -> None:
    """Whatever the kind: the part alone has no such path, and the model has it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x))

    model, x = Net(), torch.randn(2, 4)
    with kedge.session(strict=True) as s:
        acts = s.hook(selector, kedge.record(keep=None))
        model.enc(x)
        for _ in range(2):
            model(x).sum().backward()
        assert [len(acts.records(name)) for name in acts.names()] == [2] * len(acts.names())
        assert all(name.startswith("Net.enc") for name in acts.names())
        assert acts.names()


def test_a_part_that_was_called_before_keeps_its_name_in_later_hooks() -> None:
    """A hook that comes when both are known names it after its own class, also if the model is called first."""
    model, x = Pair(), torch.randn(2, 4)
    with kedge.session() as s:
        first = s.hook("**", kedge.record())
        model.two(x)
        model(x)
        later = s.hook("**, two", kedge.record())
        model(x)
        assert sorted(paths(later)) == sorted(paths(first))
        s.end(quiet=True)


def test_a_part_with_the_id_of_one_that_is_gone_is_hooked() -> None:
    """A part that was called before its model is replaced by a new one, at the same place in memory."""
    x, same, seen = torch.randn(2, 4), False, []
    with kedge.hook("**", lambda value, event: seen.append(event.site.path)):
        for _ in range(2000):  # until Python uses the memory again
            model = nn.Sequential(nn.ReLU())
            model[0](x)
            model(x)
            before = id(model[0])
            del model[0]
            seen.clear()
            model.append(nn.ReLU())
            same = id(model[0]) == before
            model(x)
            assert seen[0].endswith(".0")
            if same:
                break
    assert same


@pytest.mark.parametrize("selector", ["**", "fc[0]", "fc/linear", "**:in, **", "**:out.grad"])
def test_an_action_that_cannot_serve_the_kind_is_refused_when_it_is_hooked(
    selector: str, tables: Callable[..., Any]
) -> None:
    """As for a model that is given, and not in the program's forward."""
    before = tables()
    actions = kedge.packed(lambda t: t, lambda t: t), kedge.from_hook(lambda module, args: None)
    for action in actions:
        with pytest.raises(NoSuchKind), kedge.session(on_error="warn") as s:
            s.hook(selector, action)
        assert tables() == before
