"""A program run by Kedge is the program run by ``python``: output, errors and exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

import pytest

from kedge.errors import ScriptError
from kedge.program.program import Program

pytestmark = pytest.mark.timing

DRIVER = """
import sys
from kedge.program.program import Program

is_module = sys.argv[1] == "-m"
target, *args = sys.argv[1 + is_module :]
program = Program(target, is_module, args)
program.check()
program.run().leave()
"""


@dataclass(frozen=True)
class Outcome:
    """What a process left: stdout, stderr and its exit status."""

    stdout: str
    stderr: str
    status: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make an empty folder for programs, with Kedge's driver beside it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "driver.py").write_text(DRIVER)
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def _outcome(command: Sequence[str], folder: Path, merged: bool, stdin: str) -> Outcome:
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        timeout=60,
        check=False,
    )
    return Outcome(_comparable(done.stdout), _comparable(done.stderr or ""), done.returncode)


def _comparable(text: str) -> str:
    """Leave out what differs between any two processes, and the frames of runpy."""
    text = re.sub(r'  File "<frozen runpy>".*\n', "", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def both(
    folder: Path, *words: str, flags: Sequence[str] = (), merged: bool = False, stdin: str = ""
) -> tuple[Outcome, Outcome]:
    """Run the same program with ``python`` and with Kedge's driver."""
    plain = _outcome([sys.executable, *flags, *words], folder, merged, stdin)
    driver = str(folder.parent / "bin" / "driver.py")
    return plain, _outcome([sys.executable, *flags, driver, *words], folder, merged, stdin)


def script(folder: Path, source: str, name: str = "prog.py") -> str:
    """Write a program."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))
    return name


NAMES = """
    import sys
    names = {k: type(v) if k in ("__builtins__",) else v for k, v in globals().items() if k.startswith("__")}
    for key, value in sorted(names.items()):
        print(key, value)
    def here(): pass
    print(here.__code__.co_filename, here.__module__, sys.modules["__main__"].here is here)
    print(sys.argv, sys.path[:2], sys.orig_argv[1:])
"""

PROGRAMS = {
    "last line": 'print("a"); import sys; print("b", file=sys.stderr)',
    "names": NAMES,
    "exception": """
        def f(x):
            return 1 / x
        print("before")
        f(0)
    """,
    "chained exception": """
        try:
            {}["k"]
        except KeyError as error:
            raise ValueError("no k") from error
    """,
    "exception group": 'raise ExceptionGroup("two", [ValueError(1), TypeError(2)])',
    "exception with a note": 'e = ValueError("x"); e.add_note("a note"); raise e',
    "exit without a code": 'print("a"); raise SystemExit',
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit 256": "import sys; sys.exit(256)",
    "exit True": "import sys; sys.exit(True)",
    "exit with a message": 'import sys; print("a"); sys.exit("no data")',
    "exit with a number that no status holds": "import sys; sys.exit(2**70)",
    "exit with what cannot be printed": """
        import sys
        class Code:
            def __str__(self): raise ValueError
        sys.exit(Code())
    """,
    "an exit whose code cannot be read": """
        class Leave(SystemExit):
            code = property(lambda self: 1 / 0)
        raise Leave(3)
    """,
    "exit with a message and no stderr": 'import sys; sys.stderr = None; sys.exit("no data")',
    "exit without stdout": "import sys; del sys.stdout; sys.exit(3)",
    "an error whose text cannot be made": """
        class Mute(Exception):
            def __str__(self): raise ValueError
        raise Mute
    """,
    "an exception hook that is None": "import sys; sys.excepthook = None; 1 / 0",
    "all modules removed": "import sys; sys.modules.clear(); 1 / 0",
    "exit with a tuple": 'import sys; sys.exit(("a", 1))',
    "exit with an empty message": 'import sys; sys.exit("")',
    "exit in a function": """
        import sys
        def stop():
            try:
                sys.exit(4)
            finally:
                print("unwound")
        stop()
    """,
    "_exit": 'import os, sys; print("a", flush=True); os._exit(7)',
    "keyboard interrupt": 'print("a"); raise KeyboardInterrupt',
    "keyboard interrupt caught": """
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("stopped"); raise SystemExit(5)
    """,
    "own excepthook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, error, trace.tb_lineno)
        raise ValueError("x")
    """,
    "own excepthook exits": """
        import sys
        def hook(kind, error, trace):
            sys.exit(9)
        sys.excepthook = hook
        raise ValueError("x")
    """,
    "own excepthook fails": """
        import sys
        def hook(kind, error, trace):
            raise RuntimeError("in the hook")
        sys.excepthook = hook
        raise ValueError("x")
    """,
    "no excepthook": 'import sys; del sys.excepthook; raise ValueError("x")',
    "atexit": """
        import atexit, sys
        @atexit.register
        def _():
            print("bye", type(getattr(sys, "last_value", None)).__name__)
        raise ValueError("x")
    """,
    "atexit after interrupt": """
        import atexit
        atexit.register(print, "bye")
        raise KeyboardInterrupt
    """,
    "atexit that fails": """
        import atexit
        atexit.register(lambda: 1 / 0)
        print("end")
    """,
    "thread outlives the last line": """
        import threading, time
        def work():
            time.sleep(0.2); print("thread", threading.main_thread() is threading.enumerate()[0])
        threading.Thread(target=work).start()
        print("end")
    """,
    "thread fails": """
        import threading
        def work():
            raise ValueError("in a thread")
        t = threading.Thread(target=work, name="w"); t.start(); t.join()
    """,
    "object dies at exit": """
        class Last:
            def __del__(self): print("deleted")
        last = Last()
        print("end")
    """,
    "object of a frame dies at exit": """
        class Last:
            def __del__(self): print("deleted")
        def f():
            last = Last()
            raise ValueError("x")
        f()
    """,
    "warnings": """
        import warnings
        warnings.warn("one"); warnings.warn("two", DeprecationWarning)
        print(1 is 1)
    """,
    "stdin": "import sys; print(sys.stdin.read().upper(), sys.stdin.isatty())",
    "input": 'print("hello", input("name? "))',
    "annotations": "x: int = 1\nprint(__annotations__)",
    "future": "from __future__ import annotations\ndef f(a: Unknown): pass\nprint(f.__annotations__)",
    "no future inherited": "def f(a: int): pass\nprint(f.__annotations__)",
    "docstring": '"""A doc."""\nprint(__doc__)',
    "pickle": """
        import pickle
        class P:
            x = 1
        print(pickle.loads(pickle.dumps(P())).x, pickle.dumps(P)[:20])
    """,
    "spawn": """
        import multiprocessing as mp
        class Work:
            def __call__(self, x): return x * x
        def square(x): return Work()(x)
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """,
    "fork": """
        import multiprocessing as mp, sys
        def work(): print("child", flush=True); sys.exit(3)
        if __name__ == "__main__":
            p = mp.get_context("fork").Process(target=work); p.start(); p.join(); print(p.exitcode)
    """,
    "bare fork": """
        import os
        pid = os.fork()
        if pid:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else:
            raise SystemExit(6)
    """,
    "inspect and linecache": """
        import inspect
        def f():
            return 1
        class C: pass
        print(inspect.getsource(f), inspect.getfile(C), inspect.getsourcefile(f))
    """,
    "nothing imported ahead": """
        import sys
        print([name for name in ("torch", "numpy", "rich", "nanoarrow", "runpy") if name in sys.modules])
    """,
    "changed folder": 'import os, sys; os.chdir("/"); import json; print(sys.path[0], __file__)',
    "closed stdout": "import sys; sys.stdout.close(); raise ValueError(1)",
    "no stderr": "import sys; sys.stderr = None; print(1); raise ValueError(1)",
    "latin-1 source": b'# -*- coding: latin-1 -*-\nprint("\xe9")\n',
    "byte order mark": b'\xef\xbb\xbfprint("\xc3\xa9")\n',
    "syntax error later": 'exec("x = (")',
    "import error": "import not_there_at_all",
    "asyncio": """
        import asyncio
        async def main():
            await asyncio.sleep(0); print("a"); raise ValueError("x")
        asyncio.run(main())
    """,
}


#: Programs with an exit status that Python cannot read.
UNREADABLE_CODES = (
    PROGRAMS["exit with a number that no status holds"],
    PROGRAMS["exit with what cannot be printed"],
)


@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_script_does_what_python_does(folder: Path, source: str | bytes) -> None:
    """Stdout, stderr and the exit status of a script are those under ``python``."""
    if isinstance(source, bytes):
        (folder / "prog.py").write_bytes(source)
    else:
        script(folder, source)

    plain, ours = both(folder, "prog.py", "--lr", "1", "--", "-x", stdin="line\n")

    if source in UNREADABLE_CODES and sys.version_info >= (3, 12):
        # These Pythons forget the error of reading the code, find it again as they shut down, and print it.
        assert plain.stderr.startswith(ours.stderr)
        plain = replace(plain, stderr=ours.stderr)
    assert ours == plain


@pytest.mark.parametrize(
    "name", ["names", "exception", "keyboard interrupt", "exit 3", "pickle", "atexit"]
)
@pytest.mark.parametrize(
    "words", [("-m", "pack.inner.prog"), ("-m", "pack"), ("pack",), ("./pack",), ("pack.zip",)]
)
def test_modules_folders_and_archives_do_what_python_does(
    folder: Path, name: str, words: tuple[str, ...]
) -> None:
    """``-m``, a folder and a zip file with ``__main__.py`` behave as under ``python``."""
    source = PROGRAMS[name]
    assert isinstance(source, str)
    for place in ("pack/__init__.py", "pack/inner/__init__.py"):
        script(folder, "import sys; print('imported', sys.argv)", place)
    for place in ("pack/inner/prog.py", "pack/__main__.py"):
        script(folder, source, place)
    with zipfile.ZipFile(folder / "pack.zip", "w") as archive:
        archive.write(folder / "pack" / "__main__.py", "__main__.py")

    plain, ours = both(folder, *words, "-v")

    assert ours == plain


def test_spawned_processes_find_a_module_that_was_run_by_name(folder: Path) -> None:
    """A process that multiprocessing spawns unpickles what ``-m`` ran as ``__main__``."""
    source = PROGRAMS["spawn"]
    assert isinstance(source, str)
    script(folder, source, "pack/prog.py")

    plain, ours = both(folder, "-m", "pack.prog")

    assert ours == plain
    assert plain.status == 0


@pytest.mark.parametrize("place", ["sub/prog.py", "./prog.py", "link.py", "{folder}/prog.py"])
def test_the_script_folder_is_found_through_links(folder: Path, place: str) -> None:
    """``sys.path[0]`` is the real folder of the script, and its neighbours can be imported."""
    script(folder, "WORD = 'neighbour'", "sub/beside.py")
    script(folder, "WORD = 'top'", "beside.py")
    for name in ("sub/prog.py", "prog.py"):
        script(folder, dedent(NAMES) + "import beside; print(beside.WORD)", name)
    (folder / "link.py").symlink_to("sub/prog.py")

    plain, ours = both(folder, place.format(folder=folder))

    assert ours == plain
    assert plain.status == 0


@pytest.mark.parametrize("flags", [["-P"], ["-O"], ["-W", "error"], ["-X", "dev"]])
@pytest.mark.parametrize("words", [("prog.py",), ("pack",)])
def test_interpreter_flags_reach_the_program(
    folder: Path, flags: list[str], words: tuple[str, ...]
) -> None:
    """Flags given to the interpreter, ``-P`` included, mean to the program what they mean under ``python``."""
    source = "import sys\nprint(sys.path[0], __debug__, sys.flags)\nassert False\n"
    script(folder, source)
    script(folder, source, "pack/__main__.py")

    plain, ours = both(folder, *words, flags=flags)

    assert ours == plain


@pytest.mark.parametrize("words", [("prog.py",), ("-m", "prog")])
def test_output_comes_in_the_same_order(folder: Path, words: tuple[str, ...]) -> None:
    """What was printed comes before the traceback, and ``atexit`` handlers after it, in one stream."""
    script(
        folder, 'import atexit; atexit.register(print, "bye"); print("out"); raise ValueError("x")'
    )

    plain, ours = both(folder, *words, merged=True)

    assert ours == plain


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('in the package')", "import nothing_here", "raise SystemExit(4)"]
)
def test_a_failing_package_around_a_module_is_shown_as_python_shows_it(
    folder: Path, source: str
) -> None:
    """What a parent package raises while it is imported is the program's own error."""
    script(folder, source, "pack/__init__.py")
    script(folder, "print(1)", "pack/prog.py")

    plain, ours = both(folder, "-m", "pack.prog")

    assert ours == plain


def test_a_compiled_script_runs(folder: Path) -> None:
    """A ``.pyc`` file runs as a script."""
    script(folder, NAMES)
    compile_it = "import py_compile; py_compile.compile('prog.py', 'prog.pyc')"
    subprocess.run([sys.executable, "-c", compile_it], cwd=folder, check=True)

    plain, ours = both(folder, "prog.pyc")

    assert ours == plain
    assert "SourcelessFileLoader" in plain.stdout


def test_a_package_that_changes_its_own_path_runs(folder: Path) -> None:
    """A module that only the import of its package makes findable runs under ``-m``."""
    script(folder, "import os; __path__.append(os.path.abspath('elsewhere'))", "pack/__init__.py")
    script(folder, NAMES, "elsewhere/prog.py")

    plain, ours = both(folder, "-m", "pack.prog")

    assert ours == plain
    assert plain.status == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_as_python(folder: Path, sent: signal.Signals) -> None:
    """Ctrl-C and a kill end the process by the signal, with the traceback that Python shows."""
    script(folder, "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.01)\n")
    driver = str(folder.parent / "bin" / "driver.py")
    outcomes = []
    for words in ([], [driver]):
        process = subprocess.Popen(
            [sys.executable, *words, "prog.py"],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(sent)
        outcomes.append(
            (
                process.communicate(timeout=30)[1].replace("while True:", "time.sleep(0.01)"),
                process.returncode,
            )
        )

    assert outcomes[1][1] == outcomes[0][1] == -sent
    assert re.sub(r"line \d", "line", outcomes[1][0]) == re.sub(r"line \d", "line", outcomes[0][0])


BAD = {
    "missing": (
        "nope.py",
        False,
        "cannot run nope.py: there is no such file in {cwd}; check the path",
    ),
    "empty folder": (
        "empty",
        False,
        "cannot run empty: the directory has no __main__.py; name a script in it",
    ),
    "does not parse": (
        "bad.py",
        False,
        "cannot run bad.py: it does not parse; {cwd}/bad.py:2: '(' was never closed",
    ),
    "null byte": (
        "null.py",
        False,
        "cannot run null.py: it does not parse; null.py: source code string cannot contain null bytes",
    ),
    "bad folder": (
        "badpack",
        False,
        "cannot run badpack: it does not parse; {cwd}/badpack/__main__.py:1: invalid syntax",
    ),
    "no module": (
        "trian",
        True,
        "cannot run -m trian: there is no module trian; check the name, and that {cwd} is the folder to import it from",
    ),
    "a file after -m": (
        "bad.py",
        True,
        "cannot run -m bad.py: this is a file; to run a file, leave -m out: kedge run bad.py",
    ),
    "a missing file after -m": (
        "jobs/bad.py",
        True,
        "cannot run -m jobs/bad.py: there is no module jobs/bad; to run a file, leave -m out: kedge run jobs/bad.py",
    ),
    "module does not parse": (
        "bad",
        True,
        "cannot run -m bad: it does not parse; {cwd}/bad.py:2: '(' was never closed",
    ),
    "package without main": (
        "plainpack",
        True,
        "cannot run -m plainpack: it is a package without __main__.py; name a module in it",
    ),
}


@pytest.mark.parametrize(("target", "is_module", "message"), BAD.values(), ids=BAD.keys())
def test_a_program_that_cannot_start_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, is_module: bool, message: str
) -> None:
    """``check`` names what was asked, what was found and what to do, and leaves ``sys.path`` alone."""
    monkeypatch.chdir(folder)
    script(folder, "\nx = (\n", "bad.py")
    script(folder, "x ==\n", "badpack/__main__.py")
    script(folder, "", "plainpack/__init__.py")
    (folder / "null.py").write_bytes(b"x = 1\0\n")
    (folder / "empty").mkdir()
    before = list(sys.path)

    with pytest.raises(ScriptError) as caught:
        Program(target, is_module, []).check()

    cause = caught.value.__cause__
    if (
        isinstance(cause, SyntaxError) and cause.filename
    ):  # some Pythons know the place of a null byte
        message = message.replace("null.py: source", "{cwd}/null.py:1: source")
    assert str(caught.value) == message.format(cwd=folder)
    assert sys.path == before


def test_a_missing_module_of_a_package_is_refused_once_the_package_is_imported(
    folder: Path,
) -> None:
    """What only the import can find out is reported then, by the same kind of error."""
    script(folder, "print('imported')", "pack/__init__.py")

    _, ours = both(folder, "-m", "pack.trian")

    assert ours.stdout == "imported\n"
    assert ours.stderr.splitlines()[-1] == (
        "kedge.errors.ScriptError: cannot run -m pack.trian: there is no module of that name; check the name, and that "
        f"{folder} is the folder to import it from"
    )


def test_a_module_that_is_not_written_in_python_is_refused(folder: Path) -> None:
    """A module in C has no code that could run as a program."""
    _, ours = both(folder, "-m", "sys")

    assert ours.stderr.splitlines()[-1] == (
        "kedge.errors.ScriptError: cannot run -m sys: it is not written in Python; name another module"
    )


def test_nothing_runs_before_the_check_has_passed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``check`` runs no line of the script, and imports nothing for a module."""
    monkeypatch.chdir(folder)
    script(folder, "raise AssertionError", "pack/__init__.py")
    script(folder, "raise AssertionError", "pack/prog.py")
    modules = set(sys.modules)

    Program("pack/prog.py", False).check()
    Program("pack.prog", True).check()

    assert not {name for name in set(sys.modules) - modules if name.startswith("pack")}


@pytest.mark.parametrize(
    ("target", "is_module", "name"),
    [
        ("jobs/train.py", False, "train.py"),
        ("jobs/", False, "jobs"),
        (".", False, "work"),
        ("a.train", True, "a.train"),
    ],
)
def test_the_name_of_a_program_is_short(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, is_module: bool, name: str
) -> None:
    """A program's name is fit for the name of a file."""
    monkeypatch.chdir(folder)

    assert Program(target, is_module).name == name
