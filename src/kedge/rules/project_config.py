"""The rules that apply in a folder, by the command line and the nearest ``pyproject.toml``."""

from __future__ import annotations

from pathlib import Path

from kedge.program.project_file import project_table
from kedge.rules import registry
from kedge.rules.rule import Rule
from kedge.rules.settings import chosen, codes, configured


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
    where, table = project_table(config, folder)
    rules = configured(registry.ALL, table, where)
    selected = codes(registry.ALL, table, "select", where)
    ignored = codes(registry.ALL, table, "ignore", where) or []
    if typed is not None:
        return chosen(rules, typed, left_out)
    return chosen(rules, selected, [*ignored, *left_out])


def _typed(text: str | None) -> list[str] | None:
    """Return the codes of a text with commas between them."""
    if text is None:
        return None
    return [registry.known_code(code.strip()) for code in text.split(",") if code.strip()]
