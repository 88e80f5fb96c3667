"""The rules that apply in a folder, by the command line and the nearest ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.json_input.reading import read_regular
from kedge.rules import registry
from kedge.rules.rule import Rule
from kedge.rules.settings import chosen, codes, configured

NAME = "pyproject.toml"


def configured_rules(
    select: str | None = None,
    ignore: str | None = None,
    config: str | None = None,
    folder: Path | None = None,
) -> tuple[Rule, ...]:
    """Return the rules that apply, with their thresholds.

    Codes on the command line take precedence over those of the file, as in ruff: ``select``
    replaces both its ``select`` and its ``ignore``; ``ignore`` alone adds to its ``ignore``.

    Args:
        select: Codes with commas between, from the command line; None if there are none.
        ignore: The same.
        config: The file to read; the nearest ``pyproject.toml`` with a ``[tool.kedge]`` if None.
        folder: The folder where the search for the file begins; the working directory if None.

    Raises:
        ConfigError: The file cannot be read, or has unknown keys, codes or thresholds.
        NoSuchRule: A code on the command line does not belong to any rule.
    """
    typed = _typed(select)
    left_out = _typed(ignore) or []
    where, table = _read(config, folder)
    rules = configured(registry.ALL, table, where)
    selected = codes(registry.ALL, table, "select", where)
    ignored = codes(registry.ALL, table, "ignore", where) or []
    if typed is not None:
        return chosen(rules, typed, left_out)
    return chosen(rules, selected, [*ignored, *left_out])


def _read(config: str | None, folder: Path | None) -> tuple[str, Mapping[str, Any]]:
    """Return the file and its table; an empty table if there is none."""
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


def _typed(text: str | None) -> list[str] | None:
    """Return the codes of a text with commas between them."""
    if text is None:
        return None
    return [registry.known_code(code.strip()) for code in text.split(",") if code.strip()]
