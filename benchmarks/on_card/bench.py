"""What every part is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from on_card.device import Device
from on_card.sheet import Sheet


@dataclass
class Bench:
    """A run of the benchmarks.

    Attributes:
        on: What it runs on.
        sheet: Where results go.
        folder: A folder for recordings.
        tiny: Whether models are tiny, and rounds few.
    """

    on: Device
    sheet: Sheet
    folder: Path
    tiny: bool
