"""The page as text: one HTML file with everything in it, which opens from disk without any request.

# Note [Nothing from outside]
The page contains its scripts and styles; its content security policy names them by their hashes and
allows nothing else: no request, no other script. So a name in a recording that looks like markup
does no harm, even if the page's script had a bug.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from kedge.report.page.document import Document, condense
from kedge.report.shown_run import ShownRun
from kedge.sites.site import ALL_KINDS, OF_OPERATION, PARAM_KINDS

#: The page's own scripts, each after those it imports from.
SCRIPTS = (
    "elements.js",
    "numbers.js",
    "colours.js",
    "filters.js",
    "recording.js",
    "state.js",
    "theme.js",
    "ranks.js",
    "crosses.js",
    "charts.js",
    "head.js",
    "findings.js",
    "quantities.js",
    "cells.js",
    "steps.js",
    "heatmap.js",
    "depth.js",
    "curves.js",
    "held.js",
    "timeline.js",
    "flame.js",
    "memory.js",
    "saved.js",
    "tree.js",
    "panel.js",
    "filter_field.js",
    "keys.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "page.css", "parts.css", "memory.css")
HEAD = "head.html"
LIBRARY = "uPlot.iife.min.js"
LICENCE = "uPlot.LICENSE.txt"

_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=const|let|function|class|async)", re.MULTILINE)


def render_page(shown_run: ShownRun, *, chosen: str = "") -> str:
    """Return a recording as an HTML page.

    Args:
        shown_run: The recording with its findings.
        chosen: The filter with which the page opens.
    """
    return page_of(condense(shown_run), chosen=chosen)


def page_of(document: Document, *, live: bool = False, chosen: str = "") -> str:
    """Return the page with its content.

    Args:
        document: The content.
        live: Whether the page asks its server for news.
        chosen: The filter with which the page opens.
    """
    return assembled(asset("page.html"), script(), document, live=live, chosen=chosen)


def assembled(
    body: str,
    code: str,
    document: Document,
    *,
    live: bool = False,
    more_style: str = "",
    chosen: str = "",
) -> str:
    """Return a page: its head, which all pages share, and its body with its content and script.

    Args:
        body: The body, with names in double braces for the parts.
        code: The page's script.
        document: The content.
        live: Whether the page asks its server for news.
        more_style: Styles of this page's own parts.
        chosen: The filter with which the page opens.
    """
    style = stylesheet() + more_style
    library = asset(LIBRARY)
    kind = "file"
    connect = "'none'"
    if live:
        kind = "live"
        connect = "'self'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(code)}; "
        f"style-src {_hash(style)}; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(document.described["run"]["name"] or "recording"),
        "live": kind,
        "chosen": html.escape(chosen, quote=True),
        "style": style,
        "licence": _comment(asset(LICENCE)),
        "library": library,
        "script": code,
        "document": inert(document.described),
        "tables": "\n".join(_table(name, text) for name, text in document.tables.items()),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset(HEAD) + body)


def news_of(document: Document) -> str:
    """Return the new content for a live page, as JSON."""
    news = {"document": document.described, "tables": document.tables}
    return json.dumps(news, allow_nan=False)


def inert(value: Any) -> str:
    """Return JSON that cannot end a script element, whatever names it contains."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(name: str, text: str) -> str:
    name = html.escape(name, quote=True)
    return f'<script type="text/plain" id="table-{name}">{text}</script>'


@cache
def script() -> str:
    """Return the page's script: its modules as one, in which each name is defined once."""
    return bundled(SCRIPTS)


def bundled(names: Iterable[str], *more: str) -> str:
    """Return one script of some of the page's modules, and of more texts that import from them.

    It begins with the kinds of sites, which the page's filter knows by these names.
    """
    kinds = (
        f"const FILTER_KINDS = {json.dumps(ALL_KINDS)};\n"
        f"const OF_OPERATION = {json.dumps(OF_OPERATION)};\n"
        f"const OF_PARAMETER = {json.dumps(PARAM_KINDS)};\n"
    )
    texts = [*map(asset, names), *more]
    bodies = [_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts]
    return "\n" + "\n".join([kinds, *bodies])


@cache
def stylesheet() -> str:
    """Return all styles of the page."""
    return "\n" + "\n".join(asset(name) for name in STYLES)


def asset(name: str, folder: str = __package__) -> str:
    """Return the text of a file that a page is made of, from the folder ``assets`` of a package."""
    return (resources.files(folder) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _comment(text: str) -> str:
    return text.replace("--", "- -")
