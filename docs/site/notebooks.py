"""A hook of MkDocs: a page for each notebook, with the outputs that it was saved with.

A notebook is JSON with two kinds of cells and four kinds of outputs, so no converter, and none of
its packages, is needed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

EMPTY_LINES = re.compile(r"\n\s*\n")
TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")


def page(notebook: Path) -> str:
    """Return a notebook as Markdown, with a link to the file itself."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    title, _, rest = "\n\n".join(part for cell in cells for part in _cell(cell)).partition("\n")
    return f"{title}\n\n[The notebook itself]({notebook.name}), with its outputs, opens in Jupyter and VS Code.\n{rest}\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    """Return the parts of a cell: its text, or its code and outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    if cell["cell_type"] == "code" and source.strip():
        return [
            f"```python\n{source}\n```",
            *(shown for output in cell["outputs"] if (shown := _output(output))),
        ]
    return []


def _output(output: dict[str, Any]) -> str:
    """Return an output: a picture, HTML, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        encoded = "".join(data["image/png"]).replace("\n", "")
        return f'<p><img alt="The picture that this code draws" src="data:image/png;base64,{encoded}"></p>'
    for form in ("image/svg+xml", "text/html"):
        if form in data:
            without_gaps = EMPTY_LINES.sub(
                "\n", "".join(data[form])
            )  # which would end the block of HTML
            return f'<div class="output">{without_gaps}</div>'
    text = "".join(output.get("text") or data.get("text/plain") or output.get("traceback") or ())
    return (
        f"```{{.text .output}}\n{TERMINAL_CODE.sub('', text).rstrip()}\n```" if text.strip() else ""
    )


def on_files(files: Any, config: Any) -> Any:
    """Add a page beside each notebook of docs/."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        made = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, made, content=page(Path(file.abs_src_path))))
    return files
