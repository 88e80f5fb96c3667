"""Destinations: where `kedge.offload` puts saved tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kedge.calls.arguments import called_as, described
from kedge.errors import OffloadError
from kedge.files.given_path import given_path


def _check_flag(owner: object, name: str, *, optional: bool = False) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or (optional and value is None):
        return
    kinds = "True, False or None" if optional else "True or False"
    kind = type(owner).__name__
    raise OffloadError(f"{kind}({name}={described(value)}): {name} must be {kinds}")


@called_as("kedge.offload(model, to=kedge.Rebuild())")
@dataclass(frozen=True)
class Rebuild:
    """The destination of `kedge.offload` that moves nothing.

    Tensors that can be computed again exactly are not kept.

    Examples:
        >>> with kedge.offload(model, to=kedge.Rebuild()):
        ...     model(images).sum().backward()
    """


@called_as("kedge.offload(model, to=kedge.Cpu())")
@dataclass(frozen=True)
class Cpu:
    """The destination of `kedge.offload` that moves saved tensors from an accelerator to host memory.

    Attributes:
        rebuild: Whether tensors that can be computed again exactly are rebuilt instead of moved.
        pin: Whether to page-lock the host memory, so that copies run in parallel with the
            computation.
    """

    rebuild: bool = True
    pin: bool = True

    def __post_init__(self) -> None:
        _check_flag(self, "rebuild")
        _check_flag(self, "pin")


@called_as("kedge.offload(model, to=kedge.Disk())")
@dataclass(frozen=True)
class Disk:
    """The destination of `kedge.offload` that moves saved tensors to a file.

    The file has no name, so the system deletes it however the process ends.

    Attributes:
        path: An existing folder, in which ``~`` is the home folder; None for the folder for
            temporary files.
        rebuild: Whether tensors that can be computed again exactly are rebuilt instead of moved.
        uncached: Whether the file stays out of the system's file cache; None: only if memory is
            short.
        checksum: Whether to compare the bytes read back with a checksum of those written.

    Examples:
        >>> with kedge.offload(model, to=kedge.Disk(checksum=True)) as account:
        ...     model(images).sum().backward()
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
            raise OffloadError(f"Disk({described(self.path)}): path must be a folder, or None")
        folder = given_path(self.path)
        if folder.is_dir():
            return
        call = f"Disk({os.fspath(self.path)!r})"
        if folder != Path(self.path):
            call += f", which is {folder}"
        raise OffloadError(f"{call}: there is no such folder; create it first, or leave path out")


Destination: TypeAlias = Rebuild | Cpu | Disk
