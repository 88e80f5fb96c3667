"""``kedge diff``: what it prints, and the status it ends with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.store.writing.folder import create, join
from tests.compare.stories import NET, Layer, Story, from_step

MANIFEST = {"kedge": "0.1.0", "command": ["train.py"], "torch": "2.13.0", "device": "cpu"}
Write = Callable[..., str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal wide enough for the long names of temporary folders."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Write a run to disk, and give its path."""

    def write(name: str, **changes: Any) -> str:
        folder = tmp_path / f"{name}.kedge"
        with create(folder, MANIFEST, force=False) as writer:
            Story(**changes).write(writer)
        return str(folder)

    return write


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., str]:
    """Write a run of two ranks to disk; the second has another factor."""

    def write(**changes: Any) -> str:
        folder, run = tmp_path / "ranks.kedge", {**MANIFEST, "world": 2, "run": "r", "attempt": 0}
        with create(folder, {**run, "rank": 0}, force=False) as writer:
            Story().write(writer)
            other = join(folder, {**run, "rank": 1})
            assert other is not None
            with other:
                Story(**changes).write(other)
        return str(folder)

    return write


def test_equal_runs_end_with_0(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """No difference: exit status 0, and the line that says so."""
    assert main(["diff", written("a"), written("b")]) == 0
    assert "✓ no difference\n" in capsys.readouterr().out


def test_runs_that_part_end_with_1(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """A difference: exit status 1, why, and where."""
    assert main(["diff", written("a"), written("b", factor=from_step(2, 2.0, "*:update"))]) == 1

    out = capsys.readouterr().out
    assert (
        "✗ another learning rate: the updates of all 3 parameters are 2 times as large in B\n"
        in out
    )
    assert "  first difference: step 2, stem.weight:update" in out


def test_the_tolerance_decides(written: Write) -> None:
    """A difference within the tolerance ends with 0, one beyond it with 1."""
    a, b = written("a"), written("b", factor=from_step(2, 1 + 1e-5, "mid:out"))

    assert main(["diff", a, b]) == 1
    assert main(["diff", a, b, "--tolerance", "1e-6"]) == 1
    assert main(["diff", a, b, "--tolerance", "1e-4"]) == 0


def test_runs_that_cannot_be_compared_end_with_2(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in common: exit status 2, and what to do."""
    assert main(["diff", written("a", steps=[0, 2]), written("b", steps=[1, 3])]) == 2

    assert capsys.readouterr().err == (
        "kedge: cannot compare a.kedge with b.kedge: no step was measured in both (a.kedge has steps 0, 2, b.kedge has "
        "steps 1, 3); record both again with --every 1 --budget none\n"
    )


def test_what_is_no_recording_ends_with_2(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names what is missing."""
    assert main(["diff", written("a"), "no-such.kedge"]) == 2
    assert "no-such.kedge is not a recording" in capsys.readouterr().err


def test_unlike_models_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No site in common: exit status 2, and how many each has."""
    for name, site in (("a", "conv:out"), ("b", "cell:out")):
        with create(tmp_path / f"{name}.kedge", MANIFEST, force=False) as writer:
            writer.sites(
                [{"id": 0, "site": site, "type": site[:4], "shape": [len(name) + ord(name)]}], []
            )
            writer.stats(0, {"site": [0], "count": [1], "sumsq": [1.0]})

    assert main(["diff", str(tmp_path / "a.kedge"), str(tmp_path / "b.kedge")]) == 2
    assert (
        "no site of one could be found in the other (a.kedge has 1 site, b.kedge has 1 site)"
        in capsys.readouterr().err
    )


def test_json_holds_what_is_drawn(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """The object has the verdict, where they part, every module that parts, and the alignment."""
    layers = [replace(n, path="dense", key="mid") if n.path == "mid" else n for n in NET]
    a = written("a")
    b = written(
        "b",
        layers=[*layers[:3], Layer("drop", "Dropout"), *layers[3:]],
        broken=lambda text, step: text == "dense:out" and step == 1,
    )

    assert main(["diff", a, b, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {
        "a",
        "b",
        "parted",
        "headline",
        "tolerance",
        "cause",
        "departures",
        "first",
        "operation",
        "differs",
        "steps",
        "sites",
        "modules",
        "alignment",
    }
    assert (told["a"], told["b"], told["parted"], told["tolerance"]) == (a, b, True, 0.0)
    assert told["cause"]["code"] == "layer"
    assert told["first"] == {
        "step": 0,
        "site": {"a": "act:in", "b": "act:in"},
        **{name: told["first"][name] for name in ("statistic", "a", "b", "apart", "ulps")},
    }
    assert told["steps"] == {"both": [0, 1, 2, 3], "full": 4}
    assert told["alignment"]["renamed"] == [
        {"a": "mid", "b": "dense", "how": "structure", "changed": False}
    ]
    assert told["alignment"]["only_b"] == [{"path": "drop", "type": "Dropout"}]
    dense = next(line for line in told["modules"] if line["module"] == {"a": "mid", "b": "dense"})
    assert (dense["first"]["step"], dense["first"]["apart"], dense["first"]["ulps"]) == (
        1,
        "inf",
        None,
    )


def test_json_of_equal_runs(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing parts: no first parting, and no module."""
    assert main(["diff", written("a"), written("b"), "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["parted"], told["first"], told["modules"]) == (False, None, [])


def test_ranks_that_agree_end_with_0(
    ranks: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks whose data differ and whose parameters do not are in order."""
    run = ranks(factor=from_step(0, 1.3, "*:in", "*:out", "*:out.grad"))

    assert main(["diff", run, "--ranks", "0", "1"]) == 0
    out = capsys.readouterr().out
    assert "✓ the ranks agree in everything that they share\n" in out
    assert f"A  {run} rank 0\n" in out.replace("  train.py", "")


def test_ranks_that_drift_end_with_1(
    ranks: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks whose parameters differ have drifted apart, which is said with the first parameter."""
    run = ranks(factor=from_step(2, 1.01, "mid.weight:param", "*:out"))

    assert main(["diff", run, "--ranks", "0", "1"]) == 1
    out = capsys.readouterr().out
    assert "✗ the ranks drift apart: their parameters differ from step 2 on\n" in out
    assert "first difference: step 2, mid.weight:param" in out


def test_a_rank_that_is_not_there_ends_with_2(
    ranks: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the ranks that there are."""
    assert main(["diff", ranks(), "--ranks", "0", "7"]) == 2
    assert "rank 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["a.kedge"],
        ["a.kedge", "b.kedge", "--ranks", "0", "1"],
        ["a.kedge", "b.kedge", "--tolerance", "much"],
        ["a.kedge", "b.kedge", "--tolerance", "-1"],
        ["a.kedge", "b.kedge", "-o", "page.html"],
        ["a.kedge", "b.kedge", "--json", "--html"],
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that do not go together are refused before anything is read."""
    with pytest.raises(SystemExit) as raised:
        main(["diff", *words])

    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("kedge diff: ")


def test_the_page_is_written_beside_the_first_run(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --html one file is written, whose name has those of both runs; the status is that of the difference."""
    a, b = written("a"), written("b", factor=from_step(1, 1.5, "mid:out"))

    assert main(["diff", a, b + os.sep, "--html"]) == 1
    page = Path(a).with_name("a-b.html")
    assert capsys.readouterr().out.startswith(f"{page}: ")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["diff", a, a, "--html", "-o", str(page.with_name("same.html"))]) == 0
    assert page.with_name("same.html").exists()


def test_a_page_that_cannot_be_written_ends_with_2(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file."""
    a = written("a")

    assert main(["diff", a, a, "--html", "-o", "no/such/folder/page.html"]) == 2
    assert "cannot write no/such/folder/page.html" in capsys.readouterr().err


def test_a_difference_is_read_without_torch(written: Write) -> None:
    """Two recordings are compared, drawn and put on a page in a process that never imports torch."""
    a, b = written("a"), written("b", factor=from_step(1, 1.5, "mid:out"))
    code = (
        "import sys; from kedge.cli.main import main; "
        "print([main(['diff', *sys.argv[1:], *more]) for more in ([], ['--json'], ['--html'])], 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, a, b], capture_output=True, text=True, check=True
    )

    assert ended.stdout.splitlines()[-1] == "[1, 1, 1] False"


def test_the_chosen_modules_are_shown_alone(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the map are of the chosen sites; the verdict and the exit status are of all."""
    a, b = written("a"), written("b", factor=from_step(2, 2.0, "mid:out", "head:out"))
    main(["diff", a, b])
    verdict = capsys.readouterr().out.partition("✗")[2].splitlines()[:2]

    assert main(["diff", a, b, "--sites", "hea"]) == 1

    out = capsys.readouterr().out
    assert out.partition("✗")[2].splitlines()[:2] == verdict
    assert re.findall(r"^(\w+) +2 +out", out, re.MULTILINE) == ["head"]
    assert "sites of 1 module aligned by name" in out


def test_chosen_modules_that_are_equal_are_said_to_be(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs part elsewhere: there is no table, and one line says that these modules do not."""
    a, b = written("a"), written("b", factor=from_step(2, 2.0, "mid:out"))

    assert main(["diff", a, b, "--sites", "stem,relu"]) == 1

    assert "\n2 modules are equal to the last bit in all steps\n" in capsys.readouterr().out


def test_the_object_has_the_chosen_modules(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their lines alone, the common sites counted among them, and the first difference of all."""
    a, b = written("a"), written("b", factor=from_step(2, 2.0, "mid:out", "head:out"))

    assert main(["diff", a, b, "--json", "--sites", "**:out,!mid"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert [line["module"]["a"] for line in found["modules"]] == ["head"]
    assert found["sites"] == 5
    assert found["first"]["site"]["a"] == "mid:out"


def test_a_module_may_be_chosen_by_its_name_in_either_run(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A renamed module is found under both names, on the page too."""
    layers = [
        replace(layer, path="other", key="mid") if layer.path == "mid" else layer for layer in NET
    ]
    a, b = written("a"), written("b", layers=layers, factor=from_step(2, 2.0, "other:out"))

    for name in ("mid", "other"):
        assert main(["diff", a, b, "--json", "--sites", name]) == 1
        assert json.loads(capsys.readouterr().out)["modules"][0]["module"] == {
            "a": "mid",
            "b": "other",
        }
    assert main(["diff", a, b, "--html", "-o", f"{a}.html", "--sites", "other"]) == 1
    page = Path(f"{a}.html").read_text(encoding="utf-8")
    assert 'data-filter="other"' in page
    assert (
        '"other":{"site":"other:out","path":"other","kind":"out","type":"Linear","owner":"other"}'
        in page
    )


def test_a_module_of_one_run_alone_cannot_be_chosen(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has nothing to be compared with, and the answer says so."""
    a, b = written("a", layers=(*NET, Layer("extra", "Tanh", shape=(4, 3)))), written("b")

    assert main(["diff", a, b, "--sites", "extra"]) == 2

    assert '"extra" selects nothing that both recordings have' in capsys.readouterr().err
