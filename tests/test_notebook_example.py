"""The notebook of examples/ runs from its first cell to its last, and is stored without what a run leaves."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
SHOWS = ("_repr_html_", "_repr_svg_", "_repr_png_")


@pytest.fixture(scope="module")
def cells():
    """The cells."""
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The examples in an empty folder, from which a notebook imports."""
    shutil.copytree(
        EXAMPLES, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run(source, names, where):
    """Run a cell as a notebook does: its last expression is what it shows."""
    tree = ast.parse(source, where)
    last = (
        ast.Expression(tree.body.pop().value)
        if tree.body and isinstance(tree.body[-1], ast.Expr)
        else None
    )
    exec(compile(tree, where, "exec"), names)
    return None if last is None else eval(compile(last, where, "eval"), names)


def shown(value):
    """Return what a notebook would show of a value, first what is richest."""
    for name in SHOWS:
        rich = getattr(value, name, lambda: None)()
        if rich is not None:
            return name
    return "" if value is None else "text"


def test_the_notebook_runs(cells, folder):
    """Every cell runs in the order of the notebook, and what it shows is a table, a picture or a word."""
    names = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            found.append(shown(run("".join(cell["source"]), names, f"notebook.ipynb[{number}]")))

    assert found[0] == ""
    assert set(found[1:]) <= {*SHOWS, "text"}
    assert found.count("_repr_png_") == 6
    assert found.count("_repr_html_") >= 6
    assert names["features"].model is names["model"]
    assert names["whole"] < 0.2
    assert names["maps"].shape == torch.Size([4, 1, 8, 8])


def test_the_notebook_is_stored_without_what_a_run_leaves(cells):
    """No output, no count and no path of a machine is stored, and each cell has a name of its own, as the format asks."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))

    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    assert str(Path.home()) not in NOTEBOOK.read_text(encoding="utf-8")
    assert "%" not in "".join(line[0] for cell in code for line in cell["source"])
