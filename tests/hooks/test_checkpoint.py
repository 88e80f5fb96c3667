"""Activation checkpointing: recomputes are labelled, observers skip them, edits apply in them."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge

MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Block(nn.Module):
    """Two layers that are checkpointed together by their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Net(nn.Module):
    """Two blocks, checkpointed in one of the two ways, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head, self.reentrant = Block(), Block(), nn.Linear(4, 2), None

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.one, self.two):
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return self.head(x)


def pair(reentrant: bool) -> tuple[Net, Net, Tensor]:
    """A checkpointed net, the same net without checkpoints, and an input."""
    net = Net()
    plain = copy.deepcopy(net)
    net.reentrant = reentrant
    return net, plain, torch.randn(5, 4, requires_grad=True)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and every gradient of one training step."""
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@MODES
def test_observing_a_checkpointed_model_changes_no_bit(reentrant: bool) -> None:
    """Outputs and gradients under every observer are those of the checkpointed and of the plain model."""
    net, plain, x = pair(reentrant)
    bare = step(net, x)
    with kedge.session() as s:
        s.hook(
            net, "**, **:in, **:out.grad, **:in.grad, **:in.share, **:param.grad", kedge.record()
        )
        observed = step(net, x)

    assert all(map(torch.equal, bare, observed))
    assert all(map(torch.equal, bare, step(plain, x)))


@MODES
def test_observers_skip_recomputes(reentrant: bool) -> None:
    """Each module of a checkpointed block is one event a forward, with the call index 0, as without checkpoints."""
    net, plain, x = pair(reentrant)
    for model in (net, plain):
        with kedge.session() as s:
            h = s.hook(model, "**:in, **", kedge.record(keep=None))
            for _ in range(2):
                step(model, x)
        for site in ("one.a", "one.b:in", "two", "head"):
            assert [(r.event.pass_, r.event.call, r.event.recompute) for r in h.records(site)] == [
                (0, 0, False),
                (1, 0, False),
            ]


@MODES
def test_recomputes_are_recorded_when_asked_for_and_labelled(reentrant: bool) -> None:
    """With `recomputes=True` the second run of a module is an event of the same pass and call, marked as a recompute."""
    net, _, x = pair(reentrant)
    with kedge.session() as s:
        h = s.hook(net, "one.a, one.b:in, head", kedge.record(keep=None, recomputes=True))
        for _ in range(2):
            step(net, x)

    for site in ("one.a", "one.b:in"):
        events = [r.event for r in h.records(site)]
        assert [(e.pass_, e.call, e.backward, e.recompute) for e in events] == [
            (0, 0, -1, False),
            (0, 0, 0, True),
            (1, 0, -1, False),
            (1, 0, 1, True),
        ]
    first, again = h.records("one.a")[:2]
    assert torch.equal(first.value, again.value)
    assert [r.event.recompute for r in h.records("head")] == [False, False]


@MODES
def test_gradients_of_a_checkpointed_block_are_seen_in_every_step(reentrant: bool) -> None:
    """out.grad, in.grad and in.share inside a checkpoint equal those of the plain model, in each training step."""
    net, plain, x = pair(reentrant)
    kinds = "one.act:out.grad, one.act:in.grad, one.b:in.share, two.b:out.grad, one:out.grad"
    found = []
    for model in (net, plain):
        with kedge.session() as s:
            h = s.hook(model, kinds, kedge.record(keep=None))
            for _ in range(3):
                step(model, x)
        found.append({kind: h.records(kind) for kind in kinds.split(", ")})

    checkpointed, expected = found
    for kind, records in expected.items():
        assert len(records) == 3
        assert [r.event.backward for r in checkpointed[kind]] == [0, 1, 2], kind
        assert [r.event.pass_ for r in checkpointed[kind]] == [0, 1, 2], kind
        assert all(
            torch.equal(r.value, c.value) for r, c in zip(records, checkpointed[kind], strict=True)
        )


@MODES
@pytest.mark.parametrize(
    "selector", ["one.act", "two.a:in", "**{Tanh}:out.grad", "two:out, one.b:in", "one.a:in.grad"]
)
def test_edits_apply_in_recomputes(reentrant: bool, selector: str) -> None:
    """An edited checkpointed model has the output and the gradients of the plain model with the same edit."""
    net, plain, x = pair(reentrant)
    results = []
    for model in (net, plain):
        with kedge.session() as s:
            s.hook(model, selector, lambda v: v * 1.5 + 0.1, kedge.record())
            results.append([step(model, x), step(model, x)])

    for checkpointed, expected in zip(*results, strict=True):
        assert all(map(torch.equal, checkpointed, expected))


class Shared(nn.Module):
    """One layer that runs in two checkpointed segments, and twice in each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.reentrant = nn.Linear(4, 4), None

    def twice(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).tanh()).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (
                self.twice(x)
                if self.reentrant is None
                else checkpoint(self.twice, x, use_reentrant=self.reentrant)
            )
        return x


@MODES
@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_an_edit_of_one_call_meets_the_same_call_in_the_recompute(
    reentrant: bool, call: int
) -> None:
    """Segments are recomputed in another order than they ran in; an edit of `fc#k` still applies to call k alone."""
    net = Shared()
    plain, x = copy.deepcopy(net), torch.randn(5, 4, requires_grad=True)
    net.reentrant = reentrant
    results = []
    for model in (net, plain):
        with kedge.hook(model, f"fc#{call}", kedge.scale(1.5)):
            results.append(step(model, x))

    assert all(map(torch.allclose, *results))


@MODES
def test_each_gradient_of_a_reused_checkpointed_module_bears_its_call(reentrant: bool) -> None:
    """The gradients of four calls in two segments are those of the plain model under the same indices."""
    net = Shared()
    plain, x = copy.deepcopy(net), torch.randn(5, 4, requires_grad=True)
    net.reentrant = reentrant
    with kedge.session() as s:
        theirs = s.hook(net, "fc:out.grad", kedge.record())
        ours = s.hook(plain, "fc:out.grad", kedge.record())
        step(net, x)
        step(plain, x)

    for call in range(4):
        assert torch.allclose(theirs[f"fc#{call}:out.grad"], ours[f"fc#{call}:out.grad"])


def test_the_last_module_that_early_stopping_skips_does_no_harm() -> None:
    """Early stopping leaves a recompute after a module's pre-hook; calls of later passes keep their numbers."""
    net, _, x = pair(False)
    with kedge.session() as s:
        before = s.hook(net, "one.b:in", kedge.record(keep=None, recomputes=True))
        after = s.hook(net, "one.b", kedge.record(keep=None, recomputes=True))
        for _ in range(2):
            step(net, x)

    assert [r.event.call for r in before.records("one.b:in")] == [0, 0, 0, 0]
    assert [(r.event.pass_, r.event.call) for r in after.records("one.b")] == [(0, 0), (1, 0)]


@MODES
def test_a_recompute_in_another_thread_is_still_of_its_pass(reentrant: bool) -> None:
    """Devices run backwards in threads of their own: a recompute there keeps the pass and the replica of its forward."""
    net, _, x = pair(reentrant)
    with kedge.session() as s:
        h = s.hook(net, "one.a", kedge.record(keep=None, recomputes=True))
        loss = net(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    events = [r.event for r in h.records("one.a")]
    assert [(e.pass_, e.recompute, e.replica) for e in events] == [(0, False, ""), (0, True, "")]


@MODES
def test_a_frozen_seed_meets_the_same_dropout_in_the_recompute(reentrant: bool) -> None:
    """Observers draw no random number: dropout inside a checkpoint is recomputed as it was."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    net, x = Wraps(block, reentrant), torch.randn(5, 4, requires_grad=True)
    torch.manual_seed(7)
    bare = step(net, x)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with kedge.hook(net, "**, **:out.grad", kedge.record(recomputes=True)):
        observed = step(net, x)

    assert all(map(torch.equal, bare, observed))
    assert torch.equal(state, torch.get_rng_state())


class Wraps(nn.Module):
    """Checkpoints what it holds."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def test_a_module_seen_only_in_recomputes_has_a_cause() -> None:
    """A session that begins between forward and backward says that it saw recomputes alone."""
    net, _, x = pair(False)
    loss = net(x).sum()
    with kedge.session() as s:
        h = s.hook(net, "one.a", kedge.record())
        loss.backward()
        cause = s.ledger()["one.a"].cause
        h.remove()

    assert cause == (
        "it ran only in a checkpoint's recompute",
        "observers skip recomputes; use record(recomputes=True)",
    )


@MODES
def test_a_gradient_that_enters_a_checkpoint_is_seen_and_edited_once(reentrant: bool) -> None:
    """in.grad of what a checkpoint is given is one event with PyTorch's total, and an edit of it is made once."""
    net, plain, x = pair(reentrant)
    results = []
    for model in (net, plain):
        x.grad = None
        with kedge.session() as s:
            seen = s.hook(model, "two:in.grad, two.a:in.grad", kedge.record())
            s.hook(model, "two.a:in.grad", kedge.scale(2))
            out = step(model, x)
        results.append([*out, x.grad, seen["two:in.grad"], seen["two.a:in.grad"]])

    assert all(map(torch.equal, *results))


@MODES
@pytest.mark.parametrize("selector", ["one.act:out", "two:in", "two.a/linear:out"])
def test_a_recompute_has_the_edits_of_its_forwards_step(reentrant: bool, selector: str) -> None:
    """An edit that was off schedule again when backward ran is made in the recomputes of its own step, and of no other."""
    net, plain, x = pair(reentrant)
    results = []
    for model in (net, plain):
        model.zero_grad()
        with kedge.hook(model, selector, kedge.scale(3), when=kedge.at(1)):
            sum(model(k * x).square().sum() for k in range(1, 4)).backward()
        results.append([p.grad.clone() for p in model.parameters()])

    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(*results, strict=True))


@MODES
@pytest.mark.parametrize("selector", ["one.a", "one.b:in", "one/tanh"])
@pytest.mark.parametrize("late", [False, True], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("alone", [False, True], ids=["end", "remove"])
def test_an_edit_that_a_recompute_will_lack_is_reported(
    reentrant: bool, selector: str, late: bool, alone: bool
) -> None:
    """A hook that is removed before backward warns; one that stays, or a forward whose graph is gone, does not."""
    net, _, x = pair(reentrant)
    net.one.forward = lambda x: net.one.b(torch.tanh(net.one.a(x)))  # with an operation of its own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with kedge.session() as s:
            hooked = s.hook(net, selector, kedge.scale(2))
            net(x)  # its graph is gone
            loss = net(x).sum()
            if not late:
                loss.backward()
            if alone:
                hooked.remove()
    told = [str(each.message) for each in caught if each.category is kedge.errors.EditNotRepeated]

    assert len(told) == late
    assert all(
        f"scale(2) at {'one.a:out' if selector == 'one.a' else selector}" in text for text in told
    )
