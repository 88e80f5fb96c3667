"""Kedge's table in the nearest ``pyproject.toml``; reading it imports nothing that a program might."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.json_input.reading import read_regular

NAME = "pyproject.toml"


def project_table(
    config: str | None = None, folder: Path | None = None
) -> tuple[str, Mapping[str, Any]]:
    """Return the file and its table; an empty table if there is none.

    Args:
        config: The file to read; the nearest ``pyproject.toml`` with a ``[tool.kedge]`` if None.
        folder: The folder where the search for the file begins; the working directory if None.

    Raises:
        ConfigError: The file cannot be read.
    """
    if config is not None:
        table = _table_of(Path(config))
        if table is None:
            raise ConfigError(
                f"{config} has no table [tool.kedge]; add one, or name another file with --config"
            )
        return config, table
    start = Path.cwd() if folder is None else folder
    for place in (start, *start.parents):
        if (place / NAME).is_file() and (table := _table_of(place / NAME)) is not None:
            return str(place / NAME), table
    return NAME, {}


def _table_of(path: Path) -> Mapping[str, Any] | None:
    try:
        document = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; name another file with --config"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"cannot read {path}: it is not TOML ({error}); correct it, or name "
            "another file with --config"
        ) from error
    tool = document.get("tool", {})
    table = tool.get("kedge") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.kedge is {table!r}; it must be a table: [tool.kedge]")
    return table
