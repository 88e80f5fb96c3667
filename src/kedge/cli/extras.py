"""Packages that only some commands need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kedge.errors import MissingExtra


@contextmanager
def extra(name: str, package: str) -> Iterator[None]:
    """Turn a missing package into an error that says what to install.

    Args:
        name: The extra of Kedge that brings the package; the command has the same name.
        package: The package.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtra(
            f"kedge {name} needs the package {package}, which is not installed: pip install 'kedge[{name}]'"
        ) from error
