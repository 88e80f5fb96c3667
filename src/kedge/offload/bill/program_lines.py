"""The line of the program that runs when autograd saves a tensor."""

from __future__ import annotations

import sys
from types import FrameType

from kedge.frames import is_between
from kedge.torch_internals.source_lines import SourceLine, source_of


class ProgramLines:
    """The program's running lines, each read from its file once.

    The running line is that of the innermost frame outside of PyTorch, Kedge and Python's standard
    library.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int | None], SourceLine] = {}

    def here(self) -> SourceLine | None:
        """Return the running line; None if this thread runs no line of the program, as in backward."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_between(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        code = frame.f_code  # hashing the code object would take longer than everything else
        place = code.co_filename, code.co_qualname, frame.f_lineno
        if place not in self._known:
            self._known[place] = source_of(frame)
        return self._known[place]
