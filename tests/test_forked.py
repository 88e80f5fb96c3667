"""Programs that are forked do what they do under ``python``, and so do the programs that they start."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests import forked

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are not forked")

STARTS = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-u", "-c", sys.argv[1], "a", "b"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    text=True, cwd="there", env={"MINE": "1"}, start_new_session=True)
out, _ = child.communicate("read")
print(child.pid, child.returncode, out, flush=True)
try:
    os.waitpid(child.pid, 0)
except ChildProcessError:
    print("waited for")
"""
TELLS = """
import os, sys
print(os.getpid(), os.getsid(0) == os.getpid(), sys.argv, sys.stdin.read(), os.getcwd(), os.environ.get("MINE"))
print("to stderr", file=sys.stderr)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise SystemExit(7)", 7), ("os.abort()", -signal.SIGABRT), ("1 / 0", 1)],
)
def test_a_program_started_by_a_program_is_its_child(
    tmp_path: Path, ending: str, status: int
) -> None:
    """It has the words, streams, folder, environment and session it was given, and is waited for like any other."""
    (tmp_path / "there").mkdir()
    command = [sys.executable, "-c", STARTS, TELLS.format(ending=ending)]

    alike = [forked.run(command, cwd=tmp_path, forks=forks) for forks in (True, False)]

    for done in alike:
        assert done.returncode == 0, done.stderr
        first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
        pid, ended, own = first.split()[:3]
        assert (int(ended), own, last) == (status, pid, "waited for")
        assert done.stderr.startswith("to stderr\n")
    ours, theirs = (done.stdout.split(maxsplit=3)[3] for done in alike)
    assert ours == theirs


@linux
def test_a_program_started_by_a_program_has_imported_torch() -> None:
    """Otherwise it would be as slow as without."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(\"torch\" in sys.modules)'])"

    said = [
        forked.run([sys.executable, "-c", code], forks=forks, check=True).stdout
        for forks in (True, False)
    ]

    assert said == ["True\n", "False\n"]


@linux
def test_what_is_imported_ahead_is_there_for_those_that_ask() -> None:
    """A program that does not ask has nothing of it."""
    code = "import sys; print('wave' in sys.modules); sys.exit(4)"

    done = [forked.run([sys.executable, "-c", code], ahead=ahead) for ahead in ("wave", "", "wave")]

    assert [each.stdout for each in done] == ["True\n", "False\n", "True\n"]
    assert [each.returncode for each in done] == [4, 4, 4]
