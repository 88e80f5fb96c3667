"""What users see: the names that ``import kedge`` gives, and the paragraphs behind messages."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys

import pytest

import kedge
from kedge import errors
from kedge.sites.site import KINDS
from kedge.watch.run.options import BEGINNING, ENDING
from kedge.watch.run.summary import CHECKING

NAMES = 33
IMPORT = """
import importlib, sys, types

root = types.ModuleType("kedge")  # stands in for the root package, which collects what does need torch
root.__path__ = [sys.argv[1]]
sys.modules["kedge"] = root
for name in sys.argv[2:]:
    importlib.import_module(name)
print("torch" in sys.modules)
"""


def _errors():
    """Return every error and warning of Kedge."""
    found = [
        c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__
    ]
    return [c for c in found if issubclass(c, BaseException)]


def _declared_by_root(root):
    """Return the names that ``kedge/__init__.pyi`` declares to type checkers, each with its module."""
    tree = ast.parse((root / "src/kedge/__init__.pyi").read_text(encoding="utf-8"))
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: node.module for node in imported for alias in node.names}


def test_the_root_gives_few_names():
    """What is offered can be read in one look."""
    assert len(kedge.__all__) == len(set(kedge.__all__)) <= NAMES, (
        "put another name in its place, or import the new one from its module"
    )


def test_completion_offers_every_name_of_the_root():
    """Also those that are loaded late."""
    assert {*kedge.__all__, "__version__", "errors"} <= {*dir(kedge)}


@pytest.mark.parametrize("name", ["hook", "session", "extract", "record", "measure"])
def test_help_describes_every_argument(name):
    """`help(kedge.hook)` is all that is needed to call it: each argument has its line."""
    function = getattr(kedge, name)
    args = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2]

    assert [
        p
        for p in inspect.signature(function).parameters
        if not re.search(rf"^ +{p}: ", args, re.MULTILINE)
    ] == []


def test_help_says_what_hook_returns_and_raises():
    """The function has the sections of the method that it stands for, and no second copy of them in the source."""
    for hook in (kedge.hook, kedge.Session.hook):
        assert {"Args:", "Returns:", "Raises:"} <= {*(inspect.getdoc(hook) or "").splitlines()}
        assert inspect.isfunction(hook)
    assert "NeverFired" in inspect.getdoc(kedge.session)


def test_the_root_declares_exactly_what_it_loads(root):
    """A type checker and an editor see each name where it is loaded from; none is forgotten, none is made up."""
    loaded = {name: f"kedge.{home}" for home, names in kedge._HOME.items() for name in names}
    modules = dict.fromkeys(kedge._MODULES, "kedge")

    assert _declared_by_root(root) == loaded | modules
    assert sorted(kedge.__all__) == sorted(loaded)
    assert [name for name in kedge.__all__ if not callable(getattr(kedge, name, None))] == [
        "everywhere"
    ]  # a target


def test_the_root_holds_no_logic_but_loading_names_late(root):
    """The root package only collects; nothing is loaded, and least of all torch, before it is used."""
    tree = ast.parse((root / "src/kedge/__init__.py").read_text(encoding="utf-8"))
    logic = [
        node
        for node in tree.body
        if not isinstance(node, (ast.Expr, ast.ImportFrom, ast.Import, ast.Assign))
    ]

    assert logic == []
    imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert imported == ["kedge.calls.late_names"]


def test_reading_a_recording_imports_no_torch():
    """A recording opens on a laptop in a blink."""
    names = "kedge.Recording, kedge.Finding"
    code = f"import sys, kedge, kedge.report.terminal, kedge.rules; {names}; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_there_without_an_import_of_their_own():
    """A program filters a warning of Kedge's before it uses anything else: ``kedge.errors.InTrainingMode``."""
    code = "import warnings, kedge; warnings.simplefilter('ignore', kedge.errors.InTrainingMode)"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_has_a_slug_of_its_own():
    """A slug leads to one paragraph."""
    slugs = [c.__dict__.get("slug") for c in _errors()]

    assert None not in slugs
    assert len(set(slugs)) == len(slugs)


def test_every_error_is_in_the_tree_of_the_module():
    """The tree at the top of errors.py is complete, and shows each error below its parent."""
    drawn = {}
    above = []
    for indent, name in re.findall(
        r"^    ([ │├└─]*)([A-Z]\w+)(?:  |$)", inspect.getdoc(errors), re.MULTILINE
    ):
        del above[len(indent) // 4 :]
        drawn[name] = above[-1] if above else None
        above.append(name)
    real = {
        c.__name__: next(b for b in c.__bases__ if b is not errors._Named).__name__
        for c in _errors()
    }

    assert {name: parent or real[name] for name, parent in drawn.items()} == real


def test_every_error_has_a_paragraph(root):
    """docs/reference/messages.md explains every error and warning under its slug, and no other."""
    headings = re.findall(
        r"^## (\S+)$",
        (root / "docs/reference/messages.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )

    assert sorted(headings) == sorted(c.slug for c in _errors())


def test_every_kind_of_site_is_explained(root):
    """docs/how-to/hooks.md has a row for each that a model has."""
    page = (root / "docs/how-to/hooks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `.*", page, re.MULTILINE)
    kinds = {kind for row in rows for kind in re.findall(r"`[^`:]*:([a-z.]+)", row)}

    assert kinds >= {*KINDS}, "add a row to the table of selectors in docs/how-to/hooks.md"


def test_every_integration_has_an_entry(root, sources):
    """docs/reference/api/integrations.md names each class that users make, and each `export`."""
    page = (root / "docs/reference/api/integrations.md").read_text(encoding="utf-8")
    offered = [
        f"{source.module}.{node.name}"
        for source in sources
        if source.folder == "integrations" and not source.name.endswith("/callback.py")
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) or getattr(node, "name", "") == "export"
    ]

    assert offered
    missing = [name for name in offered if f"::: {name}\n" not in f"{page}\n"]
    assert missing == [], "add `::: NAME` to docs/reference/api/integrations.md"


def test_every_line_of_a_watch_is_explained(root):
    """Each piece of work that may fail inside a program has a row in docs/reference/messages.md, as its line is written."""
    page = (root / "docs/reference/messages.md").read_text(encoding="utf-8")
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("watch", "repro")
        for path in sorted((root / "src/kedge" / folder).rglob("*.py"))
    )
    in_code = re.findall(r"Shield\(\s*\"(.+?)\",\s*\"(.+?)\"", source)

    assert len(in_code) > 3
    for what, instead in [BEGINNING, ENDING, CHECKING, *in_code]:
        assert f"| `{what} failed: CAUSE; {instead}` |" in page
    assert "| `THING cannot be watched: CAUSE; everything else is` |" in page


@pytest.mark.parametrize("folder", ["compare", "report", "rules", "store"])
def test_a_recording_is_read_without_torch(folder, root):
    """What reads recordings, judges and draws them needs no torch in the process."""
    source = root / "src"
    files = [
        path
        for path in sorted((source / "kedge" / folder).rglob("*.py"))
        if path.stem != "__init__"
    ]
    modules = [".".join(path.relative_to(source).with_suffix("").parts) for path in files]
    assert modules
    command = [sys.executable, "-c", IMPORT, str(root / "src/kedge"), *modules]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
