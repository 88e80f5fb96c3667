"""The option that chooses sites, the same for every command that has it; see Note [Words] in `kedge.sites.filters`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kedge.store.recording import Recording


def add_sites(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option.

    Args:
        parser: The parser of the command.
        what: What the chosen sites are there, such as ``show only these modules``.
    """
    parser.add_argument(
        "--sites",
        metavar="SELECTOR",
        help=f"{what}, such as 'encoder.**' or '**{{Linear}}'; attn means '**.attn*' (default: all)",
    )


def only_sites(recording: Recording, text: str | None) -> Recording:
    """Return a recording with the chosen sites alone; itself if no text was typed.

    Raises:
        NoSuchSite: A part of the text selects nothing.
        SelectorError: The text cannot be read.
    """
    if text is None:
        return recording
    from kedge.sites.filters import chosen_sites

    return replace(recording, sites=chosen_sites(text, recording.sites))
