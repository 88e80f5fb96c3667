"""What was meant by words that are no command and no program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kedge.cli.parser import CommandParser, nearest
from kedge.cli.pasted import pasted_line
from kedge.cli.recordings import is_recording
from kedge.shown_text import typed

#: The commands under the names that other tools have for them.
OTHER_NAMES = {
    "compare": "report",
    "dashboard": "serve",
    "follow": "live",
    "list": "sites",
    "open": "report",
    "parquet": "export",
    "python": "run",
    "record": "run",
    "rules": "explain",
    "show": "report",
    "sql": "query",
    "summary": "report",
    "tail": "live",
    "train": "run",
    "ui": "serve",
    "view": "report",
    "watch": "run",
}


def no_command(
    word: str,
    rest: Sequence[str],
    commands: Mapping[str, CommandParser],
) -> str:
    """Return what to say about a first word that is not a command."""
    option = word.partition("=")[0]
    if _is_program(word):
        return (
            f"{word} is a program, not a command; to run and record it: {_line('run', word, *rest)}"
        )
    if is_recording(word):
        return f"{word} is a recording, not a command; to read it: {_line('report', word, *rest)}"
    if option in commands["run"].options:
        return f"{option} is an option of kedge run, which is missing: {_line('run', word, *rest)}"
    if word.startswith("-"):
        known = nearest(option, ("--help", "--version"))
        if known:
            return f"there is no option {option}; did you mean {known}?"
        return f"there is no option {option}; see kedge --help"

    pasted = pasted_line("run", [word, *rest])
    if pasted is not None:
        return f"{word} is not a command; {pasted}"
    near = OTHER_NAMES.get(word.lower()) or nearest(word.lower(), commands)
    if near is not None:
        return (
            f"there is no command {word!r}; did you mean: "
            f"{_line(near, *rest)} (all commands: kedge --help)"
        )
    return f"there is no command {word!r}; the commands are {', '.join(commands)}"


def no_program(prog: str, target: str, args: Sequence[str]) -> str | None:
    """Return what to say about a program that cannot be one; None if nothing speaks against it.

    Args:
        prog: The command, such as ``run``.
        target: The path of the program.
        args: The words after it.
    """
    if is_recording(target):
        return f"cannot run {target}: it is a recording; to read it: {_line('report', target)}"
    if target.endswith(".ipynb"):
        return (
            f"cannot run {target}: it is a notebook; use kedge.watch in a cell of it, "
            f"or make a script of it: jupyter nbconvert --to script {typed(target)}"
        )
    if not target:
        return "the name of the program is empty: name a script, or -m and a module"

    remedy = pasted_line(prog, [target, *args])
    if os.path.lexists(target):
        return None if remedy is None else f"cannot run {target}: {remedy}"
    if remedy is None:
        remedy = _other_program(prog, target, args)
    if remedy is None:
        return None
    return f"cannot run {target}: there is no such file in {os.getcwd()}; {remedy}"


def no_module(prog: str, words: Sequence[str]) -> str | None:
    """Return the message about a module that starts other processes, which would not be recorded.

    Returns:
        None for any other module.
    """
    said = pasted_line(prog, ["-m", *words])
    if said is None:
        return None
    return f"cannot run -m {words[0]}: {said}"


def _other_program(prog: str, target: str, args: Sequence[str]) -> str | None:
    """Return the remedy for a path where no program is.

    Returns:
        None if nothing better is known than to check it.
    """
    if os.path.isfile(f"{target}.py"):
        return f"did you mean: {_line(prog, f'{target}.py', *args)}"
    if os.path.isfile(f"{target.replace('.', os.sep)}.py"):
        return f"did you mean: {_line(prog, '-m', target, *args)}"
    folder, name = os.path.split(target)
    near = nearest(name.removesuffix(".py"), _programs(folder or os.curdir))
    if not near:
        return None
    return f"did you mean: {_line(prog, os.path.join(folder, f'{near}.py'), *args)}"


def _is_program(word: str) -> bool:
    if word.endswith((".py", ".pyc", ".ipynb")):
        return True
    return os.path.isfile(os.path.join(word, "__main__.py"))


def _programs(folder: str) -> list[str]:
    """Return the names of the scripts in a folder, without their suffix."""
    try:
        return [name.removesuffix(".py") for name in os.listdir(folder) if name.endswith(".py")]
    except OSError:
        return []


def _line(command: str, *words: str) -> str:
    return typed("kedge", command, *words)
