"""Destinations: where `kedge.offload` puts saved tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kedge.errors import OffloadError


def _check_flag(owner: object, name: str, *, optional: bool = False) -> None:
    value = getattr(owner, name)
    if not (isinstance(value, bool) or (optional and value is None)):
        kinds = "True, False or None" if optional else "True or False"
        raise OffloadError(f"{type(owner).__name__}({name}={value!r}): {name} must be {kinds}")


@dataclass(frozen=True)
class Rebuild:
    """Nothing leaves the device: a tensor that can be computed again exactly from other saved ones is not kept."""


@dataclass(frozen=True)
class Cpu:
    """Saved tensors of an accelerator go to host memory.

    Attributes:
        rebuild: Whether tensors that can be rebuilt exactly are rebuilt instead of moved.
        pin: Whether to page-lock that memory, so that copies run beside the computation.
    """

    rebuild: bool = True
    pin: bool = True

    def __post_init__(self) -> None:
        _check_flag(self, "rebuild")
        _check_flag(self, "pin")


@dataclass(frozen=True)
class Disk:
    """Saved tensors go to one unnamed file, which the system deletes however the process ends.

    Attributes:
        path: An existing folder; None: the folder for temporary files.
        rebuild: Whether tensors that can be rebuilt exactly are rebuilt instead of moved.
        uncached: Whether the file stays out of the system's file cache; None: under memory pressure.
        checksum: Whether to compare the bytes read back with a checksum of those written.
    """

    path: str | os.PathLike[str] | None = None
    rebuild: bool = True
    uncached: bool | None = None
    checksum: bool = False

    def __post_init__(self) -> None:
        _check_flag(self, "rebuild")
        _check_flag(self, "checksum")
        _check_flag(self, "uncached", optional=True)
        if self.path is None:
            return
        if not isinstance(self.path, (str, os.PathLike)):
            raise OffloadError(f"Disk({self.path!r}): path must be a folder, or None")
        if not Path(self.path).is_dir():
            raise OffloadError(
                f"Disk({os.fspath(self.path)!r}): there is no such folder; create it first, or leave path out"
            )


Destination: TypeAlias = Rebuild | Cpu | Disk
