"""Programs and commands in processes of their own that need not import torch first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import wait_for_writers

# Importing torch takes longer than all that is tested here: one process does it, and forks for each
# program. A program run by `Program` is what it is under python, as test_program.py shows.
SERVER = """
import ctypes, fcntl, gc, json, os, resource, sys, threading
import torch, torch._dynamo, kedge.cli.run, kedge.watch.run.summary, kedge.watch.run.begin
from kedge.cli.main import main
from kedge.program.program import Program

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # or each program at its end looks through all of PyTorch, which takes a second
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitpid(order["wait"], 0)[1], flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(order["folder"])
        for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            fcntl.flock(file, fcntl.LOCK_SH)  # until the program and all its children have closed it
            os.dup2(file, number)
            os.close(file)
        if order["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], order["limit"]))
        if order["user"]:
            os.setuid(order["user"])
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):
            libc.on_exit(libc._exit, None)  # at its very end, without PyTorch's destructors
        break
    print(pid, flush=True)
else:
    sys.exit()
if order["words"] is not None:
    ending = main(order["words"])
    sys.exit(ending) if isinstance(ending, int) else ending.leave()
program = Program("prog.py", False, [])
program.check()
program.run().leave()
"""


@dataclass(frozen=True)
class Outcome:
    """What a process left: its output and how it ended, as `waitpid` gives it."""

    stdout: str
    stderr: str
    ending: int

    @property
    def status(self) -> int:
        """Its exit status."""
        return self.ending >> 8

    @property
    def told(self) -> list[str]:
        """The lines of stderr."""
        return self.stderr.splitlines()


@dataclass
class Running:
    """A process that was started."""

    server: Server
    pid: int
    folder: Path

    def said(self) -> str:
        """Return what it has printed so far."""
        return (self.folder / "stdout").read_text()

    def wait(self) -> Outcome:
        """Wait for its end, and for that of its children that may still write."""
        ending = self.server.ask(wait=self.pid)
        wait_for_writers([str(self.folder / name) for name in ("stdout", "stderr")])
        said = [
            (self.folder / name).read_text().replace(str(self.folder), "")
            for name in ("stdout", "stderr")
        ]
        return Outcome(*(re.sub(r"0x[0-9a-f]+", "0x", text) for text in said), ending)


class Server:
    """A process that has imported torch and forks for each program."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **order: Any) -> int:
        """Send an order, and read the number that answers it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(
        self,
        source: str,
        folder: Path,
        words: list[str] | None,
        *,
        limit: int | None = None,
        user: int | None = None,
    ) -> Running:
        """Start a program in a folder, or a command.

        Args:
            source: The program, to be written to ``prog.py``.
            folder: The folder, which is made if it is not there; ``stdout`` and ``stderr`` are
                written to it.
            words: The command; None for the program by itself.
            limit: The greatest size of a file that it may write.
            user: The user that it becomes.
        """
        folder.mkdir(exist_ok=True)
        (folder / "prog.py").write_text(source)
        for name in ("stdout", "stderr"):
            (folder / name).unlink(missing_ok=True)
        return Running(
            self, self.ask(folder=str(folder), words=words, limit=limit, user=user), folder
        )

    def run(self, source: str, folder: Path, words: list[str] | None, **limits: int) -> Outcome:
        """Start it and wait for its end."""
        return self.start(source, folder, words, **limits).wait()

    def close(self) -> None:
        """End it."""
        self.process.communicate()
