"""Lines that were pasted whole behind a command: the place at which ``kedge run`` belongs in them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from kedge.shown_text import typed

_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*(\.exe)?")
#: Options of python that take the next word.
_TAKING = ("-W", "-X")
_SHELLS = ("bash", "dash", "sh", "zsh", "fish")

#: Programs that start another one, whose words come after theirs.
STARTERS = (
    "env",
    "mpirun",
    "nice",
    "nohup",
    "numactl",
    "setsid",
    "srun",
    "stdbuf",
    "sudo",
    "taskset",
    "time",
    "conda",
    "hatch",
    "micromamba",
    "pdm",
    "pipenv",
    "pixi",
    "poetry",
    "uv",
)
#: Programs and modules that start processes which train, with the option before the name of a
#: module.
LAUNCHERS = {
    "torchrun": "-m",
    "torch.distributed.run": "-m",
    "torch.distributed.launch": "-m",
    "accelerate": "-m",
    "accelerate.commands.launch": "-m",
    "deepspeed": "--module",
    "deepspeed.launcher.runner": "--module",
}


class PastedLine(NamedTuple):
    """What is wrong with a line that was typed as the program to run.

    Attributes:
        what: What is wrong with it.
        right: The right line; empty if there is none.
    """

    what: str
    right: str = ""


def pasted_line(prog: str, words: Sequence[str]) -> str | None:
    """Return what is wrong with a line that was typed as the program to run, and the right one.

    Args:
        prog: The command, such as ``run``.
        words: The words after it, with ``-m`` in front of a module.

    Returns:
        None if it may be a program.
    """
    found = _found(prog, words)
    if found is None:
        return None
    return f"{found.what}: {found.right}".removesuffix(": ")


def _found(prog: str, words: Sequence[str]) -> PastedLine | None:
    return (
        _launch_line(prog, words)
        or _variables_line(prog, words)
        or _python_line(prog, words)
        or _shell_line(prog, words)
        or _starter_line(prog, words)
    )


def _right(prog: str, words: Sequence[str]) -> str:
    """Return the right line for words behind others that stand before kedge."""
    if not words:
        return _line(prog, ["SCRIPT"])
    found = _found(prog, words)
    if found is not None and found.right:
        return found.right
    if _is_python(words[0]):
        words = words[1:]
    return _line(prog, words)


def _line(prog: str, words: Sequence[str]) -> str:
    return typed("kedge", prog, *words)


def _launched(words: Sequence[str]) -> str | None:
    """Return the launcher that a line starts with, as a program or as a module; None if there is none."""
    rest = words[1:] if _is_python(words[0]) else words
    if rest[:1] == ["-m"] and rest[1:]:
        module = rest[1]
        return module if module in LAUNCHERS else None
    name = os.path.basename(words[0])
    if name not in LAUNCHERS or _is_own(words[0]):
        return None
    return name


def _is_own(path: str) -> bool:
    """Whether a file of a launcher's name is a program of the user's.

    The launchers are files of Python, too.
    """
    folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return os.path.lexists(path) and folder not in ("bin", "Scripts")


def _launch_line(prog: str, words: Sequence[str]) -> PastedLine | None:
    launcher = _launched(words)
    if launcher is None:
        return None
    option = LAUNCHERS[launcher]
    given = list(words)
    if words[0] == "-m":
        given.insert(0, "python")
    after = given.index(launcher) + 1 if launcher in given else 1
    programs = (i for i, word in enumerate(given) if i >= after and _is_program(word))
    place = next(programs, len(given))
    head = given[:place]
    tail = given[place:] or ["SCRIPT"]
    if tail[0] == "--module":
        tail[0] = "-m"
    line = typed(*head, option, "kedge", prog, *tail)
    what = f"{launcher} starts other processes, and each of them is to be watched"
    return PastedLine(what, line)


def _variables_line(prog: str, words: Sequence[str]) -> PastedLine | None:
    if not _VARIABLE.fullmatch(words[0]) or os.path.lexists(words[0]):
        return None
    others = (i for i, word in enumerate(words) if not _VARIABLE.fullmatch(word))
    last = next(others, len(words))
    pairs = [word.partition("=") for word in words[:last]]
    variables = " ".join(f"{key}={typed(value)}" for key, _, value in pairs)
    line = f"{variables} {_right(prog, words[last:])}"
    return PastedLine("variables stand before kedge", line)


def _python_line(prog: str, words: Sequence[str]) -> PastedLine | None:
    python = words[0]
    rest = list(words[1:])
    if not _is_python(python) or not rest:
        return None
    if os.path.lexists(os.path.join(python, "__main__.py")):
        return None

    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        taken = 2 if rest[0] in _TAKING else 1
        options += rest[:taken]
        del rest[:taken]
    if rest[:1] == ["-c"]:
        return PastedLine("code on the command line cannot be recorded; write it into a file")
    if options:
        line = typed(python, *options, "-m", "kedge", prog, *(rest or ["SCRIPT"]))
        return PastedLine("options of python stand before kedge", line)
    return PastedLine(f"leave {python} out", _line(prog, rest))


def _shell_line(prog: str, words: Sequence[str]) -> PastedLine | None:
    script = words[0]
    if os.path.basename(script) in _SHELLS and words[1:] and not os.path.lexists(script):
        script = words[1]
    elif not os.path.isfile(script) or not _is_shell_script(script):
        return None
    return PastedLine(f"{script} is for a shell; write kedge {prog} into it in place of python")


def _starter_line(prog: str, words: Sequence[str]) -> PastedLine | None:
    starter = words[0]
    place = next((i for i, word in enumerate(words) if i and _begins(word)), None)
    if starter not in STARTERS or place is None or os.path.lexists(starter):
        return None
    line = f"{typed(*words[:place])} {_right(prog, words[place:])}"
    return PastedLine(f"{starter} stands before kedge", line)


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


def _begins(word: str) -> bool:
    """Whether a program begins at a word: python, a launcher, or the program itself."""
    return _is_python(word) or _is_program(word) or os.path.basename(word) in LAUNCHERS


def _is_program(word: str) -> bool:
    return word.endswith(".py") or word in ("-m", "--module")


def _is_shell_script(path: str) -> bool:
    if path.endswith(".sh"):
        return True
    try:
        with open(path, "rb") as file:
            line = file.readline(200).decode("latin-1").split()
    except OSError:
        return False
    if not line or not line[0].startswith("#!"):
        return False
    return any(os.path.basename(word) in _SHELLS for word in line)
