"""Graphs of the device: captured work is left alone, and compiled code keeps its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import kedge
from kedge.stderr import reports_to
from kedge.torch_internals import accelerators, device_graphs, operators
from tests.watch.watched import net


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[[bool], None], list[str]]]:
    """Return functions that begin and end a capture as the device would, and the list of messages."""
    state, said = [False], []
    monkeypatch.setattr(accelerators, "is_capturing", lambda: state[0])
    monkeypatch.setattr(device_graphs, "_said", [])
    with reports_to(said.append):
        yield lambda on: state.__setitem__(0, on), said


class Operations(TorchDispatchMode):
    """Lists the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(model: nn.Module, x: torch.Tensor) -> list[str]:
    """List the operations of a forward and a backward."""
    with Operations() as mode:
        model(x).sum().backward()
    return mode.names


def test_a_capture_has_the_same_operations_with_and_without_measuring(capture: Any) -> None:
    """Nothing is computed, copied or allocated for measuring, and one sentence says so."""
    turn, said = capture
    model, x = net().to("meta"), torch.empty(3, 4, device="meta")
    operations(model, x)
    bare = operations(model, x)
    turn(True)
    with kedge.hook(model, "**, **:out.grad", kedge.measure()) as stats:
        assert operations(model, x) == bare
        assert operations(model, x) == bare
        turn(False)
        assert len(stats.actions[0].sites.seats) == 0
        model(x)
        assert len(stats.actions[0].sites.seats) > 0
    assert said == [device_graphs.LEFT_ALONE]


def test_inductor_divides_a_graph_of_the_device_at_operators_of_kedge() -> None:
    """Simulated: a tensor without data stands for one on CUDA, and Inductor's own check is asked about an operator."""
    from torch._inductor import config, ir
    from torch._inductor.scheduler import Scheduler

    kernel = object.__new__(ir.FallbackKernel)
    object.__setattr__(kernel, "op_overload", torch.ops.kedge.value.default)
    node: Any = SimpleNamespace(node=kernel)
    before = list(config.custom_should_partition_ops)
    with FakeTensorMode():
        torch.ops.kedge.value(torch.empty(3), 1, "")
        assert config.custom_should_partition_ops == before
        torch.ops.kedge.value(torch.empty(3, device="cuda"), 1, "")
    try:
        assert Scheduler.should_partition(None, node) == "custom partition op: kedge::value.default"  # type: ignore[arg-type]
    finally:
        operators.leave_graphs_whole()
    assert config.custom_should_partition_ops == before


def test_the_setting_of_inductor_goes_with_the_last_hook() -> None:
    """Names that the program has set stay."""
    from torch._inductor import config

    with config.patch(custom_should_partition_ops=["mine::op"]):
        with kedge.hook((model := net()), "**", lambda v: None):
            model(torch.randn(3, 4))
            operators.divide_graphs_at(["kedge::value"])
            assert config.custom_should_partition_ops == ["mine::op", "kedge::value"]
        assert config.custom_should_partition_ops == ["mine::op"]
