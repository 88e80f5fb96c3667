"""Acting as soon as a program has imported a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.program.after_import import AfterImport


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make a module that can be imported, and forget it afterwards."""
    (tmp_path / "kedge_test_heavy.py").write_text(
        "import sys\nSEEN = 1\nWAITING = len(sys.meta_path)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "kedge_test_heavy"
    assert sys.meta_path == before
    sys.modules.pop("kedge_test_heavy", None)


def test_it_acts_once_when_the_module_has_been_imported(heavy: str) -> None:
    """The action comes after the module's last line, once, and not before the import."""
    acted: list[bool] = []
    AfterImport(heavy, lambda: acted.append(hasattr(sys.modules[heavy], "SEEN"))).install()
    before = list(acted)

    importlib.import_module(heavy)
    importlib.reload(sys.modules[heavy])

    assert (before, acted) == ([], [True])


def test_several_can_wait_for_one_module(heavy: str) -> None:
    """Each acts once; the module keeps no sign of any."""
    acted: list[int] = []
    for number in (1, 2, 3):
        AfterImport(heavy, lambda number=number: acted.append(number)).install()

    module = importlib.import_module(heavy)

    assert acted == [1, 2, 3]
    assert module.__spec__ is not None
    assert vars(module.__spec__.loader).keys() == {"name", "path"}


def test_looking_for_the_module_is_not_importing_it(heavy: str) -> None:
    """A program may ask whether there is such a module; the later import still counts."""
    acted: list[str] = []
    AfterImport(heavy, lambda: acted.append(heavy)).install()

    assert importlib.util.find_spec(heavy) is not None
    assert acted == []
    importlib.import_module(heavy)

    assert acted == [heavy]


def test_the_module_keeps_no_sign_of_it(heavy: str) -> None:
    """The module's loader is what it would have been."""
    AfterImport(heavy, lambda: None).install()

    module = importlib.import_module(heavy)

    assert module.__spec__ is not None
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert vars(module.__spec__.loader).keys() == {"name", "path"}


def test_an_import_that_fails_can_be_tried_again(tmp_path: Path, heavy: str) -> None:
    """Only an import that succeeds counts."""
    acted: list[str] = []
    source = tmp_path / f"{heavy}.py"
    good = source.read_text()
    source.write_text("raise RuntimeError('not today')")
    AfterImport(heavy, lambda: acted.append(heavy)).install()
    with pytest.raises(RuntimeError, match="not today"):
        importlib.import_module(heavy)
    assert acted == []

    source.write_text(good)
    importlib.invalidate_caches()
    importlib.import_module(heavy)

    assert acted == [heavy]


def test_a_module_that_is_there_already_is_not_waited_for(heavy: str) -> None:
    """What has been imported is acted on at once."""
    acted: list[str] = []
    importlib.import_module(heavy)

    AfterImport(heavy, lambda: acted.append(heavy)).install()

    assert acted == [heavy]


def test_waiting_can_be_given_up(heavy: str) -> None:
    """After ``remove`` an import is nothing but an import; removing twice does nothing."""
    acted: list[str] = []
    waiting = AfterImport(heavy, lambda: acted.append(heavy))
    waiting.install()
    waiting.remove()
    waiting.remove()

    importlib.import_module(heavy)

    assert acted == []
