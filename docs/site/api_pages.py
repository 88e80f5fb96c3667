"""A hook of MkDocs for the API pages: search finds them first, and the name of an error leads to its paragraph.

The paragraphs are those of docs/reference/messages.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MESSAGES = Path(__file__).parents[1] / "reference/messages.md"
NAME = re.compile(r"<code>(?:<span[^>]*>)?(?P<name>[A-Z][A-Za-z]+)(?:</span>)?</code>")
IN_TREE = re.compile(r"(?<=── )(?P<name>[A-Z]\w+)")


def slugs() -> set[str]:
    """Return the headings of the page of errors and warnings."""
    return set(re.findall(r"^## (\S+)$", MESSAGES.read_text(encoding="utf-8"), re.MULTILINE))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Tell the search about an API page; the tree of errors would hide every other result."""
    if page.file.src_uri == "reference/api/errors.md":
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("reference/api/"):
        page.meta["search"] = {"boost": 2}
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the names of errors on an API page."""
    if not page.file.src_uri.startswith("reference/api/"):
        return html
    known = slugs()

    def linked(found: re.Match[str]) -> str:
        slug = re.sub(r"(?<!^)(?=[A-Z])", "-", found["name"]).lower()
        return f'<a href="../messages.html#{slug}">{found[0]}</a>' if slug in known else found[0]

    return IN_TREE.sub(linked, NAME.sub(linked, html))
