"""The driver of CUDA: loads the kernel of `c/statistics.cu`, and gives C the functions to launch it with.

The kernel comes as PTX (`python -m tests.native.kernel` makes it), which the driver compiles for
its card when it is first needed, in about a second, and keeps on disk. So neither CUDA's
compiler nor Triton is needed, and nothing is linked. See Note [The driver's library].

# Note [The driver's library]
A driver from CUDA 12 on loads the kernel. With an older one, without PyTorch's function for the
current stream, or if anything fails, `why_not` returns the reason, and values are measured by
Triton's kernel or PyTorch's reductions.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import sys
from typing import NamedTuple

import torch

from kedge import native

KERNELS = (
    "statistics_float32",
    "statistics_float64",
    "statistics_float16",
    "statistics_bfloat16",
)
"""The kernels, one for each format, in the order of `Kind` in C."""

_NUMBERS = {"cuda": 2}
"""The kinds of devices whose driver is known, with their numbers in DLPack."""

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_FUNCTIONS = (
    "cuLaunchKernel",
    "cuMemsetD8Async",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamIsCapturing",
)
"""What C calls for each value, in the order in which it takes their addresses."""


class OpenedDevice(NamedTuple):
    """A device with the kernels loaded.

    Attributes:
        context: The address of its context.
        kernels: The addresses of the kernels.
    """

    context: int
    kernels: tuple[int, ...]


class DriverFailed(Exception):
    """The driver cannot launch the kernel; the text says why."""


class Driver:
    """A driver's library.

    Args:
        library: The library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._opened: dict[int, OpenedDevice] = {}

    def addresses(self) -> list[int]:
        """Return the addresses of the functions that C calls.

        Raises:
            AttributeError: The library lacks one.
        """
        found = [getattr(self._library, name) for name in _FUNCTIONS]
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]

    def open(self, index: int) -> OpenedDevice:
        """Load the kernels on a device that PyTorch uses, unless this process has them there.

        Raises:
            DriverFailed: The driver cannot.
        """
        known = self._opened.get(index)
        if known is not None:
            return known
        device = ctypes.c_int()
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call("cuModuleLoadData", ctypes.byref(module), ptx() + b"\0")
            kernels = tuple(self._kernel(module, name) for name in KERNELS)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        opened = OpenedDevice(context.value or 0, kernels)
        self._opened[index] = opened
        return opened

    def _kernel(self, module: ctypes.c_void_p, name: str) -> int:
        kernel = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
        return kernel.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverFailed(f"the driver has no {name}")
        function.restype = ctypes.c_int
        result = function(*arguments)
        if result:
            raise DriverFailed(f"{name} failed: {self._error(result)}")

    def _error(self, result: int) -> str:
        text = ctypes.c_char_p()
        named = getattr(self._library, "cuGetErrorString", None)
        if named is None or named(ctypes.c_int(result), ctypes.byref(text)) or not text.value:
            return f"error {result}"
        return f"{text.value.decode()} (error {result})"


def ptx() -> bytes:
    """Return the kernel as it is shipped."""
    return importlib.resources.files("kedge.native").joinpath("statistics.ptx").read_bytes()


def find() -> Driver:
    """Return the driver of the CUDA devices that this PyTorch uses.

    Raises:
        DriverFailed: There is none.
    """
    if torch.version.cuda is None:
        raise DriverFailed("this PyTorch is not built for CUDA")
    try:
        return Driver(ctypes.CDLL(_LIBRARY))
    except OSError as missing:
        raise DriverFailed(f"{_LIBRARY} cannot be loaded ({missing})") from missing


# -- what this process uses ---------------------------------------------------------------------

_connected: dict[str, Driver] = {}
_failed: dict[str, str] = {}


def connect(kind: str) -> Driver | None:
    """Return the driver for a kind of device, to which C is connected; None without one.

    It is looked up once, when the first value on such a device comes.
    """
    if kind in _connected:
        return _connected[kind]
    number = _NUMBERS.get(kind)
    if number is None or kind in _failed or native.connect_driver is None:
        return None
    try:
        return connect_to(kind, find(), number, native.stream_function())
    except (DriverFailed, AttributeError) as error:
        give_up(kind, error)
        return None


def connect_to(kind: str, driver: Driver, number: int, stream_function: int) -> Driver:
    """Connect C to a driver.

    Args:
        kind: The kind of its devices, as PyTorch calls it.
        driver: The driver.
        number: The number of this kind in DLPack.
        stream_function: The address of the function that tells the current stream of a device; 0
            if there is none.

    Raises:
        DriverFailed: Something that C needs is missing.
    """
    if not stream_function:
        raise DriverFailed("this PyTorch does not tell C its current stream")
    native.connect_driver(number, *driver.addresses(), stream_function)
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
