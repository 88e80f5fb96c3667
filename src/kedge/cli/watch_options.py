"""The options of a watch, for every command that begins one."""

from __future__ import annotations

import argparse

from kedge.cli.sites_option import add_sites


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add what is measured, how often, and at which cost."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an existing recording",
    )
    add_sites(parser, "record only these sites")
    parser.add_argument(
        "--every",
        metavar="N",
        type=_positive,
        default=10,
        help="measure at most one step in N in full (default: 10)",
    )
    parser.add_argument(
        "--budget",
        metavar="SHARE",
        type=_share,
        default=0.03,
        help=(
            "overhead limit as a share of run time, such as 3%% (the default); 'none' for no limit"
        ),
    )


def check_selector(text: str) -> None:
    """Check that a selector can be parsed; this imports torch."""
    from kedge.sites.language import parse

    parse(text)


def check_watched(text: str) -> None:
    """Check that a watch can record what a selector selects; this imports torch."""
    from kedge.sites import filters

    filters.check_watched(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps; 1 measures every step, 10 one in ten"
        )
    return int(text)


def _share(text: str) -> float | None:
    """Return a share of the time: ``3%``, ``0.03`` or ``none``."""
    if text == "none":
        return None
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if rest or not 0 < share < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a share of the time; write one such as 3%, or none for no limit"
        )
    return share
