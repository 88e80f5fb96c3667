"""The driver of CUDA, which compiles the kernel from PTX for its card.

The PTX is shipped (`python -m tests.native.kernel` makes it); the driver compiles it when it is
first needed, in about a second, and keeps the result on disk. So neither CUDA's compiler nor
Triton is needed. A driver from CUDA 12 on takes it.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import sys

from kedge.native.driver_library import DriverFailed, DriverLibrary

NUMBER = 2
"""The number of CUDA devices in DLPack."""
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class Cuda(DriverLibrary):
    """CUDA's driver."""

    launch = "cuLaunchKernel"
    fill_bytes = "cuMemsetD8Async"
    current_place = "cuCtxGetCurrent"
    go_to = "cuCtxSetCurrent"
    capturing = "cuStreamIsCapturing"
    load = "cuModuleLoadData"
    find_kernel = "cuModuleGetFunction"
    error_text = "cuGetErrorString"

    def place(self, index: int) -> int:
        """Return the context that PyTorch uses a device by."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def tick(self, index: int) -> float:  # noqa: ARG002 - HIP's differ
        """Return a nanosecond, on every card."""
        return 1e-9

    def image(self, index: int) -> bytes:  # noqa: ARG002 - HIP's differ
        """Return the PTX, for every card."""
        return ptx() + b"\0"


def ptx() -> bytes:
    """Return the kernel as it is shipped."""
    return importlib.resources.files("kedge.native").joinpath("statistics.ptx").read_bytes()


def find(stream_function: int) -> Cuda:
    """Return CUDA's driver.

    Raises:
        DriverFailed: There is none.
    """
    try:
        return Cuda(ctypes.CDLL(_LIBRARY), NUMBER, stream_function)
    except OSError as missing:
        raise DriverFailed(f"{_LIBRARY} cannot be loaded ({missing})") from missing
