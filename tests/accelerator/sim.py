"""The module `torch.sim`: what PyTorch calls of a device's module, and what tests ask of the simulated one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kedge import native
from kedge.native import cuda, driver, hip
from tests.accelerator import build, data_parallel

DEVICES = 2
_DLPACK_EXTENSION = 12  # the number of other libraries' devices in DLPack
_C: Any = None


def load() -> ModuleType:
    """Make the device the accelerator of this process; nothing can undo it."""
    global _C  # noqa: PLW0603 - a process has it or has it not
    if _C is None:
        torch.utils.rename_privateuse1_backend("sim")
        _C = build.extension()
        torch._register_device_module("sim", sys.modules[__name__])
        torch.utils.generate_methods_for_privateuse1_backend(
            for_storage=True, unsupported_dtype=None
        )
        torch.set_autocast_dtype("sim", torch.bfloat16)
        data_parallel.provide()
        use_driver()
        atexit.register(_C.shut_down)
    return sys.modules[__name__]


# For tests


def use_driver() -> None:
    """Have Kedge launch its kernel by the device's driver, as on a card of CUDA's."""
    library = ctypes.CDLL(_C.__file__)
    driver.connect_to("sim", cuda.Cuda(library, _DLPACK_EXTENSION, _address("sim_current_stream")))


@contextlib.contextmanager
def by_hip(
    architecture: str = "gfx942:sramecc+:xnack-", stream_function: str = "sim_current_stream"
) -> Iterator[None]:
    """Have Kedge launch its kernel in the block as on a card of HIP's, where its source runs."""
    library = ctypes.CDLL(_C.__file__)
    runtime = hip.Hip(
        library,
        _DLPACK_EXTENSION,
        _address(stream_function),
        compiler=hip.Compiler(library),
        kind="sim",
        architecture=lambda index: architecture,
    )
    driver.connect_to("sim", runtime)
    try:
        yield
    finally:
        use_driver()


def _address(function: str) -> int:
    found = getattr(ctypes.CDLL(_C.__file__), function)
    return ctypes.cast(found, ctypes.c_void_p).value or 0


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Measure what is new in the block by PyTorch's reductions, as on a device without a driver that Kedge knows."""
    driver._connected.pop("sim")
    native.connect_driver(0, *[0] * 6)
    try:
        yield
    finally:
        use_driver()


def launches() -> int:
    """Return how often the kernel was launched since the start or `reset_counts`."""
    return _C.driver_launches()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Tell C in the block that a graph is being captured."""
    _C.set_capturing(True)
    try:
        yield
    finally:
        _C.set_capturing(False)


@contextlib.contextmanager
def failing_launches(error: int) -> Iterator[None]:
    """Have launches return an error of the driver's in the block."""
    _C.fail_launches(error)
    try:
        yield
    finally:
        _C.fail_launches(0)


def set_seed(seed: int) -> None:
    """Draw the delays of every stream anew."""
    _C.set_seed(seed)


@contextlib.contextmanager
def without_delays() -> Iterator[None]:
    """Run kernels as soon as their threads can."""
    _C.set_delays(False)
    try:
        yield
    finally:
        _C.set_delays(True)


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Stop a stream (the current one) inside the block; never wait for it there."""
    stream = current_stream() if stream is None else stream
    _C.hold(stream)
    try:
        yield
    finally:
        _C.release(stream)


def counts() -> dict[str, Any]:
    """Return what was counted since the start or `reset_counts`.

    ``syncs``, waits of the host by kind: ``stream``, ``device``, ``event``, ``read`` (`.item()` and
    its like), ``copy`` (one that blocks), ``op`` (an operator that cannot run later) and
    ``allocator`` (it gave back its cache); ``synchronizing_ops``, which operators those were;
    ``copies``, the number and bytes of ``h2d``, ``d2h``, ``d2d`` and ``p2p``; ``kernels``, the
    number of operators that were enqueued; ``where``, while `traced`, a kind, its operator and
    Python's stack for each wait.
    """
    return _C.counts()


def reset_counts() -> None:
    """Count from zero."""
    _C.reset_counts()
    _C.reset_driver()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Note Python's stack at each wait of the host, in ``counts()["where"]``."""
    _C.set_tracing(True)
    try:
        yield
    finally:
        _C.set_tracing(False)


def set_limit(bytes_: int, device: Any = None) -> None:
    """Limit the memory of a device."""
    _C.set_limit(_index(device), bytes_)


# For PyTorch


def __getattr__(name: str) -> Any:
    """Return whether the device was used: `torch.utils.checkpoint` looks here whether there is a generator to save."""
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _index(device: Any = None) -> int:
    """Return the index of a device given in any way; without one that of the current device."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    """Return whether there is such a device."""
    return True


def is_initialized() -> bool:
    """Return whether this process has used it: anything was enqueued, a device was set or a generator's state read."""
    return _C.is_begun()


def init() -> None:
    """Use it."""
    _C.begin()


def _is_in_bad_fork() -> bool:
    return not _C.is_usable()


_lazy_init = init


def device_count() -> int:
    """Return how many devices there are."""
    return DEVICES


def get_device_name(device: Any = None) -> str:
    """Return what a card would call itself."""
    return f"simulated accelerator {_index(device)}"


def current_device() -> int:
    """Return the index of this thread's device."""
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    """Change this thread's device."""
    init()
    torch.accelerator.set_device_index(_index(device))


class device:  # noqa: N801 - as torch.cuda has it
    """A block in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *raised: object) -> None:
        set_device(self.before)


Stream = torch.Stream
Event = torch.Event


def current_stream(device: Any = None) -> torch.Stream:
    """Return this thread's stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream that a device begins with."""
    return _C.default_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    """Change this thread's stream."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """Return what a ``with`` block makes the current stream."""
    return stream


def synchronize(device: Any = None) -> None:
    """Wait for a device."""
    torch.accelerator.synchronize(_index(device))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of all tensors."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes of all tensors."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    """Return the bytes of tensors and the allocator's cache."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes of tensors and the allocator's cache."""
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Return the allocator's figures."""
    return torch.accelerator.memory_stats(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count peaks from now."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the name and the memory of a device."""
    return SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return free and all bytes of a device."""
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    """Release cached memory."""
    torch.accelerator.empty_cache()


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    """Return the state of a device's generator."""
    init()
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    """Change the state of a device's generator."""
    init()
    _C.default_generator(_index(device)).set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _C.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(DEVICES):
        _C.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return _C.default_generator(current_device()).initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of autocast."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Return whether there is bfloat16."""
    return True
