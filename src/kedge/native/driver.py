"""The driver by which this process launches the kernel on a kind of devices: CUDA's, or HIP's on ROCm.

It is looked up when the first value on such a device comes, and C is given its functions. Nothing
is linked with it, and nothing of it is needed to build Kedge. Without it, without PyTorch's
function for the current stream, or if anything fails, `why_not` returns the reason, and values are
measured by Triton's kernel or PyTorch's reductions.
"""

from __future__ import annotations

import torch

from kedge import native
from kedge.native import cuda, hip
from kedge.native.driver_library import DriverFailed, DriverLibrary, OpenedDevice

_KINDS = frozenset({"cuda"})
"""The kinds of devices whose drivers are known; PyTorch calls ROCm's "cuda", too."""

_connected: dict[str, DriverLibrary] = {}
_failed: dict[str, str] = {}


def find() -> DriverLibrary:
    """Return the driver of the devices that this PyTorch calls "cuda".

    Raises:
        DriverFailed: There is none.
    """
    if torch.version.hip is not None:
        return hip.find(native.stream_function())
    if torch.version.cuda is not None:
        return cuda.find(native.stream_function())
    raise DriverFailed("this PyTorch is built for neither CUDA nor ROCm")


def connect(kind: str) -> DriverLibrary | None:
    """Return the driver for a kind of device, to which C is connected; None without one.

    It is looked up once, when the first value on such a device comes.
    """
    if kind in _connected:
        return _connected[kind]
    if kind not in _KINDS or kind in _failed or native.connect_driver is None:
        return None
    try:
        return connect_to(kind, find())
    except (DriverFailed, AttributeError) as error:
        give_up(kind, error)
        return None


def connect_to(kind: str, driver: DriverLibrary) -> DriverLibrary:
    """Connect C to the driver of a kind of devices, as PyTorch calls it.

    Raises:
        DriverFailed: PyTorch's function for the current stream is missing.
        AttributeError: The driver lacks a function that C calls.
    """
    if not driver.stream_function:
        raise DriverFailed("this PyTorch does not tell C its current stream")
    native.connect_driver(driver.number, *driver.addresses(), driver.stream_function)
    _connected[kind] = driver
    return driver


def open_device(kind: str, index: int) -> OpenedDevice | None:
    """Return a device with the kernels loaded; None without a driver that loads them."""
    found = connect(kind)
    if found is None:
        return None
    try:
        return found.open(index)
    except DriverFailed as error:
        give_up(kind, error)
        return None


def give_up(kind: str, error: Exception) -> None:
    """Use no driver for a kind of device from now on, and keep the reason."""
    _failed[kind] = str(error)
    _connected.pop(kind, None)


def why_not() -> dict[str, str]:
    """Return the reasons why no driver is used, by kind of device; empty unless one was tried."""
    return dict(_failed)
