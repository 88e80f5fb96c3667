"""For Kedge's work after a program, the interpreter is as it was before; after that work, it is as the program has left it."""

from __future__ import annotations

import builtins
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from kedge.program.own_imports import OwnImports
from kedge.program.restored import BeforeProgram


def test_what_the_program_replaced_is_back_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions, missing names and the limit of recursion are restored, and then the program's again."""
    before, limit, clock = BeforeProgram(), sys.getrecursionlimit(), time.perf_counter
    opener = builtins.open

    def mine() -> None: ...

    monkeypatch.setattr(builtins, "open", mine)
    monkeypatch.setattr(time, "perf_counter", mine)
    monkeypatch.delattr(json, "dumps")
    try:
        sys.setrecursionlimit(300)
        with before.restored():
            found = (
                builtins.open,
                time.perf_counter,
                json.dumps([1]),
                sys.getrecursionlimit() >= 1000,
            )
        left = sys.getrecursionlimit()
    finally:
        sys.setrecursionlimit(limit)

    assert found == (opener, clock, "[1]", True)
    assert (builtins.open, time.perf_counter, hasattr(json, "dumps"), left) == (
        mine,
        mine,
        False,
        300,
    )


def test_a_folder_that_is_kedges_too_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that Kedge has imported from the program's folder is the same for both, however it was found."""
    (tmp_path / "made_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("made_here")
    imports = OwnImports()
    try:
        imports.set_aside(str(tmp_path), [path for path in sys.path if path != str(tmp_path)])
        with imports.in_force():
            ours = sys.modules.get("made_here")
        assert sys.modules.get("made_here") is ours is module
    finally:
        sys.modules.pop("made_here", None)


def test_each_side_imports_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that Kedge has imported is the program's for the program, and Kedge's again for Kedge; none is lost."""
    import colorsys

    for name in ("colorsys", "sched", "unheard_of"):
        (tmp_path / f"{name}.py").write_text(f"WHO = {name!r}\n")
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path])
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    imports = OwnImports()
    try:
        imports.set_aside(str(tmp_path), path)
        theirs = [__import__(name) for name in ("colorsys", "unheard_of")]
        with imports.in_force():
            ours = [__import__(name) for name in ("colorsys", "sched")]
            with pytest.raises(ModuleNotFoundError, match="No module named 'unheard_of2'"):
                __import__("unheard_of2")
        theirs += [__import__(name) for name in ("colorsys", "sched")]
        sys.modules.pop("json")
        with imports.filled():
            assert sys.modules["json"] is json
        assert "json" not in sys.modules
    finally:
        sys.modules.update({"colorsys": colorsys, "json": json})
        for name in ("sched", "unheard_of"):
            sys.modules.pop(name, None)

    assert [module.WHO for module in theirs] == ["colorsys", "unheard_of", "colorsys", "sched"]
    assert ours[0] is colorsys
    assert not hasattr(ours[1], "WHO")
    assert imports not in sys.meta_path


def test_two_threads_of_kedge_import_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them ends first, the other one's modules stay Kedge's, and then all are the program's again."""
    import colorsys

    (tmp_path / "colorsys.py").write_text("WHO = 'the program'\n")
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path])
    imports, begun, may_end = OwnImports(), threading.Event(), threading.Event()

    def other() -> None:
        with imports.in_force():
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    try:
        imports.set_aside(str(tmp_path), path)
        theirs = __import__("colorsys")
        with imports.in_force():
            thread.start()
            begun.wait()
        here = [__import__("colorsys")]
        may_end.set()
        thread.join()
        after = __import__("colorsys")
    finally:
        may_end.set()
        sys.modules["colorsys"] = colorsys

    assert here == [colorsys]
    assert after is theirs is not colorsys
    assert imports not in sys.meta_path
