"""What users see: the names that ``import kedge`` gives, and the paragraphs behind messages."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge import errors

NAMES = 30


def _errors():
    """Return every error and warning of Kedge."""
    return [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__]


def _imported_by_root(root):
    """Return the names that ``kedge/__init__.py`` imports."""
    tree = ast.parse((root / "src/kedge/__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }


def test_the_root_gives_at_most_thirty_names():
    """What is offered can be read in one look."""
    assert len(kedge.__all__) == len(set(kedge.__all__)) <= NAMES


def test_the_root_gives_exactly_what_it_imports(root):
    """Nothing is exported by accident, and nothing imported is forgotten."""
    assert sorted(set(kedge.__all__) - {"__version__"}) == sorted(_imported_by_root(root))
    assert [name for name in kedge.__all__ if not hasattr(kedge, name)] == []


def test_the_root_holds_no_logic(root):
    """The root package only collects: imports, ``__all__``, the version."""
    tree = ast.parse((root / "src/kedge/__init__.py").read_text(encoding="utf-8"))
    logic = [
        type(node).__name__
        for node in tree.body
        if not isinstance(node, (ast.Expr, ast.ImportFrom, ast.Import, ast.Assign))
    ]

    assert logic == []


def test_every_error_has_a_slug_of_its_own():
    """A slug leads to one paragraph."""
    slugs = [c.__dict__.get("slug") for c in _errors()]

    assert None not in slugs
    assert len(set(slugs)) == len(slugs)


def test_every_error_is_in_the_tree_of_the_module():
    """The tree at the top of errors.py is complete, and shows each error below its parent."""
    drawn = {}
    above = []
    for indent, name in re.findall(r"^([ │├└─]*)(Kedge\w+|[A-Z]\w+)\b(?:  |$)", inspect.getdoc(errors), re.MULTILINE):
        del above[len(indent) // 4 :]
        drawn[name] = above[-1] if above else None
        above.append(name)
    real = {c.__name__: c.__bases__[0].__name__ for c in _errors()}

    assert {name: parent if parent else real[name] for name, parent in drawn.items()} == real


def test_every_error_has_a_paragraph(root):
    """docs/messages.md explains every error and warning under its slug, and no other."""
    headings = re.findall(r"^## (\S+)$", (root / "docs/messages.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(headings) == sorted(c.slug for c in _errors())


@pytest.mark.parametrize("folder", ["report", "rules", "store"])
def test_a_recording_is_read_without_torch(folder, root):
    """What reads recordings, judges and draws them starts without torch in the process."""
    files = sorted((root / "src/kedge" / folder).glob("*.py"))
    modules = [".".join(("kedge", folder, path.stem)) for path in files if path.stem != "__init__"]
    assert modules
    loaded = (
        "import sys, types; root = types.ModuleType('kedge'); root.__path__ = [sys.argv[1]]; sys.modules['kedge'] = root\n"
        "import importlib; [importlib.import_module(name) for name in sys.argv[2:]]; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", loaded, str(Path(root, "src/kedge")), *modules]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
