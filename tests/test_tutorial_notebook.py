"""The notebook of docs/tutorial/ runs from its first cell to its last, and what is stored with its cells is theirs."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from tests import forked
from tests.test_notebook_example import run, shown

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/tutorial/notebook.ipynb"
AGAIN = "the cells have changed: python docs/tutorial/notebook.py stores what they show now"


@pytest.fixture(scope="module")
def notebook():
    """The notebook as it is stored."""
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty `docs/tutorial` beside a copy of the examples."""
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "docs/tutorial").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs/tutorial")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    yield
    sys.modules.pop("digits", None)


def command(line):
    """Run a line that begins with an exclamation mark, as a shell would."""
    name, *words = shlex.split(line[1:])
    ended = forked.run(
        [sys.executable, str(Path(sys.executable).with_name(name)), *words], cwd=Path.cwd()
    )
    assert ended.returncode in {0, 1}, f"{line}\n{ended.stderr}"


def stored(cell):
    """Return the method by which the stored result of a cell was made; empty if it has none."""
    found = [
        output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result"
    ]
    methods = {"text/html": "_repr_html_", "image/png": "_repr_png_", "text/plain": "text"}
    return next((method for kind, method in methods.items() if found and kind in found[0]), "")


def test_the_cells_run_and_show_what_is_stored(notebook, folder):
    """No cell fails, and each shows a result of the kind that is stored with it."""
    names = {"__name__": "__main__"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number, cell in enumerate(notebook["cells"]):
            source = "".join(cell["source"])
            if source.startswith("!"):
                command(source)
            elif cell["cell_type"] == "code":
                assert shown(run(source, names, f"notebook.ipynb[{number}]")) == stored(cell), (
                    source
                )

    assert [each.category.__name__ for each in said] == ["NeverFiredWarning"]
    assert names["run"].findings() == ()
    assert names["found"][0].equal(names["exact"][0])


def test_what_is_stored_is_of_these_cells(notebook):
    """Whoever changes a cell runs the notebook again; no output is an error or names a folder of the machine."""
    sources = "\0".join("".join(cell["source"]) for cell in notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]

    assert (
        notebook["metadata"]["kedge"]["outputs_of"] == hashlib.sha256(sources.encode()).hexdigest()
    ), AGAIN
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not [
        path for path in (str(ROOT), str(Path.home()), "ipykernel") if path in json.dumps(outputs)
    ]
