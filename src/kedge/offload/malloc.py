"""The C library's allocator, told to give freed memory back.

# Note [Giving back]
Memory that offloading has freed stays with glibc: between blocks in use there are holes, of use to the program alone.
`malloc_trim` gives their pages back to the system, and leaves nothing changed behind it; what is needed again
costs page faults. It is done some eight times a step, after each eighth of the bytes that a step puts away and brings
back: that has most of the effect of the pinned threshold, at about half its cost (`benchmarks/RESULTS.md`).

# Note [glibc's growing threshold]
glibc takes a block of the mmap threshold or more from the system, and gives it back when it is freed; smaller
ones come from a heap that shrinks only at its end. The threshold begins at 128 KB. Each time a block above it is
freed it grows to that block's size, up to 32 MB, so that a training step soon has most of its tensors in the heap, where
holes that saved tensors leave are of no use to anyone else. `mallopt` pins it, and from then on it does not grow.

The thresholds can be set and not be read, and setting one ends the growing for the rest of the process. So "restored"
means: the values that the environment asked for, else those at which growing ends, 32 MB and twice that for the trim
threshold. That is where a program that has freed a block of nearly 32 MB stood before. One that never did had a lower
threshold, and has more blocks in the heap afterwards than it would have had.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kedge.offload.stores.mapped import LIBC

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_PINNED = (4 << 20, 8 << 20)  # mmap and trim threshold
_GROWN = (32 << 20, 64 << 20)  # where growing ends on a 64-bit machine
_in_force: list[tuple[int, int]] = []  # what each open block has set
_trimming: list[Tuned] = []  # the open blocks that give back now and then
_PARTS = 8
_FIRST, _LEAST = 256 << 20, 64 << 20  # before a step has been seen; and for steps that free little


class Trimmer:
    """Gives freed memory back now and then, in blocks that ask for it; see Note [Giving back]."""

    def __init__(self) -> None:
        self._every, self._since, self._step = _FIRST, 0, 0

    def freed(self, nbytes: int) -> None:
        """Count what was put away, or was brought back and will be gone soon."""
        self._since += nbytes
        if self._since >= self._every:
            self._step += self._since
            self._since = 0
            if _trimming:
                LIBC.malloc_trim(0)
                _trimming[-1].trims += 1

    def turn(self) -> None:
        """Hear that a step is over."""
        whole, self._step, self._since = self._step + self._since, 0, 0
        self._every = max(whole // _PARTS, _LEAST)


@dataclass
class Tuned:
    """What `tuned_malloc` did.

    Attributes:
        done: Whether anything was changed.
        why_not: What stood against it; empty if nothing did.
        threshold: From how many bytes on a block is given back to the system as soon as it is freed.
        trim: So much free memory stays at the end of the heap.
        restored: What the two were set to at the end of the block; None before it.
        trims: How often free memory was given back, where that is done now and then.
    """

    done: bool
    why_not: str = ""
    threshold: int | None = None
    trim: int | None = None
    restored: tuple[int, int] | None = None
    trims: int = 0

    def __str__(self) -> str:
        if not self.done:
            return f"the allocator is as it was: {self.why_not}"
        if self.threshold is None:
            return f"free memory was given back to the system {self.trims} times"
        said = f"blocks of {self.threshold:,} bytes and more go back to the system when they are freed"
        if self.restored is None:
            return said
        return f"{said}; since the block ended, those of {self.restored[0]:,} bytes and more do"


@contextmanager
def tuned_malloc(*, at_once: bool = True) -> Iterator[Tuned]:
    """Let freed memory go back to the system while the block runs.

    On a CPU most of what offloading frees stays with glibc's allocator otherwise. It costs page faults: a quarter of
    a step and more (`benchmarks/RESULTS.md`). Only glibc has this to be told; elsewhere nothing is done, and the
    value says so.

    At the end the thresholds are set to what ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or
    ``GLIBC_TUNABLES`` asked for, else to 32 MB and 64 MB, where glibc's own adjustment ends. The adjustment itself
    stays off for the rest of the process: glibc can neither be asked for the values nor be made to adjust them again.

    Args:
        at_once: Give every large block back as soon as it is freed. False: have `kedge.offload` give back what is free some
            eight times a step, which frees a little less, costs about half, and changes no threshold.

    Yields:
        What was done; print it.
    """
    if reason := _why_not():
        yield Tuned(done=False, why_not=reason)
        return
    if not at_once:
        with _now_and_then() as said:
            yield said
        return
    before = _in_force[-1] if _in_force else _asked_for()
    _set(_PINNED)
    _in_force.append(_PINNED)
    said = Tuned(done=True, threshold=_PINNED[0], trim=_PINNED[1])
    try:
        yield said
    finally:
        _in_force.pop()
        _set(before)
        said.restored = before


@contextmanager
def _now_and_then() -> Iterator[Tuned]:
    said = Tuned(done=True)
    _trimming.append(said)
    try:
        yield said
    finally:
        _trimming.remove(said)
        LIBC.malloc_trim(0)


def _set(values: tuple[int, int]) -> None:
    threshold, trim = values
    LIBC.mallopt(_MMAP_THRESHOLD, threshold)
    LIBC.mallopt(_TRIM_THRESHOLD, trim)
    LIBC.malloc_trim(0)  # what is free in the heap already


def _why_not() -> str:
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()) or not hasattr(LIBC, "mallopt"):
        return "the C library is not glibc"
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        version = None
    if not version or not version.startswith("glibc"):
        return "the C library is not glibc"
    own = ctypes.CDLL("libc.so.6").malloc
    if ctypes.cast(own, ctypes.c_void_p).value != ctypes.cast(LIBC.malloc, ctypes.c_void_p).value:
        return "another allocator has taken glibc's place (LD_PRELOAD)"
    return ""


def _asked_for() -> tuple[int, int]:
    """Return what the environment sets, and where it sets nothing, where glibc's own adjustment ends."""
    tunables = dict(part.partition("=")[::2] for part in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    asked = []
    for name, grown in zip(("mmap_threshold", "trim_threshold"), _GROWN, strict=True):
        text = tunables.get(f"glibc.malloc.{name}") or os.environ.get(f"MALLOC_{name.upper()}_", "")
        asked.append(_number(text, grown))
    return asked[0], asked[1]


def _number(text: str, otherwise: int) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return otherwise
