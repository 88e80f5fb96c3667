"""Threads and replicas: each has its own calls and passes, labelled."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import SeveralRecorded
from tests.threaded import in_threads, replicas_of


class Net(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).tanh())


@pytest.fixture
def switching() -> Iterator[None]:
    """Switch between threads as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_two_threads_on_one_model_have_their_own_calls_and_values() -> None:
    """Two threads inside the same forward at the same time count their own calls and label their records."""
    model, barrier = Net(), threading.Barrier(2)
    inputs = {f"worker-{i}": torch.full((2, 3), float(i)) for i in range(2)}

    def meet(value: Tensor) -> None:
        barrier.wait(10)

    with kedge.session() as s:
        s.hook(model, "fc", meet)
        acts = s.hook(model, "fc", kedge.record())
        grads = s.hook(model, "fc:out.grad", kedge.record(keep=None))
        in_threads(*(lambda x=x: model(x).sum().backward() for x in inputs.values()))

    records = acts.records("fc")
    for name, x in inputs.items():
        mine = [r for r in records if r.event.replica == name]
        assert [r.event.call for r in mine] == [0, 1]
        assert torch.equal(mine[0].value, model.fc(x))
        assert torch.equal(mine[1].value, model.fc(model.fc(x).tanh()))
        theirs = [r.event for r in grads.records("fc") if r.event.replica == name]
        assert sorted(e.call for e in theirs) == [0, 1]
        assert {e.pass_ for e in theirs} == {mine[0].event.pass_}
    assert {r.event.pass_ for r in records} == {0, 1}


def test_reading_what_two_threads_recorded_names_them() -> None:
    """One name for the values of several threads is an error that names passes and threads, and says what to call."""
    model = Net()
    with kedge.hook(model, ":out", kedge.record()) as acts:
        in_threads(*(lambda: model(torch.ones(2, 3)) for _ in range(2)))
    with pytest.raises(SeveralRecorded) as caught:
        acts[":out"]

    assert str(caught.value) == (
        '":out" matches 2 recorded values, of passes [0, 1] in worker-0, worker-1; '
        '.records(":out") returns them all with their events'
    )
    assert acts.names() == [":out"]
    for read in (dict, lambda a: a.items(), lambda a: a["*, :out"]):
        with pytest.raises(SeveralRecorded, match="in worker-0, worker-1"):
            read(acts)
    assert sorted(record.event.replica for record in acts.records(":out")) == [
        "worker-0",
        "worker-1",
    ]


@pytest.mark.usefixtures("switching")
def test_many_threads_record_at_once_without_a_loss() -> None:
    """Nothing is lost, mixed up or broken when threads record hundreds of passes at the same site."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with kedge.session() as s:
        acts = s.hook(model, "**", kedge.record(keep=None))
        last = s.hook(model, "**", kedge.record(keep=2))

        def work(n: int) -> None:
            for i in range(100):
                model(torch.tensor([float(n), float(i)]))

        in_threads(*(lambda n=n: work(n) for n in range(6)))
        assert s.ledger()["0"].fired == 600

    for site in ("0", "1", ":out"):
        by_thread: dict[str, list[list[float]]] = {}
        for r in acts.records(site):
            assert r.event.call == 0
            by_thread.setdefault(r.event.replica, []).append(r.value.tolist())
        assert by_thread == {f"worker-{n}": [[n, i] for i in range(100)] for n in range(6)}
        assert len(last.records(site)) == 12


def test_sessions_of_two_threads_do_not_meet() -> None:
    """Each thread may open its own session on the same model; each sees both threads' calls only while it lasts."""
    model, barrier = Net(), threading.Barrier(2)
    seen: dict[int, set[str]] = {0: set(), 1: set()}

    def work(n: int) -> None:
        with kedge.session() as s:
            s.hook(model, "fc", lambda v, event: seen[n].add(event.replica))
            barrier.wait(10)
            model(torch.ones(2, 3))
            barrier.wait(10)

    in_threads(lambda: work(0), lambda: work(1))

    assert seen == {0: {"worker-0", "worker-1"}, 1: {"worker-0", "worker-1"}}
    assert not model.fc._forward_hooks


def test_replicas_record_under_their_thread_and_gradients_reach_the_model() -> None:
    """Replicas of a hooked model, run in threads as DataParallel does, record each their part; parameter gradients sum up."""
    model, x = Net(), torch.randn(4, 3)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    with kedge.session() as s:
        acts = s.hook(model, "fc", kedge.record())
        grads = s.hook(model, "fc:out.grad", kedge.record())
        params = s.hook(model, "fc.weight:param.grad", kedge.record())
        s.hook(model, "fc#1", kedge.scale(2))
        outs: list[Tensor] = [x, x]
        one, two = replicas_of(model, 2)
        in_threads(lambda: outs.__setitem__(0, one(x[:2])), lambda: outs.__setitem__(1, two(x[2:])))
        torch.cat(outs).sum().backward()

    expected = twin.fc(twin.fc(x).tanh()) * 2
    expected.sum().backward()
    assert torch.allclose(torch.cat(outs), expected)
    assert torch.allclose(params["fc.weight"], twin.fc.weight.grad)
    assert torch.allclose(model.fc.weight.grad, twin.fc.weight.grad)
    records = acts.records("fc")
    assert len({r.event.replica for r in records}) == 2
    assert "" not in {r.event.replica for r in records}
    for replica in {r.event.replica for r in records}:
        assert [r.event.call for r in records if r.event.replica == replica] == [0, 1]
    assert len(grads.records("fc")) == 4
    assert {r.event.replica for r in grads.records("fc")} == {r.event.replica for r in records}


def test_a_backward_in_another_thread_is_of_the_forwards_replica() -> None:
    """A gradient bears the thread, pass and call of the forward it belongs to, wherever the backward runs."""
    model = Net()
    with kedge.session() as s:
        grads = s.hook(model, "fc:out.grad", kedge.record())
        loss = model(torch.ones(2, 3)).sum()
        in_threads(loss.backward)

    assert sorted((r.event.call, r.event.pass_, r.event.replica) for r in grads.records("fc")) == [
        (0, 0, ""),
        (1, 0, ""),
    ]
