"""The page about the format: its examples run, and its tables are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest

from kedge.store.columns import BINARY, COLUMNS
from kedge.store.recording import STATISTICS, SiteInfo

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recording.md"


def test_the_examples_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python blocks, run in order, print what stands behind each print."""
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    )
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(said):
        exec(compile(code, str(PAGE), "exec"), names)

    expected = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(expected) == 7
    assert said.getvalue().splitlines() == expected


def _cells(heading: str, title: str) -> list[str]:
    """Return the first cells of the table that starts with a title, under a heading."""
    text = PAGE.read_text().split(f"## {heading}\n")[1]
    rows = text.split(f"| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_every_column_is_on_the_page() -> None:
    """The table of columns has each column of the file, in its order."""
    assert _cells("The statistics", "column") == [*COLUMNS, *BINARY]


def test_every_statistic_is_on_the_page() -> None:
    """The table of derived statistics has each name that a series can be asked for."""
    assert sorted(_cells("The statistics", "name")) == sorted(STATISTICS)


def test_every_key_of_a_site_is_on_the_page() -> None:
    """The table of a site's keys has each one that is read."""
    fields = [field.name.replace("sources", "from") for field in dataclasses.fields(SiteInfo)]

    assert _cells("The JSON files", "key") == fields
