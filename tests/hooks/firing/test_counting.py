"""Counting: steps, micro-batches, passes, calls and backwards, and the schedules that go by steps."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import NeverFiredWarning
from kedge.flow import Event
from kedge.hooks.firing.schedule import rank
from kedge.testing import assert_same_bits


class Net(nn.Module):
    """A generator and a discriminator in one."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.g(x))


def events(h: kedge.hooks.handle.Hooked, site: str) -> list[Event]:
    """The events of what was recorded."""
    return [r.event for r in h.records(site)]


def test_without_an_optimizer_each_forward_is_a_step() -> None:
    """Steps are forward passes where nothing optimizes; a backward belongs to the step of the forward before it."""
    model, x = Net(), torch.ones(1, 2)
    with kedge.hook(model, "g, g:out.grad", kedge.record(keep=None)) as h:
        for _ in range(3):
            model(x).sum().backward()

    assert [(e.step, e.micro_batch, e.pass_, e.backward) for e in events(h, "g")] == [
        (0, 0, 0, -1),
        (1, 0, 1, -1),
        (2, 0, 2, -1),
    ]
    assert [(e.step, e.micro_batch, e.pass_, e.backward) for e in events(h, "g:out.grad")] == [
        (0, 0, 0, 0),
        (1, 0, 1, 1),
        (2, 0, 2, 2),
    ]


def train(model: Net, sizes: list[int], optimizer: torch.optim.Optimizer) -> None:
    """Train with as many micro-batches in each step as the sizes say."""
    for size in sizes:
        for _ in range(size):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_counts_the_steps() -> None:
    """A step ends with `optimizer.step()`; an evaluation in between belongs to the step that comes."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kedge.hook(
        model, "g, g:out.grad, g.bias:param.grad", kedge.record(keep=None, copy=True)
    ) as h:
        train(model, [1, 1], optimizer)
        with torch.no_grad():
            model(torch.ones(1, 2))
        train(model, [1], optimizer)

    assert [(e.step, e.micro_batch) for e in events(h, "g")] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert [e.step for e in events(h, "g:out.grad")] == [0, 1, 2]
    assert [(e.step, e.pass_) for e in events(h, "g.bias:param.grad")] == [(0, 0), (1, 1), (2, 3)]


def test_gradient_accumulation_counts_micro_batches() -> None:
    """`step` is the number of optimizer steps before, `micro_batch` the number of forwards since the last one."""
    model = Net()
    with kedge.hook(model, "g, g:out.grad", kedge.record(keep=None)) as h:
        train(model, [3, 3, 2], torch.optim.SGD(model.parameters(), lr=0.1))

    expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [(e.step, e.micro_batch) for e in events(h, "g")] == expected
    assert [(e.step, e.micro_batch) for e in events(h, "g:out.grad")] == expected


def test_after_the_first_optimizer_step_steps_are_the_optimizers() -> None:
    """Once an optimizer was seen, `step` is the number of its steps, however many forwards came before."""
    model = Net()
    with kedge.hook(model, "g", kedge.record(keep=None)) as h:
        train(model, [4, 4, 4], torch.optim.SGD(model.parameters(), lr=0.1))

    assert [(e.step, e.micro_batch) for e in events(h, "g")][4:] == [
        (s, m) for s in (1, 2) for m in range(4)
    ]


def test_a_ledger_that_is_asked_within_a_backward_says_that_it_is_still_running() -> None:
    """Before it, that none has reached a hook."""
    model, told = Net(), []

    def ask(_: object = None) -> None:
        told.append(str(s.ledger()["g:out.grad"].cause.why))

    with kedge.session() as s:
        s.hook(model, "g:out.grad", kedge.record())
        loss = model(torch.ones(1, 2)).sum()
        ask()
        loss.register_hook(ask)
        loss.backward()
        s.end(quiet=True)

    assert told == [
        "no backward reached a hook of this session",
        "a backward was still running, and had not reached it",
    ]


def test_of_two_optimizers_the_first_one_seen_counts() -> None:
    """A second optimizer of the same model, stepping as often, does not double the steps."""
    model = Net()
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.g, model.d))
    with kedge.hook(model, "g", kedge.record(keep=None)) as h:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            one.step()
            model(torch.ones(1, 2)).sum().backward()
            two.step()

    assert [(e.step, e.micro_batch) for e in events(h, "g")] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (3, 0),
    ]


def test_another_models_optimizer_counts_nothing() -> None:
    """Only an optimizer that holds a parameter of a hooked model counts steps."""
    model, other = Net(), Net()
    foreign, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (other, model))
    with kedge.hook(model, "g", kedge.record(keep=None)) as h:
        for _ in range(3):
            other(torch.ones(1, 2)).sum().backward()
            foreign.step()
            model(torch.ones(1, 2)).sum().backward()
            own.step()

    assert [e.step for e in events(h, "g")] == [0, 1, 2]


def test_two_hooked_models_share_the_steps_and_not_the_passes() -> None:
    """Models of one session have one clock; calls and micro-batches are each model's own."""
    g, d = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(g.parameters(), lr=0.1)
    with kedge.session() as s:
        of_g = s.hook(g, "0", kedge.record(keep=None))
        of_d = s.hook(d, "0", kedge.record(keep=None))
        for _ in range(2):
            d(g(torch.ones(1, 2))).sum().backward()
            d(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    assert [e.pass_ for e in events(of_g, "0") + events(of_d, "0")] == [0, 3, 1, 2, 4, 5]
    assert [(e.step, e.micro_batch) for e in events(of_g, "0")][-1] == [
        (e.step, e.micro_batch) for e in events(of_d, "0")
    ][-2]


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (kedge.every(1), [0, 1, 2, 3, 4, 5, 6]),
        (kedge.every(3), [0, 3, 6]),
        (kedge.every(2, after=1), [1, 3, 5]),
        (kedge.every(2, after=2, until=5), [2, 4]),
        (kedge.at(0, 5), [0, 5]),
        (kedge.at(6), [6]),
        (lambda step: step % 4 == 1, [1, 5]),
    ],
)
@pytest.mark.parametrize("optimized", [False, True])
def test_a_schedule_says_in_which_steps_an_action_runs(
    schedule: kedge.flow.Schedule, steps: list[int], optimized: bool
) -> None:
    """Values, gradients, inputs and parameter gradients of the scheduled steps are seen, and no others."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimized else None
    sites = "g, d:in, g:out.grad, g:in.grad, d:in.share, g.weight:param.grad, g.weight:param.acc, g.weight:param"
    with kedge.hook(model, sites, kedge.record(keep=None, copy=True), when=schedule) as h:
        for _ in range(7):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            if optimizer is not None:
                optimizer.step()

    for site in sites.split(", "):
        assert [e.step for e in events(h, site)] == steps, site


def test_a_scheduled_edit_is_made_in_its_steps_alone() -> None:
    """Off schedule a value passes as it is; hooks without a schedule at the same site go on."""
    model, x = Net(), torch.ones(1, 2)
    with kedge.session() as s:
        s.hook(model, "d", kedge.zero(), when=kedge.at(1))
        s.hook(model, "d", kedge.add(1))
        outs = [model(x) for _ in range(3)]

    plain = model(x)
    assert [
        torch.equal(o, e)
        for o, e in zip(outs, [plain + 1, torch.ones(1, 1), plain + 1], strict=True)
    ] == [True] * 3


def test_a_schedule_that_did_not_come_up_is_the_cause() -> None:
    """A site that stayed silent because of its schedule says so."""
    model = Net()
    with pytest.warns(
        NeverFiredWarning,
        match=re.escape(
            "its schedule did not select any of the steps 0 to 2; start it earlier, or run longer"
        ),
    ):
        with kedge.hook(model, "g", kedge.record(), when=kedge.at(7)):
            for _ in range(3):
                model(torch.ones(1, 2))


@pytest.mark.parametrize("n", [0, -2])
def test_a_distance_of_no_step_is_refused(n: int) -> None:
    """The message says what was asked and what would do."""
    with pytest.raises(
        ValueError, match=re.escape(f"every({n}): the distance between two steps must be 1 or more")
    ):
        kedge.every(n)


def test_a_module_called_outside_of_the_models_forward_has_passes_too() -> None:
    """Calling parts of a hooked model by hand: a pass begins when a module comes round again."""
    model = Net()
    with kedge.hook(model, "g, d", kedge.record(keep=None)) as h:
        for _ in range(2):
            model.d(model.g(torch.ones(1, 2)))

    assert (
        [(e.pass_, e.call) for e in events(h, "g")]
        == [(e.pass_, e.call) for e in events(h, "d")]
        == [(0, 0), (1, 0)]
    )


def test_only_the_last_passes_are_kept() -> None:
    """`keep=n` holds the values of the last n forward passes, and the gradients of the last n backwards."""
    model = Net()
    with kedge.session() as s:
        two = s.hook(model, "g, g:out.grad", kedge.record(keep=2))
        one = s.hook(model, "g", kedge.record())
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()

    assert [e.pass_ for e in events(two, "g")] == [2, 3]
    assert [e.backward for e in events(two, "g:out.grad")] == [2, 3]
    assert [e.pass_ for e in events(one, "g")] == [3]


def test_the_timeline_tells_what_fired_in_which_order() -> None:
    """The timeline lists every firing with its site and action, forward and backward."""
    model = Net()
    with kedge.session() as s:
        s.hook(model, "d, g", kedge.record())
        s.hook(model, "g, g:out.grad, d:out.grad", kedge.scale(2))
        model(torch.ones(1, 2)).sum().backward()
        timeline = s.timeline()

    assert timeline.sites == ["g:out", "g:out", "d:out", "d:out.grad", "g:out.grad"]
    assert [label for _, label in timeline] == [
        "record()",
        "scale(2)",
        "record()",
        "scale(2)",
        "scale(2)",
    ]
    assert len(timeline) == 5
    assert str(timeline).splitlines() == [
        "step  when        call  site        action",
        "0     pass 0      0     g:out       record()",
        "0     pass 0      0     g:out       scale(2)",
        "0     pass 0      0     d:out       record()",
        "0     backward 0  0     d:out.grad  scale(2)",
        "0     backward 0  0     g:out.grad  scale(2)",
    ]


def test_functions_of_pytorch_have_their_short_names() -> None:
    """Without the private class that PyTorch keeps them in."""
    with kedge.session() as s:
        s.hook(Net(), "g", torch.zeros_like)
        assert [tap.label for tap in s.taps] == ["zeros_like"]
        s.end(quiet=True)


def test_the_timeline_of_tensors_and_nodes_is_a_table_too_and_keeps_the_last_firings() -> None:
    """An empty one says so; a full one that there were more."""
    z = torch.ones(2, requires_grad=True)
    out = (z * 2).exp()
    with kedge.session() as s:
        assert str(s.timeline()) == "nothing has fired"
        assert "nothing has fired" in s.timeline()._repr_html_()
        s.hook(z, ":grad, :acc", kedge.record())
        s.hook(out.grad_fn, ":pre", kedge.record())
        out.sum().backward()
        assert str(s.timeline()).splitlines()[1:] == [
            "0     backward 0  0     ExpBackward0:pre[0]  record()",
            "0     backward 0  0     z:grad               record()",
            "0     backward 0  0     z:acc                record()",
        ]
        for _ in range(1_000):
            z.sum().backward()
        assert len(s.timeline()) == 2_000
        assert str(s.timeline()).endswith(
            "\nthese are the last 2,000 firings; earlier ones are not kept"
        )
        assert "earlier ones are not kept" in s.timeline()._repr_html_()


def test_an_optimizer_whose_making_failed_does_no_harm() -> None:
    """What an exception keeps of it, as a notebook does, is no optimizer; each forward is a step."""
    net, x = Net(), torch.randn(3, 2)
    with pytest.raises(ValueError, match="Invalid learning rate") as kept:
        torch.optim.SGD(net.parameters(), lr=-1)
    with kedge.hook(net, ":out", kedge.record(keep=None)) as h:
        for _ in range(3):
            net(x)
    assert kept.tb is not None
    assert [e.step for e in events(h, ":out")] == [0, 1, 2]


class Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.down(x)
        return self.up(self(y, depth - 1)) * 2 if depth else y + 1


def test_a_model_that_calls_itself_makes_one_pass() -> None:
    """The calls of a recursion are told apart by number, within one pass, and the next pass counts anew."""
    model, x = Again(), torch.randn(2, 4)
    with kedge.session() as s:
        acts = s.hook(model, "**:out, /*:out", kedge.record(keep=None))
        model(x)
        model(x)
        events = [event for event, _ in s.timeline()]
        assert_same_bits(acts["up#1"] * 2, acts["#2:out"])
        model.down(x)
        assert [event for event, _ in s.timeline()][-1].pass_ == 2
    for path, calls in (("down", 3), ("up", 2), ("", 3)):
        mine = [(e.pass_, e.call) for e in events if e.site.path == path and e.site.op is None]
        assert mine == [(pass_, call) for pass_ in (0, 1) for call in range(calls)]


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


@pytest.mark.parametrize(("launched", "expected"), [("3", 3), ("", 0), ("x", 0), ("1.0", 0)])
def test_a_rank_that_is_no_number_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, launched: str, expected: int
) -> None:
    """The launcher's variable may be of another program."""
    monkeypatch.setenv("RANK", launched)
    assert rank() == expected


def test_a_schedule_is_shown_as_the_call_that_makes_it() -> None:
    """So that a message or a notebook can distinguish it from another one."""
    assert repr(kedge.every(3)) == "every(3)"
    assert repr(kedge.every(10, after=100, until=200)) == "every(10, after=100, until=200)"


def test_steps_are_also_numbers_of_numpy() -> None:
    """What `numpy.arange` counts is a step; the schedule is the same as of Python's numbers."""
    first, *_, last = np.arange(3)

    assert kedge.at(*np.arange(3)) == kedge.at(0, 1, 2)
    assert kedge.every(last, after=first, until=last) == kedge.every(2, after=0, until=2)
    assert repr(kedge.at(last)) == "at(2)"
