"""The command line as a whole: help, version, errors, interrupts, broken pipes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from kedge.cli import main as cli
from kedge.cli.main import COMMANDS, GROUPS, build_parser, main
from kedge.errors import KedgeError

pytestmark = pytest.mark.timing


class Raises:
    """A command that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        raise self.error


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_that_of_the_package(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``kedge --version`` prints what is installed."""
    with pytest.raises(SystemExit) as left:
        main([word])

    assert left.value.code == 0
    assert capsys.readouterr().out == f"kedge {metadata.version('kedge')}\n"


def test_the_command_line_loads_nothing_heavy() -> None:
    """Reading what was typed needs neither torch nor numpy nor rich."""
    look = "import kedge.cli.main, sys; print([n for n in ('torch', 'numpy', 'rich', 'nanoarrow') if n in sys.modules])"

    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_reading_a_recording_needs_no_torch(recorded: Callable[..., Path]) -> None:
    """A recording can be drawn, checked and explained where torch is not installed."""
    look = (
        "import sys; sys.modules['torch'] = None\n"
        "from kedge.cli.main import main\n"
        "print([main(words) for words in (['report', sys.argv[1]], ['check', sys.argv[1]], ['explain', 'NAN-BORN'])])"
    )

    done = subprocess.run(
        [sys.executable, "-c", look, recorded()], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "[0, 0, 0]"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_every_command_has_help(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's docstring is its help text."""
    with pytest.raises(SystemExit) as left:
        build_parser().parse_args(
            [type(command).__name__.removesuffix("Command").lower(), "--help"]
        )

    assert left.value.code == 0
    assert command.__doc__ is not None
    assert command.__doc__.splitlines()[0] in capsys.readouterr().out


def test_an_error_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command says on stderr what it cannot do, without a traceback, and exits with status 2."""
    monkeypatch.setattr(
        cli, "COMMANDS", (Raises(KedgeError("asked for this, found that, do this")),)
    )

    assert main(["raises"]) == 2
    assert capsys.readouterr() == ("", "kedge: asked for this, found that, do this\n")


def test_an_interrupt_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in a command of Kedge's own gives exit status 130."""
    monkeypatch.setattr(cli, "COMMANDS", (Raises(KeyboardInterrupt()),))

    assert main(["raises"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """``kedge explain | head`` ends without a word when its reader has gone."""
    program = "import sys, time\ntime.sleep(0.5)\nfrom kedge.cli.main import main\nsys.exit(main(['explain', 'NAN-BORN']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()

    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 141


def test_a_command_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``kedge`` alone lists the commands, as ``kedge help`` does; but it was not asked to, so its status is 2."""
    with pytest.raises(SystemExit) as left:
        main([])
    listed = capsys.readouterr()
    with pytest.raises(SystemExit) as helped:
        main(["help"])

    assert (left.value.code, helped.value.code) == (2, 0)
    assert listed == ("", capsys.readouterr().out)
    assert listed.err.startswith("usage: kedge COMMAND [ARGUMENTS]\n")


def test_every_command_is_in_one_group() -> None:
    """The help lists each command once, in the group of its purpose, with the first line of its own help."""
    text, grouped = (
        build_parser().format_help(),
        [name for names in GROUPS.values() for name in names],
    )

    assert sorted(grouped) == sorted(build_parser().own)
    for name, own in build_parser().own.items():
        assert f"\n  {name:<11}{own.short}\n" in text


@pytest.mark.parametrize(
    "words", [["help", "diff"], ["--help", "diff"], ["-h", "diff"], ["diff", "-h"]]
)
def test_the_help_of_a_command_can_be_asked_for_in_any_order(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """``kedge help diff`` and ``kedge --help diff`` are ``kedge diff --help``."""
    with pytest.raises(SystemExit) as left:
        main(words)

    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kedge diff ")
