"""The guarantees of the design, one by one."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import (
    ActionArity,
    ActionError,
    EditError,
    InPlaceEdit,
    NeverFiredWarning,
    NoSiteMatched,
    Overwritten,
)

OBSERVED = "**, **:in, **:out.grad, **:in.grad, **:in.share, **:param, **:param.grad, **:param.acc"


class Net(nn.Module):
    """Dropout, a layer that runs twice, an in-place activation, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc, self.relu, self.idle = (
            nn.Dropout(0.5),
            nn.Linear(4, 4),
            nn.ReLU(inplace=True),
            nn.Linear(1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(self.relu(self.fc(self.drop(x)))))


def test_1_all_or_nothing_and_always_removed(tables: Callable[..., Any]) -> None:
    """If one of several hooks cannot be attached, none stays; however the block ends, the hook tables are what they were."""
    model = Net()
    model.fc.register_forward_hook(lambda m, i, o: None)
    before = tables(model)
    for end in (None, ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(end) if end else pytest.warns(NeverFiredWarning), kedge.session() as s:
            s.hook(model, OBSERVED, kedge.record())
            with pytest.raises(ActionArity):
                s.hook(model, OBSERVED, lambda a, b, c: None)
            if end:
                raise end
        assert tables(model) == before


def test_2_observing_changes_no_bit(tables: Callable[..., Any]) -> None:
    """Outputs, every gradient, RNG state, `state_dict`, pickle and deepcopy of the model are identical with observers on."""
    model, x = Net(), torch.randn(8, 4)

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        y = x.clone().requires_grad_()
        out = model(y)
        out.square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach(), y.grad, *grads, torch.get_rng_state(), *model.state_dict().values()]

    bare = [t.clone() for t in step()]
    pickled, plain = pickle.dumps(model), tables(copy.deepcopy(model))
    with pytest.warns(NeverFiredWarning, match="idle"), kedge.session() as s:
        s.hook(model, OBSERVED, kedge.record(), kedge.error_if(kedge.nonfinite))
        observed = [t.clone() for t in step()]
        assert pickle.dumps(model) == pickled
        assert list(tables(copy.deepcopy(model))) == list(plain)

    assert len(bare) == len(observed)
    assert all(map(torch.equal, bare, observed))


def test_3_never_silent() -> None:
    """No match is an error. A site that never fired is reported at the end with its cause."""
    model = Net()
    with pytest.raises(NoSiteMatched):
        kedge.hook(model, "layer9", kedge.record())
    with pytest.warns(NeverFiredWarning) as caught, kedge.session() as s:
        s.hook(model, "**, **:in.grad", kedge.record())
        model(torch.randn(2, 4)).sum().backward()
        silent = {str(e.site): e.cause for e in s.ledger() if not e.fired}

    assert set(silent) == {"idle:out", ":in.grad", "drop:in.grad", "idle:in.grad"}
    assert all(cause is not None and cause.why and cause.remedy for cause in silent.values())
    assert all(site in str(caught[0].message) for site in silent)


def test_4_actions_run_in_the_order_they_were_attached() -> None:
    """Actions run in the order they were attached, each seeing the value as the one before left it - in forward and in backward."""
    model, seen = Net().eval(), []

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda v: seen.append((name, v.flatten()[0].item()))

    with kedge.session() as one, kedge.session() as two:
        for site in ("fc#0:out", "fc#0:in", "fc#0:out.grad", "fc.bias:param.grad"):
            one.hook(model, site, lambda v: v * 0 + 1, note(f"{site} 1"), kedge.scale(2))
            two.hook(model, site, note(f"{site} 3"))
            one.hook(model, site, note(f"{site} 2"), kedge.add(1))
        model(torch.randn(2, 4)).sum().backward()

    expected = {"1": 1.0, "3": 2.0, "2": 2.0}
    assert len(seen) == 12
    assert all(value == expected[name[-1]] for name, value in seen)
    for site in ("fc#0:out", "fc#0:in", "fc#0:out.grad", "fc.bias:param.grad"):
        assert [name[-1] for name, _ in seen if name.startswith(f"{site} ")] == ["1", "3", "2"]


def test_5_an_edit_returns_a_new_value() -> None:
    """It must keep shape, dtype and device; changing the value in place is caught by its version counter and raised."""
    model, x = Net().eval(), torch.randn(2, 4)
    with kedge.hook(model, "fc#1", torch.zeros_like):
        assert model(x).count_nonzero() == 0
    for wrong in (lambda v: v[0], lambda v: v.double(), lambda v: v.to("meta")):
        with pytest.raises(EditError), kedge.hook(model, "fc", wrong):
            model(x)
    for inplace in (lambda v: v.zero_(), lambda v: v.detach().add_(1)):
        with pytest.raises(InPlaceEdit), kedge.hook(model, "fc", inplace):
            model(x)


def test_6_a_recorded_tensor_is_what_it_was() -> None:
    """Kept without a copy; copied first when a module works in place; any other overwriting is an error on reading."""
    model, x = Net().eval(), torch.randn(2, 4)
    with kedge.hook(model, "fc", kedge.record()) as acts:
        out = model(x)
    first = model.fc(x)
    assert torch.equal(acts["fc#0"], first)
    assert torch.equal(acts["fc#1"], model.fc(first.relu()))

    with kedge.hook(model, ":out", kedge.record()) as acts:
        out = model(x)
    assert acts[":out"].data_ptr() == out.data_ptr()
    assert not acts[":out"].requires_grad
    out.detach().mul_(2)
    with pytest.raises(Overwritten, match=r"record\(copy=True\) keeps a copy"):
        acts[":out"]


def test_7_calls_passes_backwards_and_steps_are_counted() -> None:
    """Call within a forward, pass, backward, optimizer step, micro-batch, rank, and whether it is a recompute, are on the event."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kedge.session() as s:
        h = s.hook(model, "fc, fc:out.grad", kedge.record(keep=None))
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    seen = [
        (e.pass_, e.call, e.backward, e.step, e.micro_batch, e.rank, e.recompute)
        for e, _ in h.records("fc")
    ]
    assert seen == [(p, c, -1, p, 0, 0, False) for p in (0, 1) for c in (0, 1)]
    seen = [
        (e.pass_, e.call, e.backward, e.step, e.micro_batch, e.rank, e.recompute)
        for e, _ in h.records("fc:out.grad")
    ]
    assert seen == [(p, c, p, p, 0, 0, False) for p in (0, 1) for c in (1, 0)]


def test_8_the_same_user_code_in_eager_and_compiled(compiled: Callable[..., Any]) -> None:
    """Hooks in place before `torch.compile` stay in the graph without a break: values and edits are those of eager."""
    found = []
    for compile_ in (lambda m: m, lambda m: compiled(m, backend="eager", fullgraph=True)):
        torch.manual_seed(0)
        model, x = Net().eval(), torch.randn(2, 4)
        with kedge.session() as s:
            acts = s.hook(model, "fc", kedge.record())
            s.hook(model, "relu", kedge.scale(2), kedge.record())
            out = compile_(model)(x)
        found.append([out, acts["fc#0"], acts["fc#1"]])

    assert all(map(torch.allclose, *found))


def test_9_an_actions_failure_has_its_place_and_the_users_frames_on_top() -> None:
    """An action's failure is raised with site, action, pass and shape in the message and the user's own frames on top."""
    model = Net().eval()

    def my_action(value: Tensor) -> None:
        my_helper(value)

    def my_helper(value: Tensor) -> None:
        raise LookupError("where?")

    with pytest.raises(ActionError) as caught, kedge.session() as s:
        s.hook(model, "fc#1", my_action)
        model(torch.randn(2, 4))

    assert str(caught.value).endswith(
        "my_action at fc:out (pass 0, call 1, float32[2, 4]): LookupError: where?"
    )
    cause = caught.value.__cause__
    assert isinstance(cause, LookupError)
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)][-2:] == [
        "my_action",
        "my_helper",
    ]


def test_a_function_without_a_module_is_an_action_like_any_other() -> None:
    """As one that code made which was run by `exec` with names of its own."""
    model = nn.Linear(2, 1)
    double = eval("lambda value: value * 2", {})
    assert double.__module__ is None
    x = torch.ones(1, 2)
    plain = model(x)

    with kedge.hook(model, ":out", double):
        assert torch.equal(model(x), plain * 2)
