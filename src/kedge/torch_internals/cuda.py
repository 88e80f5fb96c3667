"""What only CUDA and ROCm have: the one file that names ``torch.cuda``, as PyTorch calls both."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the current one


def can_register() -> bool:
    """Whether pages of the host's memory can be locked where they are.

    On other devices PyTorch allocates them locked.
    """
    return bool(torch.cuda.is_initialized())


def register(address: int, nbytes: int) -> str | None:
    """Lock pages of host memory, so that copies run asynchronously; returns the error text, if any.

    The driver locks exactly these bytes, not rounded up to a power of two.
    """
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(error) == 0:
        return None
    # The runtime stores its last error, and PyTorch would raise it at the next kernel launch: this
    # one.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return str(runtime.cudaGetErrorString(error))


def unregister(address: int) -> None:
    """Unlock the pages."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def architecture(index: int) -> str:
    """Return the architecture of a ROCm device, such as "gfx942:sramecc+:xnack-"."""
    return str(torch.cuda.get_device_properties(index).gcnArchName)
