"""Devices of every kind, by what PyTorch calls the accelerator.

These are their streams and events, copies to the host, generators and names.

# Note [What a device lacks]
CUDA, ROCm, XPU, HPU and most devices of other libraries have streams, events, pinned memory and
`record_stream`; MPS has events alone. Whether a kind of device has something is tried once, when it
is first needed, and what it lacks costs one feature: without streams or pinned memory the program
waits for copies, without events or streams nothing is timed. MPS has times, but each of its events
ends a batch of kernels, and PyTorch waits for the whole device to tell the time between two.

# Note [Nothing begins by asking]
A program that has not used its accelerator yet must not get a context on it because Kedge asks for
a name or for random numbers, and a child that was forked must not touch it. So everything here that
is not about a given tensor or device asks `in_use` first.

# Note [The current stream]
PyTorch's streams are contexts themselves, but one object can be entered only once at a time. `on`
puts a stream in force without changing it, so that threads can share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

# -- the accelerator ---------------------------------------------------------------------------


def in_use() -> str | None:
    """Return the kind of device that this process computes on besides the CPU.

    See Note [Nothing begins by asking].
    """
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    module = _module(found.type)
    if module is None:
        return None
    if getattr(module, "_is_in_bad_fork", _never)():
        return None
    begun = getattr(module, "is_initialized", getattr(module, "is_available", _never))
    if not begun():
        return None
    return found.type


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is of the kind that `torch.accelerator` is about."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def name() -> str:
    """Return the name of the device in use, such as "cuda (NVIDIA H200)"; "cpu" without one."""
    kind = in_use()
    if kind is None:
        return "cpu"
    named = getattr(_module(kind), "get_device_name", None)
    if named is None:
        return kind
    return f"{kind} ({named()})"


def shares_memory(device: torch.device) -> bool:
    """Whether a device computes in the CPU's memory, as far as PyTorch tells."""
    properties = getattr(_module(device.type), "get_device_properties", None)
    return properties is not None and bool(getattr(properties(device), "is_integrated", False))


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def is_capturing() -> bool:
    """Whether this thread's operations become a graph of the device instead of running now."""
    process = os.getpid()  # a forked child has no device
    module = _in_use.get(process)
    if module is None:
        kind = in_use()
        if kind is None:
            return False
        module = _in_use[process] = _module(kind)
    look = getattr(module, "is_current_stream_capturing", None)
    return look is not None and bool(look())


def autocast() -> dict[str, torch.dtype]:
    """Return the dtypes of autocast by the kind of device for which it is on."""
    kinds = ["cpu"]
    found = torch.accelerator.current_accelerator()
    if found is not None:
        kinds.append(found.type)
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in on}


def can(attempt: Callable[[torch.device], bool], device: torch.device) -> bool:
    """Whether an attempt succeeds on devices of this kind, which is tried once.

    See Note [What a device lacks]. While a graph is captured, nothing is tried: an attempt would
    end up in the graph, or end the capture.
    """
    known = _known.get((attempt, device.type))
    if known is not None:
        return known
    if not is_accelerator(device) or is_capturing():
        return False
    try:
        known = attempt(device)
    except torch.AcceleratorError:  # the device itself failed
        raise
    except (RuntimeError, TypeError):  # PyTorch's answers where a kind of device lacks it
        known = False
    _known[attempt, device.type] = known
    return known


# -- streams and events ------------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """Whether work can be queued on a device beside the computation, and its end be known."""
    return can(_streams, device) and can(_events, device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that the program computes on, now and in this thread."""
    index: int | None = device.index
    if index is None:
        return torch.accelerator.current_stream(device)
    return torch.accelerator.current_stream(index)  # much faster than with the device


def stream_in_force(device: torch.device) -> torch.Stream | None:
    """Return the stream that this thread computes on; None for a device without streams."""
    if device.type == "cpu" or not has_streams(device):
        return None
    return current_stream(device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Queue the work of this thread on a stream in a block; see Note [The current stream]."""
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def mark(stream: torch.Stream) -> torch.Event:
    """Return an event that is reached when all work queued on a stream so far is done."""
    event: torch.Event = stream.record_event()
    return event


def timed_mark(device: torch.device) -> torch.Event | None:
    """Return an event that also takes the time when the current stream reaches it.

    It is None on a device without such events or streams.
    """
    if not has_streams(device) or not can(_timing, device):
        return None
    return _timed(device)


def seconds(first: torch.Event, last: torch.Event) -> float | None:
    """Return the seconds between two events that were reached; None if the device does not tell."""
    try:
        return float(first.elapsed_time(last)) / 1e3
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # PyTorch's answer for a kind of device that has events without times
        return None


def has_clock(device: torch.device) -> bool:
    """Whether a device tells the time between two events; waits for it when it is first asked."""
    return has_streams(device) and can(_clock, device)


# -- memory ------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a program can still take on a device; None if that is unknown.

    Those that PyTorch has reserved and does not use are among them.
    """
    if not can(_memory, device):
        return None
    return _memory_of(device)


def pinned(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return memory of the host from which and to which the device copies while the program goes on.

    None on a device without it, and if no more memory can be locked.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not can(_pinned, found):
        return None
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # what the system allows to lock is used up
        return None


def with_doubles(tensor: Tensor) -> Tensor:
    """Return a tensor where it can be computed with in float64: itself, or its copy on the host."""
    if has_doubles(tensor.device):
        return tensor
    return tensor.cpu()


def has_doubles(device: torch.device) -> bool:
    """Whether a device computes in float64; MPS does not."""
    return not is_accelerator(device) or can(_doubles, device)


def lend(tensor: Tensor, stream: torch.Stream) -> bool:
    """Keep a tensor's memory until a stream other than its own has finished with it.

    Returns:
        Whether the device can.
    """
    try:
        tensor.record_stream(stream)
    except NotImplementedError:
        return False
    return True


def to_host(tensor: Tensor, *, beside: bool = True) -> tuple[Tensor, torch.Event | None]:
    """Start copying a tensor to the host; returns the copy and the event of its arrival.

    The event is None for a copy that can be read at once, and for a tensor of the CPU, which is
    returned as it is.

    Args:
        tensor: The tensor.
        beside: Whether the copy runs on a stream of its own, so that the program's next kernels do
            not wait for it either. A few thousand numbers are copied sooner than that is arranged.
    """
    device = tensor.device
    if device.type == "cpu":
        return tensor, None
    host = None
    if has_streams(device):
        host = pinned(tensor.shape, tensor.dtype)
    if host is None:
        return tensor.cpu(), None
    if not beside:
        host.copy_(tensor, non_blocking=True)
        return host, mark(current_stream(device))
    stream = _side.get(device) or _side.setdefault(device, torch.Stream(device))
    stream.wait_stream(current_stream(device))
    with on(stream):
        host.copy_(tensor, non_blocking=True)
    arrived = mark(stream)
    if not lend(tensor, stream):
        arrived.synchronize()
    return host, arrived


# -- random numbers ----------------------------------------------------------------------------


def generator_states() -> dict[str, Tensor]:
    """Return the states of the random number generators of the CPU and of every device in use.

    They are by the device's name. While a graph is captured, a device does not tell its own.
    """
    states = {"cpu": torch.get_rng_state()}
    kind = in_use()
    if kind is None or is_capturing():
        return states
    module = _module(kind)
    if module is not None and hasattr(module, "get_rng_state"):
        for index in range(module.device_count()):
            states[f"{kind}:{index}"] = module.get_rng_state(index)
    return states


def cpu_generator_state() -> Tensor:
    """Return the state of the CPU's generator; it takes a microsecond."""
    return torch.default_generator.get_state()


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Put the generators of these devices into these states."""
    for place, state in states.items():
        kind, _, index = place.partition(":")
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(kind).set_rng_state(state, int(index))


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the generators of every device at the end of a block."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


# -- what a kind of device has -----------------------------------------------------------------

_known: dict[tuple[Callable[[torch.device], bool], str], bool] = {}
_side: dict[torch.device, torch.Stream] = {}
_in_use: dict[int, ModuleType | None] = {}
"""The module of the device of each process whose device was in use."""


def _never() -> bool:
    return False


def _module(kind: str) -> ModuleType | None:
    """Return the module of PyTorch for a kind of device; None for one without, such as "meta"."""
    try:
        found: ModuleType = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return found


def _streams(device: torch.device) -> bool:
    # A device without streams may answer with its only queue.
    first = torch.Stream(device)
    return torch.Stream(device) != first


def _events(device: torch.device) -> bool:
    return mark(current_stream(device)).query() in (False, True)


def _timing(device: torch.device) -> bool:
    return _timed(device) is not None


def _clock(device: torch.device) -> bool:
    first = _timed(device)
    last = _timed(device)
    last.synchronize()
    return seconds(first, last) is not None


def _doubles(device: torch.device) -> bool:
    return torch.zeros(1, dtype=torch.float64, device=device).add_(1).dtype is torch.float64


def _memory_of(device: torch.device) -> int:
    free, _ = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    return free + reserved - torch.accelerator.memory_allocated(device)


def _memory(device: torch.device) -> bool:
    return _memory_of(device) > 0


def _pinned(_: torch.device) -> bool:
    return torch.empty(1, device="cpu", pin_memory=True).is_pinned()


def _timed(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event
