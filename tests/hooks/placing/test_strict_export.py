"""`torch.export.export(strict=True)` under Kedge's global module hooks."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from kedge.hooks.placing.module_calls import CallTracker
from tests.watch.watched import watch


def export(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Export a model strictly, and run the exported program."""
    return torch.export.export(model, (x,), strict=True).module()(x)


@pytest.mark.usefixtures("compiled")
def test_a_watched_program_can_export_strictly() -> None:
    """Before and after a training step; what is called afterwards is still found."""
    model, other, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2), torch.randn(2, 4)
    expected = model(x)

    def program() -> None:
        assert torch.equal(export(model, x), expected)
        model(x)
        assert torch.equal(export(model, x), expected)
        gc.collect()  # PyTorch's module may be in a cycle
        other(x)

    log = watch(program, every=1)
    assert {"Linear:out", "0:out"} <= set(log.texts("out"))


@pytest.mark.usefixtures("compiled")
def test_a_tracker_of_all_calls_spares_a_strict_export() -> None:
    """Its hooks are back afterwards, also after an export that failed, and gone in the end."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    called: list[nn.Module] = []
    tracker: CallTracker[None, nn.Module] = CallTracker(
        lambda calls, subject, module, given: called.append(module) or module,
        lambda calls, note, output: None,
    )
    tracker.follow_all(None)
    try:
        export(model, x)
        logging.disable(logging.CRITICAL)  # what pytest keeps of PyTorch's log holds the error
        with pytest.raises(Exception, match="dim"):
            export(model, torch.randn(2, 5))
        gc.collect()
        called.clear()
        model(x)
    finally:
        logging.disable(logging.NOTSET)
        tracker.close()
    assert called == [model, *model]
    assert not modules._global_forward_hooks
    assert not modules._global_module_registration_hooks


@pytest.mark.usefixtures("compiled")
def test_the_end_of_a_watch_within_a_failed_export_leaves_nothing() -> None:
    """The error holds PyTorch's module, so that the hooks would come back only after the end."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(Exception, match=".") as failed:
        watch(lambda: export(model, torch.randn(2, 5)), every=1)
    del failed
    assert not modules._global_forward_pre_hooks
