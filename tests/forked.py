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

WATCH = "kedge.watch.run.begin kedge.watch.run.summary"
"""What `kedge run` imports when the program imports torch, for `ahead`: it takes longer than most programs."""

_LATE = 5.0

# Kedge itself is imported by the program, which may hide packages from it, or change PyTorch first.
SERVER = r"""
import ctypes, fcntl, gc, importlib, inspect, io, json, os, runpy, signal, socket, subprocess, sys, types, warnings
import torch, torch._dynamo

torch.set_num_threads(1)
libc, linux = ctypes.CDLL(None), sys.platform == "linux"
ADOPT = 36  # PR_SET_CHILD_SUBREAPER
nothing = os.open(os.devnull, os.O_RDWR)
gc.collect()
gc.freeze()  # or each program at its end looks through all of PyTorch, which takes a second


def asked():
    # Each fork returns with its order; this process goes on.
    prepared = {}
    for line in sys.stdin:
        pids = []
        for order in json.loads(line):
            module = order["ahead"]
            if module and linux:
                if module not in prepared:
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    if os.fork() == 0:
                        ours.close()
                        for name in module.split():
                            importlib.import_module(name)
                        gc.freeze()
                        return asked_by(theirs)
                    theirs.close()
                    prepared[module] = ours
                    libc.prctl(ADOPT, 1, 0, 0, 0)
                prepared[module].send(json.dumps(order).encode())
                pids.append(int(prepared[module].recv(20)))
                continue
            pid = os.fork()
            if pid == 0:
                return order
            pids.append(pid)
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)
    sys.exit()


def asked_by(program):
    # The same, asked by another process than the parent. They are its children: the one between
    # them ends at once, and it adopts them.
    while True:
        line, files, _, _ = socket.recv_fds(program, 1 << 20, 3)
        if not line:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                program.close()
                return json.loads(line) | {"files": files}
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        program.send(os.read(read, 20))
        for file in (read, write, *files):
            os.close(file)


def fork_programs(order):
    # What the program starts with its Python, by subprocess, is a fork from here on.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.getpid()
    if os.fork() == 0:
        ours.close()
        for number in range(3):  # the program's, which are waited for
            os.dup2(nothing, number)
        return asked_by(theirs)
    theirs.close()
    libc.prctl(ADOPT, 1, 0, 0, 0)
    as_usual = subprocess.Popen._execute_child
    names = [*inspect.signature(as_usual).parameters][1:]
    rare = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

    def execute(self, *given):
        asked = dict(zip(names, given))
        words = asked["args"]
        if (
            isinstance(words, (str, bytes))
            or words[0] != sys.executable
            or any(asked[name] for name in rare)
            or os.getpid() != program
        ):
            return as_usual(self, *given)
        environment = os.environ if asked["env"] is None else asked["env"]
        wanted = {
            "words": [os.fsdecode(word) for word in words[1:]],
            "folder": os.path.abspath(os.fsdecode(asked["cwd"] or "")),
            "environment": dict(environment),
            "timeout": order["timeout"],
            "session": asked["start_new_session"],
        }
        files = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        files = [number if file == -1 else file for number, file in enumerate(files)]
        socket.send_fds(ours, [json.dumps(wanted).encode()], files)
        self.pid = int(ours.recv(20))
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in ends))

    subprocess.Popen._execute_child = execute
    return order


order = asked()
if "paths" in order:
    order["files"] = [os.open(path, os.O_RDWR | os.O_APPEND) for path in order["paths"]]
    for file in order["files"]:
        fcntl.flock(file, fcntl.LOCK_SH)  # until the program and all its children have closed it
if linux and order.get("forks"):
    order = fork_programs(order)
if linux and hasattr(libc, "on_exit"):
    # At its very end, when Python has, without PyTorch's destructors: they take longer than the program.
    libc.on_exit(libc._exit, None)
if order.get("session"):
    os.setsid()
os.chdir(order["folder"])
for number, file in enumerate(order["files"]):
    os.dup2(file, number)
    os.close(file)
os.close(nothing)
signal.alarm(order["timeout"])
os.environ.clear()
os.environ.update(order["environment"])
words = order["words"]
sys.orig_argv[1:] = words
if os.environ.get("PYTHONWARNINGS"):
    warnings.simplefilter(os.environ["PYTHONWARNINGS"])
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
own = True
while words[0][:2] in ("-W", "-B", "-P", "-u"):
    option, words = words[0], words[1:]
    if option == "-W":
        warnings.simplefilter(words[0])
        words = words[1:]
    elif option == "-B":
        sys.dont_write_bytecode = True
    elif option == "-P":
        own = False
    elif option == "-u":
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
sys.path[1:1] = [path for path in paths if path and path not in sys.path]


def lead(folder):
    # The first folder of the path is the program's own.
    if own:
        sys.path[0] = folder
    else:
        del sys.path[0]


if words[0] == "-m":
    sys.argv = words[1:]
    lead(os.getcwd())
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.exit()
main = sys.modules["__main__"] = types.ModuleType("__main__")
vars(main)["__builtins__"] = __builtins__
if words[0] == "-c":
    source, name, sys.argv = words[1], "<string>", ["-c", *words[2:]]
    lead("")
else:
    name, sys.argv = os.path.abspath(words[0]), words
    with open(name, encoding="utf-8") as file:
        source = file.read()
    lead(os.path.dirname(os.path.realpath(name)))
    main.__file__ = name
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
    forks: bool = False,
    ahead: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with ``-c``, ``-m`` or a script, as `subprocess.run` would with text captured.

    Of Python's options it knows ``-W`` with an action alone, ``-B``, ``-P`` and ``-u``. A program that
    takes longer than its time is killed.

    Args:
        command: The words, Python's own file first.
        cwd: Where it runs.
        env: Its environment, by default the one of this process.
        input: What it reads.
        timeout: Seconds.
        check: Whether another exit status than 0 is an error.
        forks: Whether programs that it starts by `subprocess` with its Python are run in the same way,
            on Linux: still its children, but in processes that have imported torch.
        ahead: Modules, with spaces between them, that the process has imported as well, on Linux, of
            what takes long to import.
    """
    environment = os.environ if env is None else env
    [done] = run_together(
        [command],
        cwd=cwd,
        envs=[environment],
        input=input,
        timeout=timeout,
        forks=forks,
        ahead=ahead,
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
    forks: bool = False,
    ahead: str = "",
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
        how = {"timeout": timeout, "forks": forks, "ahead": ahead}
        statuses = server().run([order | how for order in orders])
        for order in orders:
            wait_for_writers(order["paths"][1:])
        return [
            subprocess.CompletedProcess(
                order["words"],
                status,
                *(
                    Path(file).read_text(encoding="utf-8", errors="replace")
                    for file in order["paths"][1:]
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
    return {"words": [str(word) for word in command[1:]], "paths": list(map(str, files)), **more}
