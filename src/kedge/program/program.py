"""Someone else's program, run in this process as ``python`` would run it."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType

from kedge.errors import ScriptError
from kedge.program.ending import Ending, end_with
from kedge.program.target import (
    Target,
    absolute,
    check_module,
    container_finder,
    read_container,
    read_module,
    read_script,
    script_folder,
)


@dataclass
class Program:
    """A script, a folder or zip file with ``__main__.py``, or a module.

    Attributes:
        target: What was typed: a path, or the name of a module.
        is_module: Whether it was typed after ``-m``.
        args: The arguments that belong to the program.
    """

    target: str
    is_module: bool
    args: Sequence[str] = ()
    _read: Target | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """A short name, fit for a file: ``train.py`` for ``jobs/train.py``."""
        return self.target if self.is_module else Path(os.path.abspath(self.target)).name

    @property
    def command(self) -> list[str]:
        """What comes after ``python`` to run this program."""
        return [*(["-m"] if self.is_module else []), self.target, *self.args]

    def check(self) -> None:
        """See whether the program can start; no line of it runs.

        Raises:
            ScriptError: It is not there, cannot be read, or does not parse.
        """
        if self.is_module:
            check_module(self.target)
        elif not os.path.exists(self.target):
            read_script(self.target)
        elif self._finder is not None:
            self._read = read_container(self.target, self._finder)
        else:
            self._read = read_script(self.target)

    def run(self) -> Ending:
        """Run the program and show what is left uncaught as Python shows it.

        This process becomes the program: ``sys.argv``, ``sys.path`` and ``__main__`` stay as they
        are then, because threads, ``atexit`` handlers and pickles live on after the last line.

        Raises:
            ScriptError: It turned out only now that it cannot start.
        """
        self._take_over()
        error: BaseException | None = None
        try:
            target = self._target()
        except ScriptError:
            raise
        except BaseException as raised:  # noqa: BLE001 - a package around the module failed: the program's own end
            return end_with(_from_program(raised))
        try:
            exec(target.code, vars(_become_main(target)))  # noqa: S102 - running the program is the job
        except BaseException as raised:  # noqa: BLE001 - whatever ends the program is shown, and ends this process too
            error = _from_program(raised)
        return end_with(error)

    def _target(self) -> Target:
        target = self._read or read_module(self.target)
        sys.argv[0] = target.argv0
        return target

    @property
    def _finder(self) -> object | None:
        return None if self.is_module else container_finder(self.target)

    def _take_over(self) -> None:
        sys.argv[:] = ["-m" if self.is_module else self.target, *self.args]
        # A program that starts itself again does so as `python` was asked to, without this command.
        sys.orig_argv[:] = [sys.executable, *self.command]
        if self._finder is not None:
            sys.path[: 0 if sys.flags.safe_path else 1] = [absolute(self.target)]
        elif not sys.flags.safe_path:
            sys.path[:1] = [os.getcwd() if self.is_module else script_folder(self.target)]


def _become_main(target: Target) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(target.names, __builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    return main


def _from_program(error: BaseException) -> BaseException:
    """Leave out the frames between the start of this process and the program's first."""
    here, frames = os.path.dirname(__file__), error.__traceback__
    while frames is not None and _is_own(frames, here):
        frames = frames.tb_next
    return error.with_traceback(frames)


def _is_own(frames: TracebackType, here: str) -> bool:
    filename = frames.tb_frame.f_code.co_filename
    return os.path.dirname(filename) == here or filename.startswith("<frozen ")
