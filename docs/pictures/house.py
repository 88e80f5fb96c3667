"""The picture of the source tree, the import order and the lists of stays in docs/explanation/how-it-works.md.

    python docs/pictures/house.py

The lines are those of the first contract in pyproject.toml; what stands in a box is the first
sentence of the docstring of that folder or file.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/how-it-works.md"
PICTURE = ROOT / "docs/pictures/house.svg"
BLOCK = re.compile(r"(<!-- import order, from pyproject.toml -->\n\n```\n).*?(```\n)", re.DOTALL)

WIDTH, GAP, PAD = 1000, 10, 10
TITLE, LINE = 18, 15
CHARACTER = 6.3
"""The width of a character of the text, in pixels, at 12 pixels; a little more than that of common fonts."""

STYLE = """
  text { font-family: ui-sans-serif, system-ui, sans-serif; font-size: 12px; fill: #333c47 }
  .name { font-weight: 600; font-size: 14px; fill: #10151c }
  rect { fill: #f4f6f9; stroke: #c3ccd8 }
  .private rect { fill: #fff6e5; stroke: #e3c58a }
  @media (prefers-color-scheme: dark) {
    text { fill: #b9c3cf } .name { fill: #eef2f6 }
    rect { fill: #1b222c; stroke: #3a4655 }
    .private rect { fill: #2e2718; stroke: #6b5a2e }
  }
"""


def layers() -> list[list[str]]:
    """Return the lines of the contract, the outermost first, each as the names that stand in it."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    lines = contract["contracts"][0]["layers"]
    return [[name.strip(" ()") for name in re.split(r"[|:]", line)] for line in lines]


def order() -> str:
    """Return the import order as plain text, a line for each layer."""
    return "".join(" | ".join(names) + "\n" for names in layers())


def purpose(name: str) -> str:
    """Return the first sentence of the docstring of a folder or file of ``src/kedge``."""
    folder = ROOT / "src/kedge" / name
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(
        r"(?<=[^.])\.(?:\s|$)", text.split("\n\n")[0].replace("\n", " "), maxsplit=1
    )[0]
    return sentence.replace("``", "")


def box(name: str, x: float, y: float, width: float, lines: list[str], height: float) -> str:
    """Return one folder or file as SVG."""
    texts = [f'<text class="name" x="{x + PAD:g}" y="{y + PAD + 12:g}">{escape(name)}</text>']
    texts += [
        f'<text x="{x + PAD:g}" y="{y + PAD + 12 + TITLE + i * LINE:g}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    kind = ' class="private"' if name == "torch_internals" else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    return f"<g{kind}>{shape}{''.join(texts)}</g>"


def picture() -> str:
    """Return the picture: a row for each layer, a box for each name in it."""
    rows, y = [], float(GAP)
    for names in layers():
        width = (WIDTH - GAP * (len(names) + 1)) / len(names)
        texts = {
            name: textwrap.wrap(purpose(name), int((width - 2 * PAD) / CHARACTER)) for name in names
        }
        height = 2 * PAD + TITLE + LINE * max(map(len, texts.values()))
        rows += [
            box(name, GAP + i * (width + GAP), y, width, texts[name], height)
            for i, name in enumerate(names)
        ]
        y += height + GAP
    label = 'role="img" aria-label="The folders of src/kedge"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" {label}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *rows, "</svg>\n"])


def page() -> str:
    """Return docs/explanation/how-it-works.md with the import order of today."""
    return BLOCK.sub(lambda found: found[1] + order() + found[2], PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    import ways

    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(ways.filled(page()), encoding="utf-8")
