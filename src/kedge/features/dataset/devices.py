"""Whether this machine can compute where it is asked to, said before there is any batch."""

from __future__ import annotations

from typing import Any

import torch

from kedge.errors import ExtractionFailed


def usable(device: Any) -> torch.device:
    """Return a device on which something was just computed.

    Args:
        device: Its name, such as "cuda:1", or a `torch.device`.

    Raises:
        ExtractionFailed: There is no such device, or nothing can be computed there; PyTorch's reason is in it.
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).add_(1).cpu()  # where there is no driver, making a device is no error yet
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ExtractionFailed(
            f"device={str(device)!r} cannot be used: {reason}; take one that this machine has: {', '.join(_there())}"
        ) from error
    return found


def _there() -> list[str]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ["cpu"]
    return ["cpu", *(f"{found.type}:{number}" for number in range(torch.accelerator.device_count()))]
