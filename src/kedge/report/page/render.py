"""The page as text: one HTML file with everything in it, which opens from disk and asks nobody for anything.

# Note [Nothing from outside]
The page's scripts and styles stand in it, and its content security policy names them by their hashes and allows
nothing else: no request, no other script. So a name in a recording that looks like markup stays a name even if the
page's script made a mistake.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from kedge.report.page.document import Document, condense
from kedge.rules.rule import Finding, Rule
from kedge.store.recording import Recording

#: The page's own scripts, each after those it imports from.
SCRIPTS = (
    "elements.js",
    "numbers.js",
    "colours.js",
    "globs.js",
    "recording.js",
    "state.js",
    "ranks.js",
    "charts.js",
    "head.js",
    "findings.js",
    "quantities.js",
    "cells.js",
    "heatmap.js",
    "depth.js",
    "curves.js",
    "saved.js",
    "tree.js",
    "panel.js",
    "keys.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "page.css", "parts.css")
LIBRARY = "uPlot.iife.min.js"
LICENCE = "uPlot.LICENSE.txt"

_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=const|let|function|class|async)", re.MULTILINE)


def render_page(recording: Recording, findings: Sequence[Finding], rules: Sequence[Rule] = ()) -> str:
    """Draw a recording as an HTML page.

    Args:
        recording: What was seen.
        findings: What the rules say of it, the worst first.
        rules: The rules that were run.

    Returns:
        The whole page.
    """
    return page_of(condense(recording, findings, rules))


def page_of(document: Document, *, live: bool = False) -> str:
    """Put a condensed recording into the page.

    Args:
        document: What the page shows.
        live: Whether the page asks the server that it came from for news.
    """
    return assembled(_asset("page.html"), script(), document, live=live)


def assembled(template: str, code: str, document: Document, *, live: bool = False) -> str:
    """Put a document and a script into the frame of a page.

    Args:
        template: The frame, with names in double braces where the parts go.
        code: The page's script.
        document: What the page shows.
        live: Whether the page asks the server that it came from for news.
    """
    style, scripts = stylesheet(), (_asset(LIBRARY), code)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        f"img-src data:; connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(document.described["run"]["name"] or "recording"),
        "live": "live" if live else "file",
        "style": style,
        "licence": _comment(_asset(LICENCE)),
        "library": scripts[0],
        "script": scripts[1],
        "document": inert(document.described),
        "tables": "\n".join(_table(name, text) for name, text in document.tables.items()),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def news_of(document: Document) -> str:
    """Give what a live page asks for when the recording has grown."""
    return json.dumps({"document": document.described, "tables": document.tables}, allow_nan=False)


def inert(value: Any) -> str:
    """Write JSON that ends no script element, whatever the names in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(name: str, text: str) -> str:
    return f'<script type="text/plain" id="table-{html.escape(name, quote=True)}">{text}</script>'


@cache
def script() -> str:
    """Give the page's own script: its modules as one, in which each name is defined once."""
    return bundled(SCRIPTS)


def bundled(names: Iterable[str], *more: str) -> str:
    """Make one script of some of the page's own, and of the texts of others that import from them."""
    bodies = (_EXPORT.sub("", _IMPORT.sub("", text)) for text in (*map(_asset, names), *more))
    return "\n" + "\n".join(bodies)


@cache
def stylesheet() -> str:
    """Give all styles of the page."""
    return "\n" + "\n".join(_asset(name) for name in STYLES)


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _comment(text: str) -> str:
    return text.replace("--", "- -")
