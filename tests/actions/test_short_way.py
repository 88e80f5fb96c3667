"""The short way of a value: from PyTorch's call of a hook to the measurement, by a call of C."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.actions.measure.meter import Meter
from kedge.sites.site import Site
from kedge.store.rows import FULL, LIGHT
from tests.native.ways import COMPILED

pytestmark = COMPILED
MODULES = 200
KEDGE = str(Path(kedge.__file__).parent)


class Halves(nn.Module):
    """Its outputs are no views, and each needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def python_calls(kind: str) -> Counter[str]:
    """Count Kedge's Python functions that run in one step, with a site in each of `MODULES` modules."""
    model = nn.Sequential(*(Halves() for _ in range(MODULES)))
    x = torch.ones(3, 4, requires_grad=True)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(KEDGE):
            calls[frame.f_code.co_name] += 1

    with kedge.hook(model, f"*:{kind}", kedge.measure(keep=2)) as stats:
        for _ in range(3):
            model(x).sum().backward()
        output = model(x).sum()
        sys.setprofile(count)
        try:
            if kind.endswith(".grad"):
                output.backward()
            else:
                model(x)
        finally:
            sys.setprofile(None)
        assert stats["7"].count == 12
    return calls


@pytest.mark.parametrize("kind", ["out", "in", "out.grad", "in.grad"])
def test_a_value_takes_four_python_calls(kind: str) -> None:
    """Functions that a step calls less often than it has values belong to the step."""
    calls = python_calls(kind)
    for_each = sum(times // MODULES for times in calls.values())
    assert for_each == 4, calls.most_common(12)


def test_the_measurements_are_those_of_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column of every step, whichever way the values went."""

    def run(*, short: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5), nn.Sigmoid()
        )
        meter = kedge.measure(keep=None)
        if not short:
            meter._values.host.open_step = lambda *_: None
        with kedge.hook(model, "**:out, **:in, **:out.grad, **:in.grad", meter):
            for _ in range(4):
                model(torch.randn(2, 1, 8, 8, requires_grad=True)).sum().backward()
        assert (meter._values.host.measured > 0) is short
        found = []
        for site in meter.sites.seats:
            found.extend(map(repr, meter.records(str(site))))
        return found

    assert run(short=True) == run(short=False)


def test_a_level_is_in_force_from_the_next_value_on() -> None:
    """Neither gradients in a light step nor muted outputs are measured, also where the short way was open."""
    meter = Meter(keep=None)
    out = meter.bind_value(Site("a", "out"))
    grad = meter.bind_value(Site("a", "out.grad"))
    assert out is not None
    assert grad is not None

    def measure_both() -> None:
        out(torch.ones(2), 0)
        grad(torch.ones(2), 0)

    for _ in range(3):
        measure_both()
    meter.level = LIGHT
    measure_both()
    meter.level = FULL
    meter.muted = True
    measure_both()
    meter.muted = False
    measure_both()
    meter.level = 0
    measure_both()
    assert meter.records("a")[-1].calls == 3 + 1 + 0 + 1
    assert meter.records("a:out.grad")[-1].calls == 3 + 0 + 1 + 1


def test_steps_end_while_threads_measure() -> None:
    """Each value is counted once, in some step, however the threads take turns."""
    meter = Meter(keep=None)
    sites = [meter.bind_value(Site(f"{i}", "out")) for i in range(4)]
    turns = 400
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def measure(measured: Any) -> None:
            for i in range(turns):
                measured(torch.full((5,), 2.0), i // 40)

        def flush() -> None:
            for _ in range(turns):
                meter.flush()

        work = [threading.Thread(target=measure, args=(each,)) for each in sites]
        work.append(threading.Thread(target=flush))
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for i in range(4):
        records = meter.records(f"{i}")
        assert sum(r.calls for r in records) == turns
        assert sum(r.sum for r in records) == 10.0 * turns


def test_a_new_saturation_takes_a_site_off_the_short_way() -> None:
    """Its drawn numbers come from the outputs that decide."""
    meter = Meter(keep=None)
    meter.draws = True
    out = meter.bind_value(Site("a", "out"))
    assert out is not None
    for _ in range(3):
        out(torch.eye(4), 0)
    went = meter._values.host.measured
    assert went > 0
    meter.sites.saturates("a", "softmax", [-1])
    for _ in range(3):
        out(torch.eye(4), 0)
    assert meter._values.host.measured == went


def test_nothing_is_kept_alive() -> None:
    """A meter and its values go with the last reference, functions of C included."""
    meter = Meter(keep=None)
    out = meter.bind_value(Site("a", "out"))
    assert out is not None
    value = torch.ones(3)
    for _ in range(3):
        out(value, 0)
    gone = weakref.ref(meter), weakref.ref(value)
    del meter, out, value
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
