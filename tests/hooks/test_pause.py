"""A paused session is not there, and one that is resumed is as if it had never been away."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import kedge
from kedge.errors import NeverFired, NoSiteMatched, SessionEnded, StopForward
from kedge.testing import assert_same_bits, assert_unhooked, hook_tables
from kedge.torch_internals import dynamo

EVERYTHING = "**:out, **:in, **:out.grad, **:in.grad, **:in.share, **:param.grad, **:param.acc, **:param, **:saved"


def net() -> nn.Sequential:
    """Make two layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def x() -> Tensor:
    """Make an input with a gradient."""
    return torch.randn(5, 3, requires_grad=True)


def ordered(model: nn.Module) -> dict[str, list[Any]]:
    """Every hook on a model with its number, in order."""
    tables = {
        place: list(hooks.items())
        for place, hooks in hook_tables(model).items()
        if isinstance(hooks, dict)
    }
    return {
        place: hooks
        for place, hooks in tables.items()
        if "with_kwargs" not in place and "always" not in place
    }


def test_nothing_is_on_the_model_while_a_session_is_paused() -> None:
    """No table of a module, a parameter or all optimizers holds anything, and pickling is that of PyTorch."""
    model, bare = net(), hook_tables(net())
    before = dict(optimizers._global_optimizer_post_hooks)
    with kedge.session() as s:
        s.hook(model, EVERYTHING, lambda value: None)
        model(x()).sum().backward()
        hooked = hook_tables(model)
        assert optimizers._global_optimizer_post_hooks != before
        s.pause()
        assert_unhooked(model)
        assert hook_tables(model) == bare
        assert optimizers._global_optimizer_post_hooks == before
        s.resume()
        assert hook_tables(model) == hooked
        assert optimizers._global_optimizer_post_hooks != before
    assert_unhooked(model)


def test_a_paused_session_sees_nothing_and_goes_on_afterwards() -> None:
    """Passes in a pause are neither recorded nor counted; records from before stay readable."""
    model, first, second = net(), x(), x()
    with kedge.session() as s:
        acts = s.hook(model, "0", kedge.record(keep=None))
        one = model[0](first) * 1
        s.pause()
        model(x())
        assert_same_bits(acts["0"], one)
        s.resume()
        two = model[0](second) * 1
        assert_same_bits([record.value for record in acts.records("0")], [one, two])
        assert [record.event.pass_ for record in acts.records("0")] == [0, 1]
        assert s.ledger()["0"].fired == 2


def test_pausing_and_resuming_twice_is_pausing_and_resuming_once() -> None:
    """A second pause or resume changes nothing."""
    model = net()
    with kedge.session() as s:
        s.hook(model, EVERYTHING, lambda value: None)
        model(x()).sum().backward()
        hooked = ordered(model)
        for _ in range(2):
            s.pause()
            s.pause()
            assert_unhooked(model)
            s.resume()
            s.resume()
            assert ordered(model) == hooked


def test_resumed_hooks_stand_between_those_they_stood_between() -> None:
    """The user's hooks from before stay in front, those from after and from the pause stay behind, in forward and backward."""
    model, log = nn.Linear(2, 2), []

    def note(name: str) -> Callable[..., None]:
        return lambda *args: log.append(name)

    def run() -> list[str]:
        log.clear()
        model(torch.ones(1, 2)).sum().backward()
        return list(log)

    weight = model.weight
    handles = [model.register_forward_hook(note("out 1")), weight.register_hook(note("grad 1"))]
    with kedge.session() as s:
        s.hook(model, ":out", lambda value: note("ours")())
        s.hook(model, "weight:param.grad", lambda value: note("our grad")())
        handles += [
            model.register_forward_hook(note("out 2")),
            weight.register_hook(note("grad 2")),
        ]
        s.hook(model, ":out", lambda value: note("ours again")())
        expected = ["out 1", "ours", "out 2", "ours again", "grad 1", "our grad", "grad 2"]
        assert run() == expected
        s.pause()
        assert run() == ["out 1", "out 2", "grad 1", "grad 2"]
        s.resume()
        assert run() == expected
        s.pause()
        handles += [
            model.register_forward_hook(note("out 3")),
            weight.register_hook(note("grad 3")),
        ]
        s.resume()
        assert run() == [
            "out 1",
            "ours",
            "out 2",
            "ours again",
            "out 3",
            "grad 1",
            "our grad",
            "grad 2",
            "grad 3",
        ]
        s.pause()
        handles[0].remove()
        s.resume()
        assert run() == [
            "ours",
            "out 2",
            "ours again",
            "out 3",
            "grad 1",
            "our grad",
            "grad 2",
            "grad 3",
        ]
    assert run() == ["out 2", "out 3", "grad 1", "grad 2", "grad 3"]


def test_gradients_under_way_fire_when_the_session_has_been_resumed() -> None:
    """A graph made before a pause is silent in it and heard after it, with values as without a pause."""
    torch.manual_seed(0)
    model, data = net(), x()
    plain = copy.deepcopy(model)
    with kedge.session() as s:
        grads = s.hook(model, "*:out.grad, *:in.share, **:param.grad", kedge.record())
        loss = model(data).square().sum()
        s.pause()
        loss.backward(retain_graph=True)
        assert {entry.fired for entry in s.ledger()} == {0}
        model.zero_grad()
        s.resume()
        loss.backward()
        names = [str(entry.site) for entry in s.ledger() if entry.fired]
        seen = {name: grads[name] for name in names}
    with kedge.session() as s:
        other = s.hook(plain, "*:out.grad, *:in.share, **:param.grad", kedge.record())
        plain(data).square().sum().backward()
        assert_same_bits(seen, {name: other[name] for name in names})
    assert {"0:out.grad", "2:in.share", "0.weight:param.grad"} <= set(names)
    assert_same_bits([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_hooks_on_tensors_and_nodes_pause_too() -> None:
    """A tensor's and a node's hook are silent in a pause and heard after it."""
    leaf = torch.ones(2, requires_grad=True)
    out = (leaf * 3).exp()
    with kedge.session() as s:
        grads = s.hook({"leaf": leaf, "out": out}, kedge.record())
        at_node = s.hook(out.grad_fn, kedge.record())
        s.pause()
        assert not leaf._backward_hooks
        assert not out._backward_hooks
        out.sum().backward(retain_graph=True)
        s.resume()
        assert s.ledger().silent()
        out.sum().backward()
        assert_same_bits((grads["out"], at_node["ExpBackward0"]), (torch.ones(2), torch.ones(2)))
        assert_same_bits(grads["leaf"], out.detach() * 3)


@pytest.mark.parametrize("resumed", [False, True], ids=["paused", "resumed"])
def test_a_session_that_was_paused_ends_as_any_other(resumed: bool) -> None:
    """Nothing stays, strictness is kept, and what was removed in a pause does not come back."""
    model = net()
    with pytest.raises(NeverFired, match="2:out"):
        with kedge.session(strict=True) as s:
            first = s.hook(model, "0", lambda value: None)
            s.hook(model, "2", lambda value: None)
            model[0](x())
            s.pause()
            first.remove()
            if resumed:
                s.resume()
    assert_unhooked(model)
    with pytest.raises(SessionEnded):
        s.resume()
    s.pause()
    assert_unhooked(model)


def test_a_hook_attached_in_a_pause_waits_for_its_end() -> None:
    """What is attached to a paused session comes behind what it has; what cannot be attached leaves nothing."""
    model, log = net(), []
    with kedge.session() as s:
        s.hook(model, "0", lambda value: log.append("first"))
        s.pause()
        s.hook(model, "0", lambda value: log.append("second"))
        with pytest.raises(NoSiteMatched):
            s.hook(model, "7", lambda value: None)
        assert_unhooked(model)
        model(x())
        assert log == []
        s.resume()
        model(x())
    assert log == ["first", "second"]


def test_copies_made_in_a_pause_and_out_of_it_are_those_of_a_bare_model() -> None:
    """Pickles have the same bytes before, in and after a pause, also where two sessions stand on one model."""
    model = net()
    bytes_ = pickle.dumps(model)
    with kedge.session() as one, kedge.session() as two:
        one.hook(model, "**:out", lambda value: None)
        two.hook(model, "**:out", lambda value: None)
        model(x())
        for act in (one.pause, two.pause, one.resume, two.resume, two.pause, two.resume):
            act()
            assert pickle.dumps(model) == bytes_
            assert_unhooked(copy.deepcopy(model))
        one.pause()
        assert vars(model._forward_hooks)
        two.pause()
        assert not vars(model._forward_hooks)


def test_optimizer_steps_in_a_pause_are_not_counted() -> None:
    """The step on an event is that of the steps the session has seen."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.session() as s:
        acts = s.hook(model, "0", kedge.record(keep=None))
        for paused in (False, True, True, False, False):
            (s.pause if paused else s.resume)()
            model(x()).sum().backward()
            optimizer.step()
        assert [record.event.step for record in acts.records("0")] == [0, 1, 2]


def test_a_pause_within_a_forward_is_survived() -> None:
    """An action may pause its own session: the rest of that forward is not seen, the next one is counted as any other."""
    model, log = net(), []
    with kedge.session() as s:
        s.hook(model, "0", lambda value: s.pause(), when=kedge.at(0))
        s.hook(model, "2", lambda value, event: log.append(event.pass_))
        s.hook(model, "0:saved", lambda value: None)
        model(x())
        assert log == []
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        s.resume()
        s.hook(model, "2", lambda value, event: log.append(event.call))
        model(x())
    assert log == [1, 0]


def test_saved_tensors_are_seen_around_a_pause() -> None:
    """``:saved`` fires as often before as after a pause, and not in it."""
    model, counts = net(), []
    with kedge.session() as s:
        s.hook(model, "2:saved", lambda value: None)
        for paused in (False, True, False):
            (s.pause if paused else s.resume)()
            before = len(s.timeline())
            model(x()).sum().backward()
            counts.append(len(s.timeline()) - before)
    assert counts == [counts[0], 0, counts[0]]
    assert counts[0] > 0


def test_dynamo_gets_its_setting_back_in_a_pause(compiled: Callable[..., Any]) -> None:
    """While a session is paused Dynamo does not look for hooks, and code compiled in the pause sees them afterwards."""
    from torch._dynamo import config

    setting = config.skip_nnmodule_hook_guards
    model, log = net(), []
    fast = compiled(model, backend="eager")
    with kedge.session() as s:
        s.hook(fast, "0", lambda value: log.append(1), when=None)
        fast(x())
        seen = len(log)
        assert config.skip_nnmodule_hook_guards is False
        s.pause()
        assert config.skip_nnmodule_hook_guards is setting
        fast(x())
        assert len(log) == seen
        with pytest.warns(kedge.errors.Recompiled):
            s.resume()
        fast(x())
        assert len(log) > seen
    assert config.skip_nnmodule_hook_guards is setting
    assert dynamo._holders == 0


def test_stop_forward_passes_through_as_it_is() -> None:
    """The very error that an action raises arrives, also where failures only warn, and the site counts as fired."""
    model, stop, log = net(), StopForward("enough"), []

    def enough(value: Tensor) -> None:
        raise stop

    with kedge.session(on_error="warn", strict=True) as s:
        s.hook(model, "1", enough)
        s.hook(model, "0", lambda value: log.append(1))
        with pytest.raises(StopForward) as caught:
            model(x())
        assert caught.value is stop
        with pytest.raises(StopForward):
            model(x())
        assert [entry.fired for entry in s.ledger()] == [2, 2]
    assert log == [1, 1]
    assert_unhooked(model)


def test_two_sessions_that_pause_across_each_other_keep_their_order() -> None:
    """Whichever comes back first, the hooks of the older one stand before those of the younger one, as before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with kedge.session() as one, kedge.session() as two:
        one.hook(model, "**:out, **:in, **:param.grad", lambda value: None)
        two.hook(model, "**:out, **:in, **:param.grad", lambda value: None)
        before = ordered(model)
        for first_out, first_back in ((one, one), (one, two), (two, one), (two, two)):
            for paused in (first_out, two if first_out is one else one):
                paused.pause()
            for back in (first_back, two if first_back is one else one):
                back.resume()
            assert ordered(model) == before
        model(torch.randn(2, 3)).sum().backward()
