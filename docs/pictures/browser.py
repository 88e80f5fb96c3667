"""A page in the browser that the tests start, for the scripts that draw pictures of pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.chromium import launched


@contextmanager
def opened(file: Path, *sizes: tuple[int, int, str]) -> Iterator[list[Any]]:
    """Open a page of Kedge's once for each width, height and theme; each is drawn when it is given."""
    with launched() as chromium:
        pages = [
            chromium.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            for width, height, theme in sizes
        ]
        for page in pages:
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready=yes]")
        yield pages
