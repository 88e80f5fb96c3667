"""Runs a text of Python inside another process by Python's own means, from version 3.14 on (PEP 768).

# Note [A request that nobody waits for]
The process keeps one request, the path of a script, until its main thread is between two
instructions. A request that comes too late must not find a script that somebody else has put there
meanwhile; so it is replaced by one for an empty script, before the folder of the first is removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kedge.errors import CannotAttach
from kedge.running.private_folder import PrivateFolder
from kedge.running.process import RunningProcess

FIRST = 14
"""The first minor version of Python that has it."""

_remote_exec: Callable[[int, str], Any] | None = getattr(sys, "remote_exec", None)
_NOTHING = Path(__file__).with_name("nothing.py")


def has_remote_exec(process: RunningProcess) -> bool:
    """Whether this Python can send to the process's; both need to be of one version."""
    return _remote_exec is not None and process.python == sys.version_info[1]


def send_by_python(process: RunningProcess, text: str, folder: PrivateFolder) -> None:
    """Have a process run a text of Python.

    Args:
        process: The process.
        text: The text.
        folder: A private folder that its user can read.

    Raises:
        CannotAttach: Python could not do it.
    """
    _request(process, folder.write("script.py", text))


def replace_request(process: RunningProcess) -> None:
    """Have a process run an empty script instead of the last one, if it has not begun with that."""
    with suppress(CannotAttach):  # it may have ended
        _request(process, _NOTHING)


def _request(process: RunningProcess, script: Path) -> None:
    if _remote_exec is None:
        raise CannotAttach(
            f"Python 3.{sys.version_info[1]} cannot enter other processes; 3.{FIRST} can"
        )
    try:
        _remote_exec(process.pid, str(script))
    except (OSError, RuntimeError) as error:
        raise CannotAttach(
            f"process {process.pid} could not be entered by Python: {error}. "
            "It may have been started with PYTHON_DISABLE_REMOTE_DEBUG "
            "or -X disable-remote-debug, or only root may enter it"
        ) from error
