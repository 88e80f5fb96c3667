"""Names that load late: ``import kedge`` is enough for all of them, costs little, and shows no others."""

from __future__ import annotations

import rlcompleter
import subprocess
import sys
from importlib import import_module

import pytest

import kedge
from kedge.calls.unknown_names import _MEANT

LATE = ("kedge", "kedge.figures", "kedge.recipes")
LOADED = """
import sys
before = {*sys.modules}
import kedge
print(*sorted({*sys.modules} - before))
"""
PUBLIC_MODULES = """
import kedge
kedge.errors.KedgeError, kedge.recipes.saliency, kedge.figures.feature_maps, kedge.figures.graph.graph
kedge.rules.check, kedge.compare.departures, kedge.testing.assert_unhooked
"""


def test_import_kedge_loads_next_to_nothing():
    """Nothing of Kedge is loaded before it is used, and nothing of the standard library that takes time."""
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)

    assert {*ran.stdout.split()} <= {
        "__future__",
        "importlib",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "kedge",
        "kedge.calls",
        "kedge.calls.late_names",
        "warnings",
    }


def test_import_kedge_is_enough_for_every_public_module():
    """None has to be imported by its own name."""
    subprocess.run([sys.executable, "-c", PUBLIC_MODULES], check=True)


@pytest.mark.parametrize("package", LATE)
def test_dir_lists_what_is_public_and_nothing_else(package):
    """Completion offers each name that there is, and none that is private or another library's."""
    module = import_module(package)
    offered = dir(module)

    assert {*module.__all__} <= {*offered}
    assert [name for name in offered if name.startswith("_")] in ([], ["__version__"])
    assert all(hasattr(module, name) for name in offered)
    assert not {"annotations", "late_names", "TYPE_CHECKING", "calls"} & {*offered}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kedge.rec", "kedge.recipes"),
        ("kedge.recipes.sal", "kedge.recipes.saliency("),
        ("kedge.figures.fea", "kedge.figures.feature_maps("),
        ("kedge.figures.gr", "kedge.figures.graph("),
    ],
)
def test_the_tab_key_completes_names_that_are_not_loaded_yet(typed, offered):
    """In Python's own prompt."""
    complete = rlcompleter.Completer({"kedge": kedge}).complete
    found = [complete(typed, number) for number in range(20)]

    assert offered in found


@pytest.mark.parametrize(
    ("name", "leads_to"),
    [
        ("graph", "kedge.figures.graph(lambda: model(x), model)"),
        ("plot", "kedge.figures draws values"),
        ("load", 'kedge.Recording.open("run.kedge")'),
        ("open", 'kedge.Recording.open("run.kedge")'),
        ("run", "kedge run train.py"),
        ("run_with_cache", "kedge.record()"),
        ("register_forward_hook", "kedge.from_hook(f)"),
        ("save_on_cpu", "kedge.offload(model, to=kedge.Cpu())"),
        ("remove_hooks", "kedge.audit(model).remove()"),
        ("check", "did you mean kedge.rules.check?"),
        ("feature_maps", "did you mean kedge.figures.feature_maps?"),
        ("NoSiteMatched", "did you mean kedge.errors.NoSiteMatched?"),
        ("no_name_like_this", "it has Cpu, Disk"),
        ("recipes.plot", "kedge.figures draws values"),
        ("recipes.hook", "did you mean kedge.hook?"),
        ("recipes.zero_ablate", "did you mean ablate"),
        ("figures.gradcam", "did you mean kedge.recipes.grad_cam?"),
        ("figures.feature_map", "did you mean feature_maps"),
        ("figures.violin", "it has attributions, distributions"),
    ],
)
def test_a_name_that_there_is_not_leads_on(name, leads_to):
    """To the one that is meant: of another module, of a command, or of another tool."""
    module, _, last = f"kedge.{name}".rpartition(".")

    with pytest.raises(AttributeError) as told:
        getattr(import_module(module), last)
    assert str(told.value).startswith(f"module {module!r} has no attribute {last!r}; ")
    assert leads_to in str(told.value)


def test_a_private_name_is_refused_without_a_search():
    """Tools ask every module for names such as ``__wrapped__``, which must load nothing."""
    with pytest.raises(AttributeError, match="^module 'kedge' has no attribute '__wrapped__'$"):
        kedge.__wrapped__  # type: ignore[attr-defined]


def test_no_word_of_another_tool_hides_a_name():
    """A name that Kedge has is found before its list of such words is looked at."""
    assert {*_MEANT} & {name for package in LATE for name in dir(import_module(package))} <= {
        "graph",
        "memory",
    }  # of `kedge.figures`
    assert all("kedge" in text for text in _MEANT.values())
