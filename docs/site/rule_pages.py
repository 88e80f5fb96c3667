"""A hook of MkDocs: the pages of the rules in the navigation, in the order of their index.

They are made of the rules, and so is this list: no rule is added to the site by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

INDEX = Path(__file__).parents[1] / "reference/rules.md"
FOLDER = "reference/rules/"
LINK = r"\[(?P<code>[A-Z-]+)\]\(rules/(?P<page>[a-z-]+\.md)\)"
ROW = re.compile(rf"^\| {LINK}", re.MULTILINE)


def pages() -> list[dict[str, str]]:
    """Return the page of each rule under its code, as the navigation lists pages."""
    text = INDEX.read_text(encoding="utf-8")
    links = [*ROW.finditer(text), *re.finditer(LINK, text)]
    found = {link["code"]: FOLDER + link["page"] for link in links}
    return [{code: page} for code, page in found.items()]


def on_config(config: Any) -> Any:
    """Put the pages in the place of the folder that the navigation names."""
    config.nav = _filled(config.nav)
    return config


def _filled(entry: Any) -> Any:
    """Return an entry of the navigation with the pages in place of the folder in it."""
    if isinstance(entry, list):
        return [_filled(one) for one in entry]
    if isinstance(entry, dict):
        return {title: _filled(one) for title, one in entry.items()}
    return pages() if entry == FOLDER else entry
