"""Programs run as by `subprocess.run`, in processes that need not import torch: one has, and forks for each program."""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LATE = 5.0

# Kedge itself is imported by the program, which may hide packages from it, or change PyTorch first.
SERVER = """
import fcntl, gc, json, os, runpy, signal, sys, types, warnings
import torch, torch._dynamo

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # or each program at its end looks through all of PyTorch, which takes a second
for line in sys.stdin:
    pids = []
    for order in json.loads(line):
        pid = os.fork()
        if pid == 0:
            break
        pids.append(pid)
    else:
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)
        continue
    break
else:
    sys.exit()
os.chdir(order["folder"])
for number in range(3):
    file = os.open(order["files"][number], os.O_RDWR | os.O_APPEND)
    fcntl.flock(file, fcntl.LOCK_SH)  # until the program and all its children have closed it
    os.dup2(file, number)
    os.close(file)
signal.alarm(order["timeout"])
os.environ.clear()
os.environ.update(order["environment"])
words = order["words"]
sys.orig_argv[1:] = words
if os.environ.get("PYTHONWARNINGS"):
    warnings.simplefilter(os.environ["PYTHONWARNINGS"])
while words[0] == "-W":
    warnings.simplefilter(words[1])
    words = words[2:]
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[1:1] = [path for path in paths if path and path not in sys.path]
if words[0] == "-m":
    sys.argv, sys.path[0] = words[1:], os.getcwd()
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.exit()
main = sys.modules["__main__"] = types.ModuleType("__main__")
vars(main)["__builtins__"] = __builtins__
if words[0] == "-c":
    source, name, sys.argv, sys.path[0] = words[1], "<string>", ["-c", *words[2:]], ""
else:
    name, sys.argv = os.path.abspath(words[0]), words
    with open(name, encoding="utf-8") as file:
        source = file.read()
    sys.path[0], main.__file__ = os.path.dirname(os.path.realpath(name)), name
try:
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))
except Exception as error:
    sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), None)
    sys.exit(1)
"""


class Server:
    """A process that has imported torch and runs programs, each in a fork of itself."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.process.communicate)

    def run(self, orders: Sequence[Mapping[str, Any]]) -> list[int]:
        """Run programs side by side to their ends; returns their exit statuses, as `subprocess.run` gives them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(orders) + "\n")
        self.process.stdin.flush()
        return [
            os.waitstatus_to_exitcode(status)
            for status in json.loads(self.process.stdout.readline())
        ]


@functools.cache
def server() -> Server:
    """The server of this process."""
    return Server()


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | str = ".",
    env: Mapping[str, str] | None = None,
    input: str = "",  # noqa: A002 - as subprocess calls it
    timeout: int = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with ``-c``, ``-m`` or a script, as `subprocess.run` would with text captured.

    Of Python's options it knows ``-W`` with an action alone. A program that takes longer than its
    time is killed.
    """
    [done] = run_together(
        [command], cwd=cwd, envs=[os.environ if env is None else env], input=input, timeout=timeout
    )
    if check:
        done.check_returncode()
    return done


def run_together(
    commands: Sequence[Sequence[str | Path]],
    *,
    envs: Sequence[Mapping[str, str]],
    cwd: Path | str = ".",
    input: str = "",  # noqa: A002 - as subprocess calls it
    timeout: int = 300,
) -> list[subprocess.CompletedProcess[str]]:
    """Run several such commands at the same time, each with an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        orders = [
            _order(
                command,
                Path(folder, str(number)),
                input,
                folder=str(Path(cwd).absolute()),
                environment=dict(env),
            )
            for number, (command, env) in enumerate(zip(commands, envs, strict=True))
        ]
        statuses = server().run([order | {"timeout": timeout} for order in orders])
        for order in orders:
            wait_for_writers(order["files"][1:])
        return [
            subprocess.CompletedProcess(
                order["words"],
                status,
                *(
                    Path(file).read_text(encoding="utf-8", errors="replace")
                    for file in order["files"][1:]
                ),
            )
            for order, status in zip(orders, statuses, strict=True)
        ]


def wait_for_writers(files: Sequence[str]) -> None:
    """Wait for children that have outlived their program and may still write, as the end of a pipe would; for a while."""
    end = time.monotonic() + _LATE
    for file in files:
        with Path(file).open(encoding="utf-8") as output:
            while time.monotonic() < end:
                try:
                    fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)


def _order(command: Sequence[str | Path], made: Path, text: str, **more: Any) -> dict[str, Any]:
    """Describe a program to the server, with files for its input and output in a folder that is made."""
    assert command[0] == sys.executable
    made.mkdir()
    files = [made / name for name in ("stdin", "stdout", "stderr")]
    for file, written in zip(files, (text, "", ""), strict=True):
        file.write_text(written, encoding="utf-8")
    return {"words": [str(word) for word in command[1:]], "files": list(map(str, files)), **more}
