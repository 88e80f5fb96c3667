"""Memory pressure: whether memory is short in this process's control groups, or on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_STALLED = 10.0
"""Per cent of the last ten seconds in which some task waited for memory."""
_SHARE = 0.5
"""The share of Kedge's file in the memory available to files."""


class Pressure:
    """The memory pressure that Linux reports; without a report there is none.

    Args:
        proc: The folder of the process file system.
        groups: The folder where control groups are mounted, of version 1, 2 or both.
    """

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._levels = [
            folder for folder in _levels(proc, groups) if (folder / "memory.stat").exists()
        ]

    def tight(self, held: int) -> bool:
        """Whether a file of so many bytes would take memory from the program.

        True if tasks already wait for memory, or if the file is larger than half of the memory left
        beside the program's own. Cached pages of files alone cost nothing: the system drops them
        when it needs memory; but pages not yet on the disk it has to write first, and the program
        waits.
        """
        room = self.room()
        return (room is not None and held > room * _SHARE) or self.stalled()

    def room(self) -> int | None:
        """Return the bytes of memory for files' pages, those in memory included; None if unknown."""
        rooms = [room for room in map(_room, self._levels) if room is not None]
        available = _numbers(self._proc / "meminfo").get("MemAvailable:")
        if available is not None:
            rooms.append(available * 1024)
        return min(rooms, default=None)

    def stalled(self) -> bool:
        """Whether tasks have been waiting for memory."""
        files = [self._proc / "pressure" / "memory"]
        files += [folder / "memory.pressure" for folder in self._levels]
        return any(_waiting(file) >= _STALLED for file in files)


def _levels(proc: Path, groups: Path) -> Iterator[Path]:
    """The folder of each control group that bounds this process's memory, innermost first."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        inner = root / path.lstrip("/")
        # In a container the path is that on the host, and the mount begins at the container's own
        # group.
        if not inner.is_dir():
            inner = root
        yield inner
        for level in inner.parents:
            if level.is_relative_to(root):
                yield level


def _room(group: Path) -> int | None:
    for most, now, files, shared in (
        ("memory.max", "memory.current", "file", "shmem"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    ):
        limit = _read(group / most).strip()
        usage = _read(group / now).strip()
        if limit.isdigit() and usage.isdigit():
            stat = _numbers(group / "memory.stat")
            droppable = stat.get(files, 0) - stat.get(shared, 0)
            return max(0, int(limit) - int(usage) + droppable)
    return None


def _waiting(file: Path) -> float:
    for line in _read(file).splitlines():
        if line.startswith("some "):
            _, _, rest = line.partition("avg10=")
            return float(rest.split()[0])
    return 0.0


def _numbers(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _read(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:  # missing, not readable, or PSI switched off: no report
        return ""
