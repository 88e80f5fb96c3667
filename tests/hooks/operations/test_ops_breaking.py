"""Programs that broke hooks on operations, pauses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.hooks.placing.installed import InstalledHook
from kedge.testing import assert_same_bits, hook_tables


class Halves(nn.Module):
    """Returns two halves."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, 2, dim=1)


class FirstHalf(nn.Module):
    """Uses the first of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.halves = nn.Linear(4, 4), Halves()

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.halves(self.fc(x))
        return first


class Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.down(x)
        return self.up(self(y, depth - 1)) * 2 if depth else y + 1


class Sparse(nn.Module):
    """Works in place on a sparse tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.to_sparse()
        y.mul_(2)
        return y.to_dense() * 1


class InPlace(nn.Module):
    """Works in place on what its layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc(x)) * 2
        y.add_(1)
        return y


@pytest.mark.parametrize("selector", ["halves:out.grad", "halves/split:out.grad"])
def test_an_output_that_nothing_uses_has_no_gradient_and_stops_no_backward(selector: str) -> None:
    """PyTorch calls the hook of an unused output with None where others of its node are used; no action sees that."""
    model, x = FirstHalf(), torch.randn(3, 4)
    seen: list[Any] = []
    with kedge.session() as s:
        s.hook(model, selector, lambda value: seen.append(value))
        model(x).sum().backward()
    assert [tuple(value.shape) for value in seen] == [(3, 2)]


def test_a_tensor_that_nothing_uses_is_said_to_have_no_gradient() -> None:
    """The hook of a tensor of the user's stays silent, too, and the ledger tells."""
    used, unused = (torch.ones(2, 3, requires_grad=True) * 1).unbind(0)
    s = kedge.session()
    s.hook(unused, lambda value: value * 2)
    used.sum().backward()
    assert s.ledger().silent()
    s.end(quiet=True)


def test_a_model_that_calls_itself_makes_one_pass() -> None:
    """The calls of a recursion are told apart by number, within one pass, and the next pass counts anew."""
    model, x = Again(), torch.randn(2, 4)
    with kedge.session() as s:
        acts = s.hook(model, "**:out, /*:out", kedge.record(keep=None))
        model(x)
        model(x)
        events = [event for event, _ in s.timeline()]
        model.down(x)
        assert [event for event, _ in s.timeline()][-1].pass_ == 2
    for path, calls in (("down", 3), ("up", 2), ("", 3)):
        mine = [(e.pass_, e.call) for e in events if e.site.path == path and e.site.op is None]
        assert mine == [(pass_, call) for pass_ in (0, 1) for call in range(calls)]
    assert_same_bits(acts["up#1"] * 2, acts["#2:out"])


def test_a_recursion_that_raises_or_is_interrupted_ends_its_pass() -> None:
    """Whatever ends the calls of a recursion, the next call of the model is the first of a new pass."""
    model, x = Again(), torch.randn(2, 4)
    with kedge.session() as s:
        seen: list[tuple[int, int]] = []
        s.hook(model, "down", lambda value, event: seen.append((event.pass_, event.call)))
        for error in (ValueError, KeyboardInterrupt):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = model.up.register_forward_hook(fail)
            with pytest.raises(error):
                model(x)
            handle.remove()
        model(x)
    assert seen == [(pass_, call) for pass_ in range(3) for call in range(3)]


def test_observing_sparse_operations_that_work_in_place_stops_nothing() -> None:
    """What has no memory of the usual kind is kept as well, with the value that it had."""
    model, x = Sparse(), torch.randn(2, 3)
    with kedge.hook(model, "/*:out, /*:in", kedge.record()) as acts:
        assert_same_bits(model(x), x * 2)
        assert_same_bits(acts["/to_sparse"].to_dense(), x)
        assert_same_bits(acts["/mul_:out"].to_dense(), x * 2)


@pytest.mark.parametrize("selector", ["**/*:out, **/*:in", "**:out"])
def test_what_is_recorded_in_a_transform_is_there_when_it_is_over(selector: str) -> None:
    """Under `torch.vmap` the values of all samples are kept, also where the program works in place."""
    model, x = InPlace(), torch.randn(3, 4)
    name = "/mul:out" if "/" in selector else "fc"
    with torch.no_grad(), kedge.hook(model, selector, kedge.record()) as acts:
        out = torch.vmap(model)(x)
        wanted = model.fc(x) if name == "fc" else model.fc(x).relu() * 2
        recorded = acts.records(name)[0].value
    torch.testing.assert_close(recorded, wanted)
    torch.testing.assert_close(out, wanted.relu() * 2 + 1 if name == "fc" else wanted + 1)


def _order(model: nn.Module) -> dict[str, list[int]]:
    return {place: list(table) for place, table in hook_tables(model).items() if place.endswith("_hooks")}


def test_two_sessions_that_pause_across_each_other_keep_their_order() -> None:
    """Whichever comes back first, the hooks of the older one stand before those of the younger one, as before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with kedge.session() as one, kedge.session() as two:
        one.hook(model, "**:out, **:in, **:param.grad", lambda value: None)
        two.hook(model, "**:out, **:in, **:param.grad", lambda value: None)
        before = _order(model)
        for first_out, first_back in ((one, one), (one, two), (two, one), (two, two)):
            for paused in (first_out, two if first_out is one else one):
                paused.pause()
            for back in (first_back, two if first_back is one else one):
                back.resume()
            assert _order(model) == before
        model(torch.randn(2, 3)).sum().backward()


def test_handles_of_graphs_that_are_gone_do_not_wait_for_one_that_stays() -> None:
    """A program that keeps the graph of its first pass has no more handles of later ones kept for it."""
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    with kedge.session() as s:
        s.hook(model, ":out.grad", lambda value: None)
        first = model(x)
        for _ in range(300):
            model(x).sum().backward()
        kept = [what for what in s.mounts._passing if isinstance(what, InstalledHook)]
        assert len(kept) < 10
        first.sum().backward()
        assert s.ledger()[":out.grad"].fired == 301
