"""Warnings that Kedge ignores for a while."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch

import kedge
from kedge.errors import NeverFiredWarning
from kedge.frames import OWN
from kedge.hooks.placing.own_warnings import ANOMALY_WARNINGS, ignore_warnings, show_warnings


def test_warnings_that_were_printed_once_are_not_printed_again() -> None:
    """What Kedge ignores for a while is ignored, and Python still knows which of the program's warnings it has printed."""
    registry: dict[str, int] = {}

    def warn(message: str) -> None:
        warnings.warn_explicit(message, UserWarning, "prog.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("default")
        warn("once")
        ignore_warnings(ANOMALY_WARNINGS)
        warn("once")
        warn("Error detected in MulBackward0")
        show_warnings(ANOMALY_WARNINGS)
        warn("once")
        warn("Error detected in DivBackward0")
    assert [str(each.message) for each in printed] == ["once", "Error detected in DivBackward0"]


def test_kedges_filter_stays_the_first() -> None:
    """Whatever filters the program adds, and wherever, its list is as without Kedge when the watch ends."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        ignore_warnings(ANOMALY_WARNINGS)
        warnings.simplefilter("error")
        warnings.warn("Error detected in MulBackward0", stacklevel=1)
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            warnings.warn("Error detected in MulBackward0", stacklevel=1)
            warnings.warn("the program's", stacklevel=1)
        warnings.resetwarnings()
        warnings.filterwarnings("error")
        warnings.warn("Error detected in MulBackward0", stacklevel=1)
        assert [entry[0] for entry in pickle.loads(pickle.dumps(warnings.filters))] == ["error"]
        show_warnings(ANOMALY_WARNINGS)
        assert [str(each.message) for each in log] == ["the program's"]
        assert [entry[0] for entry in warnings.filters] == ["error"]
        with pytest.raises(UserWarning):
            warnings.warn("Error detected in MulBackward0", stacklevel=1)
    assert list(warnings.filters) == before


def test_own_work_is_distinguished_from_the_programs() -> None:
    """What PyTorch says of a watch's operations is nobody's; the program's warnings, and those of its own hooks, are its own."""
    work = compile(
        "import warnings\ndef work(): warnings.warn('made by a watch')",
        f"{OWN}watch/steps/x.py",
        "exec",
    )
    own: dict[str, Any] = {}
    exec(work, own)
    model = torch.nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        ignore_warnings()
        try:
            own["work"]()
            warnings.warn("the program's", stacklevel=1)
            with kedge.hook(
                model, ":out", lambda value: warnings.warn("in its hook", stacklevel=1)
            ):
                model(torch.ones(1, 2))
            with kedge.hook(model, ":out", kedge.measure()):
                pass
        finally:
            show_warnings()
    assert [str(each.message).split(":")[0][:13] for each in log[:2]] == [
        "the program's",
        "in its hook",
    ]
    assert [each.category for each in log[2:]] == [NeverFiredWarning]


def test_warnings_of_pytorch_about_the_program_are_the_programs() -> None:
    """Those that PyTorch's own Python code issues too, such as of a backward hook of the old kind or of a scheduler."""

    class Pair(torch.nn.Module):
        def forward(self, pair: list[torch.Tensor]) -> torch.Tensor:
            return pair[0] * pair[1]

    model = Pair()
    model.register_backward_hook(lambda *_: None)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 1.0)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        ignore_warnings()
        try:
            model([torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)])
            torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
        finally:
            show_warnings()
    assert [str(each.message).split("(")[0][:34] for each in log] == [
        "Using non-full backward hooks on a",
        "Detected call of `lr_scheduler.ste",
    ]
