"""For all command lines: `kedge` ends with a status of its own, whatever is typed after it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from kedge.cli.main import COMMANDS, build_parser, main
from tests.properties.profiles import fuzzed
from tests.properties.test_hostile_recordings import workplace

WORDS = [type(command).__name__.removesuffix("Command").lower() for command in COMMANDS]
_CHOSEN = next(action for action in build_parser()._actions if action.choices)
#: The options of each command. Those that run, import or wait for something are left out.
OPTIONS = {
    word: [
        name
        for action in parser._actions
        for name in action.option_strings
        if name not in ("-m", "-c", "--open")
    ]
    for word, parser in (_CHOSEN.choices or {}).items()
}
#: Things to name: a recording, other files, folders and nothing; numbers, codes, selectors,
#: queries.
NAMES = [
    "run.kedge", "run.kedge", "run.kedge", "text", "folder", "pipe", "dangling", "loop", "unreadable", "binary", "none", "", ".", "-", "--",
    "0", "1", "-1", "9" * 30, "1e-5", "nan", "inf", "1e999", "NAN-BORN", "nan-born,SPIKE", ",", "**", "*.out", "[", "{", "conv:out", "conv",
    "SELECT 1", "SELECT * FROM stats", "DROP TABLE stats", "SELECT", ";", "x" * 300, "x" * 5000, "a\nb", "\x1b[31m", "\udcff", "ß", "--json",
    "--ranks", "none:none", "no.such:thing", ":", "mean", "topk(5)", "topk(", "a=b=c", "--html", "--parquet", "--force", "-o", "--config",
]  # fmt: skip


def _lines(word: str) -> st.SearchStrategy[list[str]]:
    others = st.sampled_from(NAMES) | st.text(
        st.characters(exclude_characters="/\0.~", codec="utf-8"), max_size=8
    )
    options = st.sampled_from(OPTIONS[word])
    # No recording is served, named or the newest: the command would wait for Ctrl-C. And no program
    # is run.
    named = others.filter(lambda name: not (word == "serve" and name in ("run.kedge", "--", "-o")))
    first = [word, "none"] if word == "serve" else [word]
    return st.lists(named | options, max_size=7).map(lambda rest: [*first, *rest])


lines = st.sampled_from(WORDS).flatmap(_lines) | st.lists(
    st.sampled_from([*NAMES, *WORDS[1:5]]), max_size=4
)


def _place() -> Path:
    place = Path(workplace().name) / "typed"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copytree(place.parent / "sound.kedge", place / "run.kedge")
    (place / "text").write_text("[tool.kedge\n")
    (place / "binary").write_bytes(b"\xff\xfe\x00[tool.kedge]")
    (place / "folder").mkdir()
    os.mkfifo(place / "pipe")
    (place / "dangling").symlink_to("nowhere")
    (place / "loop").symlink_to("loop")
    (place / "unreadable").touch(0)
    return place


@fuzzed
@given(lines)
def test_any_command_line_ends_with_a_status(typed: list[str]) -> None:
    """No argument, option, file or number makes a traceback; what cannot be done is said on stderr."""
    out, told = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    status: Any
    with (
        contextlib.chdir(_place()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(told),
        mock.patch.object(sys, "stdin", io.StringIO("SELECT count(*) FROM sites")),
    ):
        try:
            status = main(typed)
        except SystemExit as ended:
            status = ended.code

    assert status in (None, 0, 1, 2, 3)
    assert told.getvalue() or status != 2
