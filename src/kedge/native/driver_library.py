"""What a driver's library does, whichever it is: it loads the kernel of `c/statistics.cu`, and has the functions that launch it.

There are two, `kedge.native.cuda` and `kedge.native.hip`, with the same functions under other
names. Python looks the functions up and loads the kernel; C calls them for each value.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

KERNELS = (
    "statistics_float32",
    "statistics_float64",
    "statistics_float16",
    "statistics_bfloat16",
)
"""The kernels, one for each format, in the order of `Kind` in C."""


class OpenedDevice(NamedTuple):
    """A device with the kernels loaded.

    Attributes:
        place: Where the driver's calls have to go for it: the address of its context under CUDA,
            its number under HIP.
        tick: The seconds between two readings of its clock.
        kernels: The addresses of the kernels.
    """

    place: int
    tick: float
    kernels: tuple[int, ...]


class DriverFailed(Exception):
    """The driver cannot launch the kernel; the text says why."""


class DriverLibrary(ABC):
    """A driver's library.

    Args:
        library: The library.
        number: The number that DLPack has for its kind of devices.
        stream_function: The address of PyTorch's function that tells the current stream of a
            device; 0 if there is none.
    """

    launch: ClassVar[str]
    """Launches a kernel; the names that follow are those of its other functions."""
    fill_bytes: ClassVar[str]
    current_place: ClassVar[str]
    go_to: ClassVar[str]
    capturing: ClassVar[str]
    load: ClassVar[str]
    find_kernel: ClassVar[str]
    error_text: ClassVar[str]

    def __init__(self, library: ctypes.CDLL, number: int, stream_function: int) -> None:
        self.number = number
        self.stream_function = stream_function
        self._library = library
        self._opened: dict[int, OpenedDevice] = {}

    @abstractmethod
    def place(self, index: int) -> int:
        """Return where calls have to go for a device that PyTorch uses."""

    @abstractmethod
    def tick(self, index: int) -> float:
        """Return the seconds between two readings of a device's clock."""

    @abstractmethod
    def image(self, index: int) -> bytes:
        """Return the kernels in a form that the driver loads on a device."""

    def addresses(self) -> list[int]:
        """Return the addresses of the functions that C calls for each value, in its order.

        Raises:
            AttributeError: The library lacks one.
        """
        names = (self.launch, self.fill_bytes, self.current_place, self.go_to, self.capturing)
        found = [getattr(self._library, name) for name in names]
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]

    def open(self, index: int) -> OpenedDevice:
        """Load the kernels on a device that PyTorch uses, unless this process has them there.

        Raises:
            DriverFailed: The driver cannot.
        """
        known = self._opened.get(index)
        if known is not None:
            return known
        place, tick, image = self.place(index), self.tick(index), self.image(index)
        before, module = ctypes.c_ssize_t(), ctypes.c_void_p()
        self.call(self.current_place, ctypes.byref(before))
        self.call(self.go_to, ctypes.c_ssize_t(place))
        try:
            self.call(self.load, ctypes.byref(module), image)
            kernels = tuple(self._kernel(module, name) for name in KERNELS)
        finally:
            self.call(self.go_to, before)
        opened = OpenedDevice(place, tick, kernels)
        self._opened[index] = opened
        return opened

    def _kernel(self, module: ctypes.c_void_p, name: str) -> int:
        kernel = ctypes.c_void_p()
        self.call(self.find_kernel, ctypes.byref(kernel), module, name.encode())
        return kernel.value or 0

    def call(self, name: str, *arguments: object) -> None:
        """Call one of the library's functions.

        Raises:
            DriverFailed: There is none of this name, or it returned an error.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverFailed(f"the driver has no {name}")
        function.restype = ctypes.c_int
        result = function(*arguments)
        if result:
            raise DriverFailed(f"{name} failed: {self._error(result)}")

    def _error(self, result: int) -> str:
        text = ctypes.c_char_p()
        named = getattr(self._library, self.error_text, None)
        if named is None or named(ctypes.c_int(result), ctypes.byref(text)) or not text.value:
            return f"error {result}"
        return f"{text.value.decode()} (error {result})"
