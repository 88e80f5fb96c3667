"""Operations and other function modes, interrupts, and threads: the mode comes off whatever happens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

import kedge
from kedge.testing import assert_unhooked


class Act(nn.Module):
    """A linear layer and a ReLU, and something done between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.between: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.between(self.fc(x) + 1)) * 2


class Net(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Act(), Act()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)).sum()


def depth() -> int:
    """How many modes stand on this thread's stack."""
    return int(torch._C._len_torch_function_stack())


def ops(session: Any) -> list[str]:
    """The operations that fired, without indices."""
    return [event.site.op[0] for event, _ in session.timeline()]


def test_the_mode_is_on_in_the_modules_own_forward_alone() -> None:
    """Before, after, in children and in other modules the stack is as the program has it."""
    net = Net()
    depths: dict[str, int] = {}
    net.one.between = lambda x: (depths.setdefault("own", depth()), x)[1]
    net.two.between = lambda x: (depths.setdefault("other", depth()), x)[1]
    own = net.one.fc.register_forward_pre_hook(
        lambda *_: depths.setdefault("child", depth()) * 0 or None
    )
    with kedge.session() as s:
        s.hook(net, "one/relu", kedge.record())
        handle = net.one.fc.register_forward_pre_hook(
            lambda *_: depths.setdefault("in child", depth()) * 0 or None
        )
        net(torch.ones(2, 3))
        depths["after"] = depth()
        handle.remove()
    own.remove()
    assert depths == {"child": 1, "in child": 0, "own": 1, "other": 0, "after": 0}


def test_the_modes_of_two_sessions_are_off_in_children() -> None:
    """However many sessions look at a forward, none of their modes is on in a child's."""
    net = Net()
    depths: list[int] = []
    with kedge.session() as a, kedge.session() as b:
        a.hook(net, "one/relu", kedge.record())
        b.hook(net, "one/*:out", kedge.record())
        handle = net.one.fc.register_forward_hook(lambda *_: depths.append(depth()))
        inner = net.one.fc.forward
        net.one.fc.forward = lambda x: (depths.append(depth()), inner(x))[1]  # type: ignore[method-assign]
        net(torch.ones(2, 3))
        handle.remove()
        assert ops(a) == ["relu"]
        assert ops(b) == ["add", "relu", "mul"]
    assert depths[0] == 0
    assert depth() == 0


def test_a_device_mode_inside_the_forward_survives() -> None:
    """`torch.device` entered in a forward, or around it, does what it does without Kedge, and so do both."""
    net = Net()
    made: list[torch.device] = []

    def between(x: Tensor) -> Tensor:
        with torch.device("meta"):
            made.append(torch.zeros(1).device)
        made.append(torch.zeros(1).device)
        return x

    net.one.between = between
    with kedge.session() as s:
        s.hook(net, "one/*:out", lambda v: None)
        net(torch.ones(2, 3))
        assert ops(s) == ["add", "zeros", "zeros", "relu", "mul"]
        with torch.device("cpu"):
            net.two.between = lambda x: x + torch.ones(3)
            net(torch.ones(2, 3))
    assert [d.type for d in made[:2]] == ["meta", "cpu"]
    assert depth() == 0


def test_a_default_device_set_inside_the_forward_stays() -> None:
    """A mode that the program puts on in a hooked forward and leaves on is there afterwards, and ours is not."""
    net = Net()
    net.one.between = lambda x: (torch.set_default_device("meta"), x)[1]
    try:
        with kedge.hook(net, "one/*:out", kedge.record()) as acts:
            net(torch.ones(2, 3))
        assert torch.get_default_device() == torch.device("meta")
        assert depth() == 1
        assert acts["one/relu"].shape == (2, 3)
    finally:
        torch.set_default_device(None)
    assert depth() == 0


def test_a_mode_that_a_forward_leaves_on_stays() -> None:
    """A mode above ours at the end of the module is put back after ours is taken from under it."""
    net, left = Net(), BaseTorchFunctionMode()
    net.one.between = lambda x: (left.__enter__(), x)[1]
    with kedge.session() as s:
        s.hook(net, "one/*:out, two/*:out", lambda v: None)
        net(torch.ones(2, 3))
        assert depth() == 1
        left.__exit__(None, None, None)
        assert ops(s) == ["add", "relu", "mul"] * 2
    assert depth() == 0


def test_an_exception_takes_the_mode_off() -> None:
    """After an error in a hooked forward, in a child or in an action, nothing is on the stack and the next pass is whole."""
    net, x = Net(), torch.ones(2, 3)

    def fail(*_: Any) -> None:
        raise ValueError("as planned")

    with kedge.session() as s:
        acts = s.hook(net, "one/*:out", kedge.record())
        for place in ("between", "child", "action"):
            handle: Any = None
            if place == "between":
                net.one.between = fail
            elif place == "child":
                handle = net.one.fc.register_forward_hook(fail)
            else:
                handle = s.hook(net, "one/relu", fail)
            with pytest.raises(Exception, match="as planned"):
                net(x)
            assert depth() == 0
            net.one.between = lambda x: x
            if handle is not None:
                handle.remove()
        net(x)
        assert torch.equal(acts["one/relu"], F.relu(net.one.fc(x) + 1))


@pytest.mark.parametrize("place", ["forward", "child", "operation"])
def test_an_interrupt_leaves_nothing_behind(place: str) -> None:
    """A KeyboardInterrupt, which skips the hooks behind a forward, costs nothing: the next pass and the end put all right."""
    net, x = Net(), torch.ones(2, 3)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle: Any = None
    with kedge.session() as s:
        s.hook(net, "one/*:out, two/relu:out", lambda v: None)
        if place == "forward":
            net.one.between = interrupt
        elif place == "child":
            handle = net.one.fc.register_forward_pre_hook(interrupt)
        else:
            handle = s.hook(net, "one/relu", interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(x)
        net.one.between = lambda x: x
        if handle is not None:
            handle.remove()
        fired = len(s.timeline())
        assert torch.relu(x).sum() == 6
        assert len(s.timeline()) == fired
        net(x)
        assert ops(s)[fired:] == ["add", "relu", "mul", "relu"]
        assert depth() == 0
    assert_unhooked(net)


def test_an_interrupt_that_the_forward_around_catches_ends_with_it() -> None:
    """The child's hooks do not run, so its mode goes when the forward that caught it is over."""

    class Catching(Net):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except KeyboardInterrupt:
                return x

    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    net, x = Catching(), torch.ones(2, 3)
    with kedge.session() as s:
        s.hook(net, "/sum, one/*:out", lambda v: None)
        net.one.between = interrupt
        net(x)
        assert depth() == 0
        net.one.between = lambda x: x
        fired = len(s.timeline())
        net(x)
        assert ops(s)[fired:] == ["add", "relu", "mul", "sum"]


def test_the_end_of_a_session_puts_an_interrupt_right() -> None:
    """A session that ends after an interrupt leaves no mode behind."""
    net = Net()

    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    net.one.between = interrupt
    with pytest.raises(KeyboardInterrupt), kedge.hook(net, "**/*:out", kedge.record()):
        net(torch.ones(2, 3))
    assert depth() == 0
    assert_unhooked(net)


def test_a_session_that_ends_inside_a_forward() -> None:
    """The end of a session in a hooked forward takes its mode off there, and the forward goes on."""
    net = Net()
    s = kedge.session()
    s.hook(net, "one/*:out", lambda v: None)

    def end(x: Tensor) -> Tensor:
        s.end(quiet=True)
        assert depth() == 0
        return x

    net.one.between = end
    net(torch.ones(2, 3))
    assert ops(s) == ["add"]
    assert depth() == 0


def test_threads_have_modes_of_their_own() -> None:
    """Forwards in several threads at once each see their operations, labelled with the thread, with equal bits."""
    net, together = Net(), threading.Barrier(3)
    net.one.between = lambda x: (together.wait(timeout=60), x)[1]
    expected: dict[str, Tensor] = {}
    with kedge.hook(net, "one/*:out", kedge.record()) as acts:

        def run(n: int) -> None:
            with torch.no_grad():
                net(torch.full((2, 3), float(n)))
                assert depth() == 0

        threads = [threading.Thread(target=run, args=(n,), name=f"t{n}") for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n in range(3):
        expected[f"t{n}"] = F.relu(net.one.fc(torch.full((2, 3), float(n))) + 1)
    got = {r.event.replica: r.value for r in acts.records("one/relu")}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_user_mode_sees_what_it_sees_without_kedge() -> None:
    """A program's own mode around the forward gets every operation, once."""

    class Counting(BaseTorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    net, x = Net(), torch.ones(2, 3)
    seen = []
    for sites in (None, "**/relu:out"):
        mode = Counting()
        hooked = kedge.hook(net, sites, lambda v: None) if sites else None
        with mode:
            net(x)
        if hooked is not None:
            hooked.remove()
        seen.append([name for name in mode.names if name != "__get__"])
    assert seen[0] == seen[1]
