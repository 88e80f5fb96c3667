"""Work that cannot be watched: in child processes, and where Kedge's hooks were replaced."""

from __future__ import annotations

import mmap
import resource
from typing import Any

from torch.utils.hooks import RemovableHandle

from kedge.store.events import UnseenDetail, UnseenEvent
from kedge.torch_internals.hook_tables import for_everything

_BUSY = 1.0
"""Seconds of processor time from which child processes are noted."""


class UnseenWork:
    """Notes the work of child processes, and changes of PyTorch's global hook tables."""

    def __init__(self) -> None:
        self._tables: list[Any] = []
        self._handles: list[RemovableHandle] = []
        self._children = mmap.mmap(-1, 8)  # shared with child processes that are forked
        self._begun = 0.0

    def begin(self, *handles: RemovableHandle) -> None:
        """Note PyTorch's global hook tables when watching begins, and our hooks in them."""
        self._begun = _child_seconds()
        self._handles = list(handles)
        self._tables = list(for_everything().values())

    def stepped_in_child(self) -> None:
        """Called in a forked child process when an optimizer steps there."""
        steps = int.from_bytes(self._children[:], "little") + 1
        self._children[:] = steps.to_bytes(8, "little")

    def notes(self, *, trained: bool) -> list[UnseenEvent]:
        """Return the notes at the end of a run.

        Args:
            trained: Whether an optimizer has stepped in this process: then only children that step
                are noted.
        """
        notes = []
        steps = int.from_bytes(self._children[:], "little")
        seconds = _child_seconds() - self._begun
        if steps or (seconds > _BUSY and not trained):
            detail = UnseenDetail(steps=steps, seconds=round(seconds, 1))
            notes.append(UnseenEvent(what="children", detail=detail))
        if self._are_replaced():
            notes.append(UnseenEvent(what="hook-tables", detail=UnseenDetail()))
        return notes

    def _are_replaced(self) -> bool:
        """Whether the program has replaced a table, or taken one of Kedge's hooks out of it."""
        now = {id(table) for table in for_everything().values()}
        gone = any(handle.id not in (handle.hooks_dict_ref() or {}) for handle in self._handles)
        return gone or any(id(table) not in now for table in self._tables)


def _child_seconds() -> float:
    """Return the processor time of child processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
