"""`record` alone: what it keeps, how it is read, and when it copies."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.actions.record import Recorder
from kedge.errors import NotRecorded, Overwritten, SelectorError, SeveralRecorded
from kedge.flow import Event
from kedge.sites.site import Site
from kedge.testing import assert_same_bits


def event(
    site: Site, *, call: int = 0, pass_: int = 0, backward: int = -1, replica: str = ""
) -> Event:
    """Make an event as the firing loop does."""
    return Event(site, call, pass_, backward, 0, 0, 0, replica, recompute=False)


def feed(recorder: Recorder, site: Site, value: Tensor, **at: Any) -> None:
    """Pass one value to a recorder."""
    assert recorder.bind(site)(value, event(site, **at)) is None


def why(name: str) -> str:
    """Stand in for the ledger's explanation."""
    return f"no {name}"


def test_a_value_is_kept_detached_and_without_a_copy() -> None:
    """What is read shares the memory of what was seen, and needs no gradient."""
    recorder, x = kedge.record(), torch.ones(2, requires_grad=True) * 2
    feed(recorder, Site("a"), x)
    kept = recorder.read("a", why)

    assert kept.data_ptr() == x.data_ptr()
    assert not kept.requires_grad
    assert kept.grad_fn is None


def test_a_copy_is_kept_where_it_was_asked_for() -> None:
    """`copy=True` keeps memory of its own, which nothing overwrites."""
    recorder, x = kedge.record(copy=True), torch.ones(2)
    feed(recorder, Site("a"), x)
    x.zero_()

    assert torch.equal(recorder.read("a", why), torch.ones(2))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.zero_(),
        lambda x: x[0].fill_(3),
        lambda x: x.view(-1).add_(1),
        lambda x: x.detach().mul_(2),
    ],
)
def test_an_overwritten_value_is_never_handed_out(change: Any) -> None:
    """A change through the tensor, a view of it or its detached twin is found out on reading."""
    recorder, x = kedge.record(), torch.ones(2)
    feed(recorder, Site("a"), x, call=1)
    change(x)
    with pytest.raises(Overwritten) as caught:
        recorder.read("a", why)

    assert str(caught.value) == (
        "a#1:out was recorded, but the program then changed the tensor in place, so its value is gone; record(copy=True) keeps a copy"
    )


def test_a_change_before_the_record_is_no_matter() -> None:
    """Only what happens after the value was seen overwrites it."""
    recorder, x = kedge.record(), torch.ones(2)
    x.mul_(3)
    feed(recorder, Site("a"), x)

    assert torch.equal(recorder.read("a", why), torch.full((2,), 3.0))


def test_values_are_preserved_before_a_module_overwrites_them() -> None:
    """`preserve` copies what is kept of the named memory, all views of it, and nothing else."""
    recorder, x, y = kedge.record(), torch.ones(4), torch.ones(4)
    recorder.watch_overwrites()
    for name, value in (("a", x), ("b", x.view(2, 2)), ("c", y)):
        feed(recorder, Site(name), value)
    recorder.preserve([x.untyped_storage()._cdata])
    x.zero_()

    assert torch.equal(recorder.read("a", why), torch.ones(4))
    assert torch.equal(recorder.read("b", why), torch.ones(2, 2))
    assert recorder.read("c", why).data_ptr() == y.data_ptr()


def test_what_is_dropped_is_freed() -> None:
    """Old passes go with their tensors, also where memory is watched for overwriting."""
    recorder = kedge.record()
    recorder.watch_overwrites()
    x = torch.ones(2)
    gone = weakref.ref(x.untyped_storage()) if hasattr(x.untyped_storage(), "__weakref__") else None
    feed(recorder, Site("a"), x, pass_=0)
    dead = weakref.ref(recorder.by_site[Site("a")].all()[0])
    del x
    feed(recorder, Site("a"), torch.zeros(2), pass_=1)
    gc.collect()

    assert dead() is None
    assert gone is None or gone() is None
    assert torch.equal(recorder.read("a", why), torch.zeros(2))


@pytest.mark.parametrize(("keep", "passes"), [(1, [4]), (2, [3, 4]), (None, [0, 1, 2, 3, 4])])
def test_the_last_passes_are_kept(keep: int | None, passes: list[int]) -> None:
    """`keep` counts forward passes, and for gradients backwards; every call and leaf of a kept pass stays."""
    recorder = kedge.record(keep=keep)
    for i in range(5):
        for call in range(2):
            feed(recorder, Site("a"), torch.full((1,), float(i)), call=call, pass_=i)
            feed(
                recorder,
                Site("a", "out.grad"),
                torch.full((1,), float(i)),
                call=call,
                pass_=0,
                backward=i,
            )

    assert [r.event.pass_ for r in recorder.records("a")] == [p for p in passes for _ in range(2)]
    assert [r.event.backward for r in recorder.records("a:out.grad")] == [
        p for p in passes for _ in range(2)
    ]


def test_reading_takes_the_newest_pass() -> None:
    """With several passes kept, a name reads the last one; `records` has them all."""
    recorder = kedge.record(keep=None)
    for i in range(3):
        feed(recorder, Site("a"), torch.full((1,), float(i)), pass_=i)

    assert recorder.read("a", why).item() == 2.0
    assert [r.value.item() for r in recorder.records("a")] == [0.0, 1.0, 2.0]


def test_names_select_kind_call_and_leaf() -> None:
    """A name without a kind reads `out` if that was recorded, else the only kind there is."""
    recorder = kedge.record()
    bound = recorder.bind(Site("a"))
    for leaf in ("x", "y.0"):
        bound(torch.ones(1), event(Site("a", "out", leaf)))
    feed(recorder, Site("b", "in.grad"), torch.zeros(1), backward=0)

    assert recorder.read("a:out[y.0]", why).item() == 1.0
    assert recorder.read("b", why).item() == recorder.read("b#0:in.grad", why).item() == 0.0
    with pytest.raises(
        SeveralRecorded,
        match=re.escape('"a" matches 2 recorded values; read one of "a#0:out[x]", "a#0:out[y.0]"'),
    ):
        recorder.read("a", why)
    with pytest.raises(NotRecorded, match='^nothing was recorded under "b:out": no b:out$'):
        recorder.read("b:out", why)


def test_values_of_several_threads_are_told_apart() -> None:
    """One name in several threads is an error that names passes and threads."""
    recorder = kedge.record()
    bound = recorder.bind(Site("a"))
    for n, replica in enumerate(("", "t1")):
        bound(torch.ones(1), event(Site("a"), pass_=n, replica=replica))
    with pytest.raises(SeveralRecorded) as caught:
        recorder.read("a", why)

    assert str(caught.value) == (
        '"a" matches 2 recorded values, of passes [0, 1] in t1, the main thread; .records("a") returns them all with their events'
    )


def test_keeping_nothing_is_refused() -> None:
    """The message says what would do."""
    with pytest.raises(
        ValueError, match=r"^record\(keep=0\) would keep nothing; use 1 or more, or None for all$"
    ):
        kedge.record(keep=0)


def test_a_pattern_is_no_name() -> None:
    """Records are read one by one."""
    with pytest.raises(
        SelectorError,
        match='^"a\\*" may match several sites; records are read by the name of one, such as',
    ):
        kedge.record().read("a*", why)


def test_a_recorder_prints_as_it_is_written() -> None:
    """Messages and timelines show the call that made the action, with what differs from the default."""
    assert repr(kedge.record()) == "record()"
    assert repr(kedge.record(copy=True)) == "record(copy=True)"
    assert repr(kedge.record(keep=None)) == "record(keep=None)"
    assert (
        repr(kedge.record(copy=True, keep=3, recomputes=True))
        == "record(copy=True, keep=3, recomputes=True)"
    )


def test_one_recorder_serves_several_hooks() -> None:
    """The same action at several sites, bound twice at one, has one shelf a site."""
    recorder = kedge.record()
    recorder.bind(Site("a"))
    feed(recorder, Site("a"), torch.ones(1))
    feed(recorder, Site("b"), torch.zeros(1))

    assert recorder.read("a", why).item() == 1.0
    assert recorder.read("b", why).item() == 0.0


def test_what_was_recorded_can_be_copied_and_saved() -> None:
    """Records are plain tensors."""
    recorder = kedge.record()
    feed(recorder, Site("a"), torch.ones(2, requires_grad=True) * 1)

    assert torch.equal(copy.deepcopy(recorder.read("a", why)), torch.ones(2))


class Sparse(nn.Module):
    """Works in place on a sparse tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.to_sparse()
        y.mul_(2)
        return y.to_dense() * 1


def test_observing_sparse_operations_that_work_in_place_stops_nothing() -> None:
    """What has no memory of the usual kind is kept as well, with the value that it had."""
    model, x = Sparse(), torch.randn(2, 3)
    with kedge.hook(model, "/*:out, /*:in", kedge.record()) as acts:
        assert_same_bits(model(x), x * 2)
        assert_same_bits(acts["/to_sparse"].to_dense(), x)
        assert_same_bits(acts["/mul_:out"].to_dense(), x * 2)


class InPlace(nn.Module):
    """Works in place on what its layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc(x)) * 2
        y.add_(1)
        return y


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


def test_a_batch_of_gradients_is_measured_and_recorded_as_one() -> None:
    """With ``is_grads_batched`` a hook receives a wrapper of all gradients at once; they are there when it is over."""
    model, x = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        torch.randn(5, 3, requires_grad=True),
    )
    unit = torch.eye(10).view(10, 5, 2)

    def jacobian() -> Tensor:
        (found,) = torch.autograd.grad(model(x), x, unit, is_grads_batched=True)
        return found

    plain = jacobian()
    with kedge.session() as s:
        values = s.hook(model, "**:out.grad", kedge.record())
        stats = s.hook(model, "**:out.grad", kedge.measure())
        assert torch.equal(jacobian(), plain)
        recorded = values["2:out.grad"]
        assert (stats["2:out.grad"].count, stats["2:out.grad"].max) == (100, 1)
    assert torch.equal(recorded, unit)


class Branching(nn.Module):
    """A model whose second layer is not always called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, both: bool = True, fails: bool = False) -> Tensor:
        x = self.a(x)
        if fails:
            raise ValueError("in the middle")
        return self.b(x) if both else x


def test_a_module_that_did_not_run_in_the_newest_pass_has_no_value() -> None:
    """A value of an older pass does not stand beside new ones: its name is absent, and the error says how to get it."""
    model = Branching()
    with kedge.hook(model, "a, b, a:out.grad, b:out.grad", kedge.record()) as acts:
        model(torch.zeros(2, 3)).sum().backward()
        first = acts["b"]
        model(torch.ones(2, 3), both=False).sum().backward()
    assert list(acts) == ["a", "a:out.grad"]
    assert "b" not in acts
    with pytest.raises(
        NotRecorded, match=r"newest forward pass.*forward pass 0: \.records\(\"b\"\)"
    ):
        acts["b"]
    with pytest.raises(NotRecorded, match=r"newest backward pass.*backward pass 0"):
        acts["b:out.grad"]
    assert acts.records("b")[-1].value is first
    assert "only of older passes, which .records() returns: b, b:out.grad" in str(acts)


@pytest.mark.parametrize("selector", ["b", "a, b"])
@pytest.mark.parametrize("how", [{"both": False}, {"fails": True}])
def test_a_pass_that_does_not_reach_a_site_ends_its_value(
    selector: str, how: dict[str, bool]
) -> None:
    """It does so also where no other site is recorded, and where the pass failed before it."""
    model = Branching()
    with kedge.hook(model, selector, kedge.record()) as acts:
        model(torch.zeros(2, 3))
        with contextlib.suppress(ValueError):
            model(torch.ones(2, 3), **how)
    assert "b" not in acts
    assert ("a" in acts) == (selector != "b")


def test_a_pass_in_which_nothing_was_to_be_recorded_leaves_the_values() -> None:
    """Off its schedule, after `remove`, and after its session, a hook keeps the values of the last pass that it saw."""
    model, x = Branching(), torch.ones(2, 3)
    with kedge.session() as s:
        scheduled = s.hook(model, "a, b", kedge.record(), when=kedge.at(0))
        removed = s.hook(model, "a, b", kedge.record())
        model(x)
        removed.remove()
        model(x, both=False)
    model(x, both=False)
    for acts in (scheduled, removed):
        assert list(acts) == ["a", "b"]


class Heads(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.one(x), self.two(x)


def test_a_gradient_of_the_newest_forward_or_backward_is_new() -> None:
    """Two losses of one forward may be differentiated one after the other, and two forwards together."""
    heads, branching = Heads(), Branching()
    with kedge.hook(heads, "*:out.grad", kedge.record()) as grads:
        one, two = heads(torch.ones(2, 3))
        one.sum().backward(retain_graph=True)
        two.sum().backward()
        assert set(grads) == {"one:out.grad", "two:out.grad", "trunk:out.grad"}
    with kedge.hook(branching, "a:out.grad, b:out.grad", kedge.record()) as grads:
        (branching(torch.ones(2, 3)) + branching(torch.ones(2, 3), both=False)).sum().backward()
        assert "b:out.grad" in grads


def test_a_parameter_that_the_newest_backward_did_not_reach_has_no_gradient() -> None:
    """The gradient of a layer that was not used in the newest pass is absent."""
    model = Branching()
    with kedge.hook(model, "*.weight:param.grad", kedge.record()) as grads:
        model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3), both=False).sum().backward()
    assert list(grads) == ["a.weight:param.grad"]


def test_two_models_have_passes_of_their_own() -> None:
    """A pass of one model does not end the values of another one in the same session."""
    one, other = Branching(), Branching()
    with kedge.session() as s:
        ones = s.hook(one, "a, b, a:out.grad", kedge.record())
        others = s.hook(other, "a, b, a:out.grad", kedge.record())
        x = torch.ones(2, 3)
        one(x).sum().backward()
        for _ in range(2):
            other(x).sum().backward()
        assert list(ones) == list(others) == ["a", "b", "a:out.grad"]


def test_modules_called_one_by_one_are_of_one_pass_until_one_is_called_again() -> None:
    """Calls of parts of a model count as one pass as long as none of them is repeated."""
    model = Branching()
    with kedge.hook(model, "a, b", kedge.record()) as acts:
        model.b(model.a(torch.ones(2, 3)))
        assert list(acts) == ["a", "b"]
        model.a(torch.zeros(2, 3))
        assert list(acts) == ["a"]
