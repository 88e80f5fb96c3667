"""``--sites``: one option and one language for every command that shows a part of a recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kedge.cli.main import build_parser, main

Recorded = Callable[..., Path]

#: The commands with the option; `extract` has one of its own, for hooks, and `check` none: a
#: finding is about many sites.
WITH_SITES = ("run", "attach", "sites", "report", "diff", "serve", "export", "query")


def test_the_option_reads_the_same_everywhere() -> None:
    """Every command that has it says in the same words what may be typed."""
    own = build_parser().own
    helps = {
        name: next(o.help for o in own[name].arguments if "--sites" in o.option_strings)
        for name in WITH_SITES
    }

    assert {str(text).partition(", such as")[2] for text in helps.values()} == {
        " 'encoder.**' or '**{Linear}'; attn means '**.attn*' (default: all)"
    }


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("lo", ["log:in", "log:out"]),
        ("**:out", ["log:out", ":out"]),
        ("**,!log", [":out"]),
        ("**{Net}", [":out"]),
    ],
)
def test_a_query_sees_the_chosen_sites(
    text: str, sites: list[str], recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables of sites and of statistics hold them alone; the findings are those of the whole run."""
    run = str(recorded(broken_at=10))
    for table in ("sites", "stats"):
        assert (
            main(["query", run, f"SELECT DISTINCT site FROM {table}", "--json", "--sites", text])
            == 0
        )
        rows = {row["site"] for row in json.loads(capsys.readouterr().out)}
        assert rows <= set(sites)
        assert rows == set(sites) or table == "stats"

    assert main(["query", run, "SELECT code FROM findings", "--json", "--sites", text]) == 0
    assert {"code": "NAN-BORN"} in json.loads(capsys.readouterr().out)


def test_an_export_holds_the_chosen_sites(recorded: Recorded, tmp_path: Path) -> None:
    """The file has their rows and no others."""
    file = tmp_path / "part.parquet"

    assert (
        main(["export", str(recorded()), "--parquet", "-o", str(file), "--sites", "log:out"]) == 0
    )

    assert set(pq.read_table(file).column("site").to_pylist()) == {"log:out"}


@pytest.mark.parametrize("runs", [1, 2])
def test_a_page_opens_with_the_filter(runs: int, recorded: Recorded, tmp_path: Path) -> None:
    """The page of one run or of several has all sites, and its filter is what was typed."""
    names = [str(recorded().rename(tmp_path / f"{number}.kedge")) for number in range(runs)]

    assert (
        main(
            [
                "report",
                *names,
                "--html",
                "-o",
                str(tmp_path / "x.html"),
                "--sites",
                "**{Log,Net}:out,!lo",
            ]
        )
        == 0
    )

    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert 'data-filter="**{Log,Net}:out,!lo"' in page
    assert '"site":"log:in"' in page


def test_a_filter_cannot_end_the_attribute_of_the_page(recorded: Recorded, tmp_path: Path) -> None:
    """What has a meaning in HTML is escaped."""
    file = tmp_path / "x.html"

    assert (
        main(["report", str(recorded()), "--html", "-o", str(file), "--sites", """log,!"><b>'&"""])
        == 0
    )

    page = file.read_text(encoding="utf-8")
    assert 'data-filter="log,!&quot;&gt;&lt;b&gt;&#x27;&amp;"' in page
