"""The user's program, run in this process as ``python`` runs it."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from kedge.errors import ScriptError
from kedge.frames import OWN
from kedge.program.ending import Ending, end_with
from kedge.program.own_imports import OWN_IMPORTS
from kedge.program.target import (
    ProgramCode,
    absolute,
    check_module,
    container_finder,
    read_container,
    read_module,
    read_script,
    script_folder,
)

_OWN = (os.path.join(os.path.dirname(__file__), ""), "<frozen ")
"""The beginnings of the names of the files that run a program.

Read now, since a program may replace functions of `os`.
"""


@dataclass
class Program:
    """A script, a folder or zip file with ``__main__.py``, or a module.

    Attributes:
        target: A path, or the name of a module.
        is_module: Whether the target is a module, given after ``-m``.
        args: The arguments of the program.
    """

    target: str
    is_module: bool
    args: Sequence[str] = ()
    _read: ProgramCode | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """A short name for files: ``train.py`` for ``jobs/train.py``."""
        if self.is_module:
            return self.target
        return Path(os.path.abspath(self.target)).name

    @property
    def command(self) -> list[str]:
        """The words after ``python`` that run this program."""
        if self.is_module:
            return ["-m", self.target, *self.args]
        return [self.target, *self.args]

    @property
    def digest(self) -> str | None:
        """The SHA-256 of a script's bytes; None for a module, a folder or a zip file."""
        if self.is_module or not os.path.isfile(self.target) or self._finder is not None:
            return None
        return sha256(Path(self.target).read_bytes()).hexdigest()

    def check(self) -> None:
        """Check that the program can start, without running any of it.

        Raises:
            ScriptError: The program does not exist, cannot be read, or does not parse.
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
        """Run the program, print an uncaught exception as Python does, and return how the program ended.

        This process becomes the program: ``sys.argv``, ``sys.path`` and ``__main__`` remain
        changed, because threads, ``atexit`` handlers and pickles outlive the last line.

        Raises:
            ScriptError: The program cannot start, for a reason that `check` cannot detect.
        """
        self._take_over()
        error: BaseException | None = None
        try:
            target = self._target()
        except ScriptError as refused:
            return self.unparsed(refused)
        except BaseException as raised:  # noqa: BLE001 - a package around it failed
            return end_with(_from_program(raised))
        found, silence = (sys.gettrace, sys.getprofile), (sys.settrace, sys.setprofile)
        try:
            exec(target.code, vars(_become_main(target)))  # noqa: S102 - running it is the job
        except BaseException as raised:  # noqa: BLE001 - printed, whatever it is
            error = _from_program(raised)
        left = found[0](), found[1]()
        silence[0](None)
        silence[1](None)
        return replace(end_with(error), observers=left)

    def unparsed(self, refused: ScriptError) -> Ending:
        """Print the syntax error of a program that does not parse, as Python does.

        Raises:
            ScriptError: The program cannot start for another reason.
        """
        cause = refused.__cause__
        if not isinstance(cause, SyntaxError):
            raise refused
        return end_with(cause.with_traceback(None))

    def _target(self) -> ProgramCode:
        target = self._read or read_module(self.target)
        sys.argv[0] = target.argv0
        return target

    @property
    def _finder(self) -> object | None:
        if self.is_module:
            return None
        return container_finder(self.target)

    def _take_over(self) -> None:
        first = "-m" if self.is_module else self.target
        sys.argv[:] = [first, *self.args]
        # A program that restarts itself runs `python`, not this command.
        sys.orig_argv[:] = [sys.executable, *self.command]

        if self._finder is not None:
            folder = absolute(self.target)
        elif sys.flags.safe_path:
            return  # the program's folder is not on the path
        elif self.is_module:
            folder = os.getcwd()
        else:
            folder = script_folder(self.target)
        path = sys.path[:] if sys.flags.safe_path else sys.path[1:]
        sys.path[:] = [folder, *path]
        OWN_IMPORTS.set_aside(folder, path)


def _become_main(target: ProgramCode) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(target.names, __builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    return main


def _from_program(error: BaseException) -> BaseException:
    """Return an error without the frames before the program's first one, and of Kedge's in operations."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN):
        frames = frames.tb_next
    error = error.with_traceback(frames)

    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            _leave_out_operations(each)
            waiting += [each.__cause__, each.__context__]
    return error


def _leave_out_operations(error: BaseException) -> None:
    """Remove the frames inside an operation that Kedge has passed on, of which Python shows none."""
    frames = error.__traceback__
    while frames is not None:
        inner = frames.tb_next
        if inner is not None:
            code = inner.tb_frame.f_code
            if code.co_name == "__torch_dispatch__" and code.co_filename.startswith(OWN):
                frames.tb_next = None
                return
        frames = inner
