"""Steps that are captured in a graph of the device: left alone, and said."""

from __future__ import annotations

import pytest
import torch

from kedge.stderr import reports_to
from kedge.torch_internals import accelerators, device_graphs
from kedge.watch.watcher import Watcher
from tests.watch.watched import GUARDED, MEASURED, Paced, at_levels, batch, net, watched


@at_levels(MEASURED, GUARDED)
def test_a_captured_step_is_no_step(
    levels: tuple[int, ...], paced: Paced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch goes on with the steps that run.

    Simulated: the device is made to say that it captures.
    """
    paced(*levels)
    capturing = False
    monkeypatch.setattr(accelerators, "is_capturing", lambda: capturing)
    monkeypatch.setattr(device_graphs, "_said", [])

    def program(watch: Watcher) -> None:
        nonlocal capturing
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(8):
            capturing = step in (3, 4)
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
            capturing = False

    said: list[str] = []
    with reports_to(said.append):
        log = watched(program)
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.summary.steps == 6
    assert said == [device_graphs.LEFT_ALONE]
