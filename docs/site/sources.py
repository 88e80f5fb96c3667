"""A hook of MkDocs: pages whose source is outside of docs/, and links from pages to files of the repository.

A link is written as GitHub wants it, relative to the file in which it stands. On the site it leads
to the page that is made of its target, or, if there is none, to the target on GitHub. Comments,
which tests read, are left out.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "benchmarks/RESULTS.md": "explanation/measurements.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "CHANGELOG.md": "reference/changes.md",
    "README.md": "index.md",
}
"""The pages of files outside of docs/; for README.md, the page that stands in its place."""

FENCE = re.compile(r"^(```+|~~~+).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n+", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]+)?(?=\))")


def repository() -> str:
    """Return the address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Homepage"])


def source_of(page: str) -> str:
    """Return the path of a page's source, from the root of the repository."""
    return next(
        (source for source, made in ELSEWHERE.items() if made == page != "index.md"), f"docs/{page}"
    )


def address(target: str, page: str) -> str:
    """Return the address of a file or folder of the repository, as a page of the site links to it."""
    path = os.path.normpath(Path(source_of(page)).parent / target)
    if (path.startswith("docs/") and not path.endswith(".py")) or path in ELSEWHERE:
        made = ELSEWHERE.get(path, path.removeprefix("docs/"))
        made = made.removesuffix(".ipynb") + ".md" if made.endswith(".ipynb") else made
        return os.path.relpath(made, Path(page).parent)
    if not (ROOT / path).exists():
        return target  # reported by the strict build
    return f"{repository()}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def for_site(text: str, page: str) -> str:
    """Return the text of a page with the links of the site, and without comments; what is in fences stays."""

    def changed(prose: str) -> str:
        prose = COMMENT.sub("", prose)
        return LINK.sub(lambda link: address(link[1], page) + (link[2] or ""), prose)

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [changed(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, changed(text[end:])])


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files outside of docs/."""
    for source, page in ELSEWHERE.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Make an empty corner of a table an ordinary cell: a heading without text says nothing to a screen reader."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page; the home page has no list of its own two parts beside it."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return for_site(markdown, page.file.src_uri)
