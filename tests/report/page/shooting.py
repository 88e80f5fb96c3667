"""Pictures of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def shoot(page: Any, file: Path, *, whole: bool = True) -> None:
    """Take a picture of a page; Playwright would write the file in a thread that stays."""
    file.write_bytes(page.screenshot(full_page=whole))
