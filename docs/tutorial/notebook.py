"""Run `notebook.ipynb` from its first cell to its last, and store what its cells show.

pip install -e '.[test,tutorial]'
python docs/tutorial/notebook.py
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
CELL = re.compile(r"/\S*/ipykernel_\d+/\d+\.py")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def main() -> None:
    """Run the notebook in a copy of the two folders that it needs, and write it back."""
    notebook = nbformat.read(HERE / "notebook.ipynb", as_version=4)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(HERE.parents[1] / "examples", Path(root, "examples"))
        folder = Path(root, "docs", "tutorial")
        folder.mkdir(parents=True)
        client = NotebookClient(
            notebook,
            timeout=300,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "kedge": {"outputs_of": digest(notebook)},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            clean(output)
    nbformat.write(notebook, HERE / "notebook.ipynb")


def digest(notebook: Any) -> str:
    """Return what tells the cells of a notebook from others."""
    return hashlib.sha256(
        "\0".join(cell["source"] for cell in notebook["cells"]).encode()
    ).hexdigest()


def clean(output: Any) -> None:
    """Take away what only this run had: the files that the kernel made of cells, and addresses of objects."""
    texts = {
        kind: text for kind, text in output.get("data", {}).items() if kind.startswith("text/")
    }
    output.get("data", {}).update({kind: own(text) for kind, text in texts.items()})
    if "text" in output:
        output["text"] = own(output["text"])


def own(text: str) -> str:
    """Return a text without them."""
    return ADDRESS.sub("", CELL.sub("cell", text))


if __name__ == "__main__":
    main()
