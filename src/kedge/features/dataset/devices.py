"""A check, before the first batch, that this machine can compute on a device."""

from __future__ import annotations

from typing import Any

import torch

from kedge.errors import ExtractionFailed


def usable(device: Any) -> torch.device:
    """Return a device, after a test computation on it.

    Args:
        device: The device's name, such as "cuda:1", or a `torch.device`.

    Raises:
        ExtractionFailed: The device does not exist or cannot compute; the message contains
            PyTorch's reason.
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).add_(
            1
        ).cpu()  # without a driver, creating a device is not an error yet
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ExtractionFailed(
            f"device={str(device)!r} cannot be used: {reason}; use one of this machine: {', '.join(_there())}"
        ) from error
    return found


def _there() -> list[str]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ["cpu"]
    return [
        "cpu",
        *(f"{found.type}:{number}" for number in range(torch.accelerator.device_count())),
    ]
