"""The runtime of HIP, and its compiler, which compiles the kernel from source for its card.

Every ROCm build of PyTorch brings both. The runtime is the one that PyTorch has loaded, as a second
one would know nothing of its streams; the compiler, hiprtc, is in the same folder. It gets the
source of `c/statistics.cu` as it is shipped, once in a process for each architecture of its cards.
None of this has been run on a card.

# Note [Devices, not contexts]
HIP has functions named like those of CUDA's contexts. But they are deprecated, and there to pop a
context does not bring the device back that was current before it was pushed. So the device itself
is changed and changed back.

# Note [The stream that PyTorch tells]
The function by which PyTorch tells C its current stream is written for CUDA, and a build for which
it was left out tells the default stream, whichever is current. A kernel launched there would read
values before they are made. So it is asked once on another stream, and if it does not tell this
one, the runtime is not used.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kedge.native.driver_library import DriverFailed, DriverLibrary, OpenedDevice
from kedge.torch_internals import accelerators, cuda

NUMBER = 10
"""The number of ROCm devices in DLPack."""
_RUNTIME = "libamdhip64.so"
_COMPILER = "libhiprtc.so"
_MAPS = Path("/proc/self/maps")
_WALL_CLOCK_RATE = 10017  # hipDeviceAttributeWallClockRate, in kHz


class Hip(DriverLibrary):
    """HIP's runtime.

    Args:
        library: The runtime.
        number: The number that DLPack has for its kind of devices.
        stream_function: The address of PyTorch's function that tells the current stream of a
            device; 0 if there is none.
        compiler: Compiles the kernel.
        kind: The kind of its devices, as PyTorch calls it.
        architecture: Returns the architecture of a device.
    """

    launch = "hipModuleLaunchKernel"
    fill_bytes = "hipMemsetD8Async"
    current_place = "hipGetDevice"
    go_to = "hipSetDevice"
    capturing = "hipStreamIsCapturing"
    load = "hipModuleLoadData"
    find_kernel = "hipModuleGetFunction"
    error_text = "hipDrvGetErrorString"

    def __init__(
        self,
        library: ctypes.CDLL,
        number: int,
        stream_function: int,
        *,
        compiler: Compiler,
        kind: str = "cuda",
        architecture: Callable[[int], str] = cuda.architecture,
    ) -> None:
        super().__init__(library, number, stream_function)
        self._compiler = compiler
        self._kind = kind
        self._architecture = architecture

    def open(self, index: int) -> OpenedDevice:
        """Load the kernels on a device, and see whether PyTorch tells its current stream."""
        if index not in self._opened and not self._tells_streams(index):
            raise DriverFailed("this PyTorch does not tell C its current stream")
        return super().open(index)

    def place(self, index: int) -> int:
        """Return the device's number; see Note [Devices, not contexts]."""
        return index

    def tick(self, index: int) -> float:
        """Return the seconds between two ticks of the clock that all blocks of a card share."""
        kilohertz = ctypes.c_int()
        attribute = ctypes.c_int(_WALL_CLOCK_RATE)
        self.call("hipDeviceGetAttribute", ctypes.byref(kilohertz), attribute, ctypes.c_int(index))
        if kilohertz.value <= 0:
            raise DriverFailed("the driver does not tell the rate of the device's clock")
        return 1e-3 / kilohertz.value

    def image(self, index: int) -> bytes:
        """Return the kernels, compiled for a device's architecture."""
        return self._compiler.compiled(self._architecture(index))

    def _tells_streams(self, index: int) -> bool:
        """Whether PyTorch tells C the current stream; see Note [The stream that PyTorch tells]."""
        tell = ctypes.PYFUNCTYPE(
            ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
        )(self.stream_function)
        stream, told = torch.Stream(torch.device(self._kind, index)), ctypes.c_void_p()
        with accelerators.on(stream):
            failed = tell(self.number, index, ctypes.byref(told))
        return not failed and (told.value or 0) == getattr(stream, "native_handle", None)


class Compiler:
    """The compiler of HIP.

    Args:
        library: Its library, hiprtc.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._compiled: dict[str, bytes] = {}

    def compiled(self, architecture: str) -> bytes:
        """Return the kernels for an architecture; they are compiled once.

        Raises:
            DriverFailed: They do not compile.
        """
        known = self._compiled.get(architecture)
        if known is not None:
            return known
        program = ctypes.c_void_p()
        headers = (ctypes.c_char_p * 1)(source("work.h"))
        names = (ctypes.c_char_p * 1)(b"work.h")
        options = [f"--offload-arch={architecture}".encode(), b"-std=c++17"]
        self._call(
            "CreateProgram", ctypes.byref(program), source("statistics.cu"), b"statistics.cu",
            ctypes.c_int(1), headers, names,
        )  # fmt: skip
        try:
            given = (ctypes.c_char_p * len(options))(*options)
            failed = self._result("CompileProgram", program, ctypes.c_int(len(options)), given)
            if failed:
                log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise DriverFailed(f"hiprtc does not compile for {architecture}: {_first(log)}")
            code = self._bytes("Code", program)
        finally:
            self._result("DestroyProgram", ctypes.byref(program))
        self._compiled[architecture] = code
        return code

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, text)
        return text.raw

    def _call(self, name: str, *arguments: object) -> None:
        result = self._result(name, *arguments)
        if result:
            raise DriverFailed(f"hiprtc{name} failed: error {result}")

    def _result(self, name: str, *arguments: object) -> int:
        function = getattr(self._library, f"hiprtc{name}", None)
        if function is None:
            raise DriverFailed(f"hiprtc has no hiprtc{name}")
        function.restype = ctypes.c_int
        return int(function(*arguments))


def _first(log: str) -> str:
    """Return the first error in a compiler's log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return next(iter([*errors, *lines]), "it does not say why")


def source(name: str) -> bytes:
    """Return a file of the kernel's source as it is shipped."""
    return importlib.resources.files("kedge.native").joinpath("c", name).read_bytes()


def find(stream_function: int) -> Hip:
    """Return HIP's runtime with its compiler.

    Raises:
        DriverFailed: One of them is missing.
    """
    if sys.platform != "linux":
        raise DriverFailed("HIP's runtime is looked for on Linux alone")
    runtime = loaded(_RUNTIME) or Path(_RUNTIME)
    compiler = loaded(_COMPILER) or beside(runtime, _COMPILER) or Path(_COMPILER)
    libraries = []
    for path in (runtime, compiler):
        try:
            libraries.append(ctypes.CDLL(str(path)))
        except OSError as missing:
            raise DriverFailed(f"{path.name} cannot be loaded ({missing})") from missing
    return Hip(libraries[0], NUMBER, stream_function, compiler=Compiler(libraries[1]))


def loaded(name: str) -> Path | None:
    """Return the file of a library that this process has loaded, whatever version its name ends in."""
    for line in _MAPS.read_text().splitlines():
        file = line.partition("/")[2]
        path = Path("/", file)
        if file and path.name.startswith(name):
            return path
    return None


def beside(library: Path, name: str) -> Path | None:
    """Return the file of a library in the folder of another one, of the same release if there are several."""
    if not library.is_absolute():
        return None
    version = library.name.partition(".so")[2].split(".")
    found = sorted(library.parent.glob(f"{name}*"))
    of_release = [path for path in found if path.name == name + ".".join(version[:2])]
    return next(iter([*of_release, *found]), None)
