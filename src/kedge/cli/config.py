"""The option of every command that judges a recording."""

from __future__ import annotations

import argparse


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the settings file."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read [tool.kedge] from this file (default: the nearest pyproject.toml that has one)",
    )
