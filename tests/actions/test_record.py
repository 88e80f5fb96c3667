"""`record` alone: what it keeps, how it is read, and when it copies."""

from __future__ import annotations

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


def event(site: Site, *, call: int = 0, pass_: int = 0, backward: int = -1, replica: str = "") -> Event:
    """Make an event as the firing loop does."""
    return Event(site, call, pass_, backward, 0, 0, 0, replica, recompute=False)


def feed(recorder: Recorder, site: Site, value: Tensor, **at: Any) -> None:
    """Let a recorder see one value."""
    assert recorder.bind(site)(value, event(site, **at)) is None


def why(name: str) -> str:
    """Be the ledger's explanation."""
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
    "change", [lambda x: x.zero_(), lambda x: x[0].fill_(3), lambda x: x.view(-1).add_(1), lambda x: x.detach().mul_(2)]
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
            feed(recorder, Site("a", "out.grad"), torch.full((1,), float(i)), call=call, pass_=0, backward=i)

    assert [r.event.pass_ for r in recorder.records("a")] == [p for p in passes for _ in range(2)]
    assert [r.event.backward for r in recorder.records("a:out.grad")] == [p for p in passes for _ in range(2)]


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
        SeveralRecorded, match=re.escape('"a" matches 2 recorded values; read one of "a#0:out[x]", "a#0:out[y.0]"')
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
    with pytest.raises(ValueError, match=r"^record\(keep=0\) would keep nothing; use 1 or more, or None for all$"):
        kedge.record(keep=0)


def test_a_pattern_is_no_name() -> None:
    """Records are read one by one."""
    with pytest.raises(
        SelectorError, match='^"a\\*" may match several sites; records are read by the name of one, such as'
    ):
        kedge.record().read("a*", why)


def test_a_recorder_prints_as_it_is_written() -> None:
    """Messages and timelines show the call that made the action, with what differs from the default."""
    assert repr(kedge.record()) == "record()"
    assert repr(kedge.record(copy=True)) == "record(copy=True)"
    assert repr(kedge.record(keep=None)) == "record(keep=None)"
    assert repr(kedge.record(copy=True, keep=3, recomputes=True)) == "record(copy=True, keep=3, recomputes=True)"


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
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3, requires_grad=True)
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
