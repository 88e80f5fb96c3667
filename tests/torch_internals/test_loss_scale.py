"""The scale of a GradScaler, as far as there is one."""

from __future__ import annotations

import torch

from kedge.torch_internals.loss_scale import scale_of


def test_a_scaler_that_is_switched_off_has_no_scale() -> None:
    """Nor has one before its first loss."""
    assert scale_of(torch.amp.GradScaler("cpu", enabled=False)) is None

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert scale_of(scaler) is None
    scaler.scale(torch.ones(1))
    scale = scale_of(scaler)
    assert scale is not None
    assert scale.item() == 8.0
