"""A hook of MkDocs for the API pages: search finds them first, and the name of an error leads to its paragraph.

The paragraphs are those of docs/reference/messages.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MESSAGES = Path(__file__).parents[1] / "reference/messages.md"
IN_TEXT = re.compile(r"<code>(?P<name>[A-Z][A-Za-z]+)</code>")
IN_TREE = re.compile(r"(?<=── )(?P<name>[A-Z]\w+)")


def errors() -> dict[str, str]:
    """Return the names of the errors that have a paragraph, each with its heading."""
    slugs = re.findall(r"^## (\S+)$", MESSAGES.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"(?:^|-)(\w)", lambda letter: letter[1].upper(), slug): slug for slug in slugs}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Tell the search about an API page; the tree of errors would hide every other result."""
    if page.file.src_uri == "reference/api/errors.md":
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("reference/api/"):
        page.meta["search"] = {"boost": 2}
    return markdown


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Link the names of errors on an API page, those that are types by the plugin that links other types, too."""
    known = errors()
    if page.file.src_uri == "reference/messages.md":
        for name, slug in known.items():
            config.plugins["autorefs"].register_anchor(page, f"kedge.errors.{name}", slug)
    if not page.file.src_uri.startswith("reference/api/"):
        return html

    def linked(found: re.Match[str]) -> str:
        slug = known.get(found["name"])
        return f'<a href="../messages.html#{slug}">{found[0]}</a>' if slug else found[0]

    return IN_TREE.sub(linked, IN_TEXT.sub(linked, html))
