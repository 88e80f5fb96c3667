"""``kedge report`` with several recordings: the table in the terminal, as JSON, and the files of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kedge.cli.main import main
from tests.report.runs.conftest import Written

Captured = pytest.CaptureFixture[str]


def test_a_line_for_each_run(written: Written, inside: Path, capsys: Captured) -> None:
    """Options in which they differ are columns, the others stand above; what breaks is marked in its course."""
    written("slow", "--lr", "0.1", "--steps", "12")
    written("fast", "--lr", "1", "--steps", "12", rate=0.5, steps=20, bad=14)
    assert main(["report", "slow", "fast.kedge"]) == 0
    out = capsys.readouterr().out
    head, slow, fast = (
        next(line for line in out.splitlines() if line.startswith(word))
        for word in ("run ", "slow", "fast")
    )
    assert "the same in all: /home/ada/secret/train.py" in out
    assert "--steps 12" in out
    assert "--lr" in head
    assert "--steps" not in head
    assert " 0.1 " in slow
    assert " nan " in fast
    assert "✗✗" in fast
    assert "✗✗" not in slow
    # Both are drawn over twenty steps, and from the same largest value.
    assert slow.split("█")[0] == slow.split("█")[0].rstrip("▁▂▃▄▅▆▇")


def test_a_folder_is_all_recordings_in_it(written: Written, inside: Path, capsys: Captured) -> None:
    """Those that cannot be read are named with their reason, and the rest is shown; a recording counts once."""
    written("sweep/b")
    written("sweep/a", ended=False)
    (inside / "sweep" / "torn.kedge").mkdir()
    (inside / "sweep" / "notes").mkdir()
    assert main(["report", "sweep", "sweep/a", "gone", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in found["runs"]] == ["b", "a"]
    assert [one["recording"] for one in found["left_out"]] == ["sweep/torn.kedge", "gone"]
    assert all(one["reason"] for one in found["left_out"])
    assert found["runs"][0]["options"]["program"] == "/home/ada/secret/train.py"


def test_no_readable_recording_is_an_error(inside: Path, capsys: Captured) -> None:
    """All are named."""
    assert main(["report", "one", "two"]) == 2
    err = capsys.readouterr().err
    assert "one is not a recording" in err
    assert "two is not a recording" in err


@pytest.mark.parametrize("option", ["--headroom", "--saved", "--all", "--sites=x"])
def test_options_of_a_single_run_are_refused(option: str, inside: Path, capsys: Captured) -> None:
    """Each of these is about one recording."""
    with pytest.raises(SystemExit):
        main(["report", "a", "b", option])
    assert "name one" in capsys.readouterr().err


def test_the_page_stands_beside_the_first_run_and_links_to_pages_beside_it(
    written: Written, inside: Path, capsys: Captured
) -> None:
    """A run without a page of its own, or with one elsewhere, has no link."""
    written("sweep/a")
    written("sweep/b", "--lr", "1")
    assert main(["report", "sweep/a", "--html"]) == 0
    assert main(["report", "sweep", "--html"]) == 0
    assert "sweep/runs.html" in capsys.readouterr().out
    page = (inside / "sweep" / "runs.html").read_text()
    assert '"page":"a.html"' in page
    assert page.count('"page":null') == 1
    assert main(["report", "sweep", "--html", "-o", "all.html"]) == 0
    assert '"page":"a.html"' not in Path("all.html").read_text()


def test_a_run_that_is_left_out_does_not_lend_its_page_to_the_next(
    written: Written, inside: Path
) -> None:
    """Each run links to its own page though a recording before it cannot be read."""
    for name in ("a", "b", "c"):
        written(name)
        assert main(["report", name, "--html"]) == 0
    (inside / "b.kedge" / "manifest.json").write_text("{")
    assert main(["report", "a", "b", "c", "--html"]) == 0
    page = (inside / "runs.html").read_text()
    assert '"page":"a.html"' in page
    assert '"page":"c.html"' in page
    assert '"page":"b.html"' not in page


def test_a_page_without_source_tells_no_folder_and_no_option(
    written: Written, inside: Path
) -> None:
    """Names are those of the recordings, with a number where two have the same."""
    written("one/run", "--token", "hush")
    written("two/run", "--token", "hash")
    written("two/torn")
    (inside / "two" / "torn.kedge" / "manifest.json").write_text("{")
    assert main(["report", "one/run", "two", "--html", "--no-source", "-o", "shared.html"]) == 0
    page = Path("shared.html").read_text()
    for secret in ("hush", "secret", "--token", "one/", "two/", str(inside)):
        assert secret not in page
    for said in ('"run"', '"run (2)"', '"torn"', "train.py"):
        assert said in page


def test_compare_is_a_word_for_it(capsys: Captured) -> None:
    """There is one command for it; who types another learns its name."""
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", "c"])
    assert "did you mean: kedge report a b c" in capsys.readouterr().err
