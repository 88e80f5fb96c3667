"""The end of ``kedge run`` is the end of the program: its exit status, its streams, and its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import TRAIN
from tests.cli.serving import Server

pytestmark = pytest.mark.timing

KEDGE = "-m kedge run prog.py"


def both(
    tmp_path: Path, source: str, streams: str = "", flags: str = ""
) -> list[tuple[str, str, int]]:
    """Run a program with python, and with Kedge, with streams as a shell redirects them; returns the two outcomes."""
    (tmp_path / "prog.py").write_text(source)
    commands = [f"{sys.executable} {flags} {words} {streams}" for words in ("prog.py", KEDGE)]
    done = [
        subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for command in commands
    ]
    return [(each.stdout, each.stderr.replace("[kedge] nothing was recorded: the program did not import torch\n", ""), each.returncode) for each in done]  # fmt: skip


@pytest.mark.parametrize(
    "source", ["x = (\n", "if 1:\nx = 1\n", "return\n"], ids=["open", "indent", "return"]
)
def test_a_program_that_does_not_parse_ends_as_under_python(tmp_path: Path, source: str) -> None:
    """Its message is Python's, and its exit status is 1."""
    plain, ours = both(tmp_path, source)

    assert ours == plain
    assert ours[2] == 1


@pytest.mark.parametrize(
    ("source", "streams"),
    [
        ('print("out"); raise SystemExit("message")', "2>&-"),
        ('print("out"); 1 / 0', "2>&-"),
        ("raise SystemExit(4)", ">&-"),
        (
            'print(open("it", "w").fileno(), file=open("numbers", "w")); raise SystemExit(4)',
            ">&- 2>&- <&-",
        ),
    ],
    ids=["message", "error", "no stdout", "none"],
)
def test_what_has_no_stderr_goes_nowhere(tmp_path: Path, source: str, streams: str) -> None:
    """Kedge's messages do not go to stdout in its place, nor to the file that has its number."""
    plain, ours = both(tmp_path, source, streams)

    assert ours == plain


def test_the_last_words_do_not_go_into_the_programs_file(server: Server, tmp_path: Path) -> None:
    """If the program has closed stderr and its own file has that number, they go to the stderr that was there at first."""
    source = (
        TRAIN
        + "train(); os.close(2); file = open('mine', 'w'); print(file.fileno()); file.write('mine')"
    )
    done = server.run(source, tmp_path, ["run", "-o", "it.kedge", "prog.py"])

    assert (done.stdout, done.status) == ("2\n", 0)
    assert done.told[-1] == "[kedge] see more with: kedge report it.kedge"
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_failure_at_the_end_is_one_sentence(server: Server, tmp_path: Path) -> None:
    """Where Kedge itself cannot end, the program still ends with its own status."""
    broken = "import kedge.cli.watching as w\ndef no(self): raise RuntimeError('no end')\nw.Watching.finish = no\n"
    done = server.run(
        TRAIN + broken + "train(); raise SystemExit(7)",
        tmp_path,
        ["run", "-o", "it.kedge", "prog.py"],
    )

    assert (done.stdout, done.status) == ("", 7)
    assert done.told == [
        "[kedge] could not finish the recording: RuntimeError: no end; its end may be missing"
    ]
