"""Texts of programs on a terminal and in a shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kedge.shown_text import typed, visible

HOSTILE = [
    "a b",
    "a;b",
    "$(x)",
    "`x`",
    "it's",
    'say "x"',
    "a\nb",
    "\x1b[31mred",
    "\\n",
    "*",
    "é",
    "\u2028",
    "",
    "-o",
    "a\rb'\\",
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs Bash")
def test_a_shell_reads_a_typed_command_as_its_words() -> None:
    """Whatever a name holds, it stays one word, and the command one line."""
    line = typed("printf", "%s\\0", *HOSTILE)
    assert line == visible(line)
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, check=True, env={"LC_ALL": "C"}
    )
    assert done.stdout.decode("utf-8").split("\0")[:-1] == HOSTILE


def test_bytes_of_a_file_name_stay_bytes() -> None:
    """A name that is no UTF-8 is typed as its bytes."""
    assert typed("a\udcff") == r"$'a\xff'"
