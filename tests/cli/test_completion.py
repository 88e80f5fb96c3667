"""The scripts of ``kedge completion``, in the shells that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kedge.cli.main import build_parser, main

#: Functions of zsh's completion, which print what they are given; then the words of a line.
STUBS = """
compdef() { :; }
_describe() { [[ $1 == -o ]] && shift; print -l -- ${(P)2%%:*}; }
compadd() { print -l -- ${(P)2}; }
_files() { print files; }
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the script for a shell."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(shell: str, text: str, line: str, folder: Path) -> set[str]:
    """Return what the shell offers for the last word of a line."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    words = line.split(" ")
    if shell == "fish":
        program = f"{text}\ncomplete -C '{line}'"
    elif shell == "bash":
        quoted = " ".join(f"'{word}'" for word in words)
        program = f'{text}\nCOMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}\n_kedge\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    else:
        quoted = " ".join(f"'{word}'" for word in words)
        program = (
            f"{STUBS}\n{text}\nwords=({quoted}) CURRENT={len(words)} PREFIX='{words[-1]}'\n_kedge"
        )
    flags = {"zsh": ["-f"], "fish": ["--no-config"], "bash": ["--norc"]}[shell]
    done = subprocess.run(
        [shell, *flags, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
    )
    assert done.stderr == ""
    return {offer.partition("\t")[0] for offer in done.stdout.splitlines() if offer}


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("kedge re", {"report"}, {"train.py"}),
        ("kedge report --h", {"--html", "--headroom"}, {"--every"}),
        ("kedge report ", {"demo.kedge"}, {"train.py"}),
        ("kedge run --e", {"--every"}, {"--html"}),
        ("kedge explain NAN-", {"NAN-BORN"}, {"demo.kedge"}),
        ("kedge explain DEP", {"DEPARTS"}, {"demo.kedge"}),
        ("kedge completion ", {"bash", "fish", "zsh"}, {"demo.kedge"}),
    ],
)
def test_words_are_completed(
    shell: str,
    line: str,
    offered: set[str],
    not_offered: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands, options of the command, names of recordings and codes of rules are offered where they belong."""
    (tmp_path / "demo.kedge").mkdir()
    (tmp_path / "train.py").touch()

    found = completed(shell, script(shell, capsys), line, tmp_path)

    assert offered <= found
    assert not not_offered & found


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_every_command_and_every_option_is_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script is made from the parsers, so that none is forgotten."""
    text = script(shell, capsys)

    for name, own in build_parser().own.items():
        assert name in text
        long = [option for option in own.options if option.startswith("--")]
        assert [
            option
            for option in long
            if (f"-l {option[2:]}" if shell == "fish" else option) not in text
        ] == []
