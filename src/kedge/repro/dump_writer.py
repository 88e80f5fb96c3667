"""The folder of a dump: written as soon as there is a recording to which this process writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kedge.hooks.firing.schedule import rank
from kedge.repro.package import CallPackage
from kedge.stderr import Shield
from kedge.store.events import BadOperation, DumpEvent, OperationsEvent, RunEvent


class EventLog(Protocol):
    """The recording, as far as a dump writes to it."""

    def event(self, event: RunEvent) -> None:
        """Write one event."""


class DumpWriter:
    """Writes the chosen call into the recording.

    Args:
        place: Returns the folder of the recording; None as long as this process does not record
            into one.
        log: Receives the events.
        rerun: Returns the operations that made the value, given the folder of the dump.
    """

    def __init__(
        self,
        place: Callable[[], Path | None],
        log: EventLog,
        rerun: Callable[[Path], list[BadOperation]] | None = None,
    ) -> None:
        self._place, self._log, self._rerun = place, log, rerun
        self._chosen: tuple[CallPackage, bool] | None = None
        self._written: Path | None = None

    def choose(self, package: CallPackage, *, reached: bool) -> None:
        """Take the call to write.

        Args:
            package: The packed call.
            reached: Whether the optimizer was about to get non-finite gradients.
        """
        self._chosen = package, reached

    def write(self) -> None:
        """Write the chosen call, if there is one and the recording exists."""
        folder = None if self._chosen is None else self._place()
        if folder is not None and self._chosen is not None:
            chosen, self._chosen = self._chosen, None
            Shield("writing the dump", "there is none")(self._write, folder, *chosen)

    def give_up(self) -> bool:
        """Drop a chosen call that could not be written; returns whether there was one."""
        chosen, self._chosen = self._chosen, None
        return chosen is not None

    def run_again(self) -> None:
        """Run the written call once more to name its operations."""
        made = (
            self._rerun(self._written)
            if self._rerun is not None and self._written is not None
            else []
        )
        if made and self._written is not None:
            self._log.event(OperationsEvent(folder=self._written.name, operations=tuple(made)))

    def _write(self, folder: Path, package: CallPackage, reached: bool) -> None:
        name = f"dump-{package.step}" + (f"-{rank()}" if rank() else "")
        package.write(folder / name)
        self._written, suspect = folder / name, package.suspect
        module = suspect.call.label if suspect.call is not None else None
        self._log.event(
            DumpEvent(
                step=package.step,
                site=suspect.site,
                folder=name,
                module=module,
                value=suspect.value,
                direction=suspect.direction,
                reached=reached,
            )
        )
