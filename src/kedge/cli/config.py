"""The options that choose the rules, in every command that judges a recording."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kedge.rules.rule import Rule


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the settings file."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read [tool.kedge] from this file (default: the nearest pyproject.toml that has one)",
    )


def configured_rules(
    select: str | None = None, ignore: str | None = None, config: str | None = None
) -> tuple[Rule, ...]:
    """Return the rules that apply; see `kedge.rules.project_config.configured_rules`.

    Raises:
        ConfigError: The file cannot be read, or has unknown settings.
        NoSuchRule: No rule has one of the codes.
    """
    from kedge.rules.project_config import configured_rules

    return configured_rules(select, ignore, config)
