"""The end of ``kedge run`` is the end of the program: its exit status, its streams, and its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import TRAIN
from tests.cli.serving import Server

pytestmark = pytest.mark.timing

KEDGE = "-m kedge run prog.py"


def both(
    tmp_path: Path, source: str, streams: str = "", flags: str = ""
) -> list[tuple[str, str, int]]:
    """Run a program with python, and with Kedge, with streams as a shell redirects them; returns the two outcomes."""
    (tmp_path / "prog.py").write_text(source)
    commands = [f"{sys.executable} {flags} {words} {streams}" for words in ("prog.py", KEDGE)]
    done = [
        subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for command in commands
    ]
    return [(each.stdout, each.stderr.replace("[kedge] nothing was recorded: the program did not import torch\n", ""), each.returncode) for each in done]  # fmt: skip


@pytest.mark.parametrize(
    "source", ["x = (\n", "if 1:\nx = 1\n", "return\n"], ids=["open", "indent", "return"]
)
def test_a_program_that_does_not_parse_ends_as_under_python(tmp_path: Path, source: str) -> None:
    """Its message is Python's, and its exit status is 1."""
    plain, ours = both(tmp_path, source)

    assert ours == plain
    assert ours[2] == 1


@pytest.mark.parametrize(
    ("source", "streams"),
    [
        ('print("out"); raise SystemExit("message")', "2>&-"),
        ('print("out"); 1 / 0', "2>&-"),
        ("raise SystemExit(4)", ">&-"),
        (
            'print(open("it", "w").fileno(), file=open("numbers", "w")); raise SystemExit(4)',
            ">&- 2>&- <&-",
        ),
    ],
    ids=["message", "error", "no stdout", "none"],
)
def test_what_has_no_stderr_goes_nowhere(tmp_path: Path, source: str, streams: str) -> None:
    """Kedge's messages do not go to stdout in its place, nor to the file that has its number."""
    plain, ours = both(tmp_path, source, streams)

    assert ours == plain


def test_the_last_words_do_not_go_into_the_programs_file(server: Server, tmp_path: Path) -> None:
    """If the program has closed stderr and its own file has that number, they go to the stderr that was there at first."""
    source = (
        TRAIN
        + "train(); os.close(2); file = open('mine', 'w'); print(file.fileno()); file.write('mine')"
    )
    done = server.run(source, tmp_path, ["run", "-o", "it.kedge", "prog.py"])

    assert (done.stdout, done.status) == ("2\n", 0)
    assert done.told[-1] == "[kedge] see more with: kedge report it.kedge"
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_failure_at_the_end_is_one_sentence(server: Server, tmp_path: Path) -> None:
    """Where Kedge itself cannot end, the program still ends with its own status."""
    broken = "import kedge.cli.watching as w\ndef no(self): raise RuntimeError('no end')\nw.Watching.finish = no\n"
    done = server.run(
        TRAIN + broken + "train(); raise SystemExit(7)",
        tmp_path,
        ["run", "-o", "it.kedge", "prog.py"],
    )

    assert (done.stdout, done.status) == ("", 7)
    assert done.told == [
        "[kedge] could not finish the recording: RuntimeError: no end; its end may be missing"
    ]


def test_training_in_a_thread_is_recorded_to_its_end(server: Server, tmp_path: Path) -> None:
    """The last line of the main thread is not the end: a NaN that comes later, in a thread, is found."""
    late = """
def late():
    train(3); time.sleep(0.2)
    model = nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in [1.0, 1.0, float("nan")]:
        loss = (model(torch.ones(2, 4)) * factor).sum(); loss.backward(); optimizer.step()
threading.Thread(target=late).start()
"""
    done = server.run(TRAIN + late, tmp_path, ["run", "-o", "it.kedge", "prog.py"])

    assert done.status == 0
    assert "NAN-BORN" in done.told[1]


WAITED_FOR = {
    "a pool of threads that nobody ends": """
import atexit, concurrent.futures
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.1), print("late", train())))
atexit.register(print, "atexit")
""",
    "an interrupt while a thread runs": """
main = threading.main_thread().ident
def late():
    while threading.main_thread().is_alive(): time.sleep(0.01)
    signal.pthread_kill(main, signal.SIGINT); time.sleep(5); os.write(1, b"late")
train()
threading.Thread(target=late).start()
""",
    "an exit by a handler while a thread runs": """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
main = threading.main_thread().ident
def late():
    while threading.main_thread().is_alive(): time.sleep(0.01)
    signal.pthread_kill(main, signal.SIGTERM); time.sleep(5)
train()
threading.Thread(target=late).start()
raise SystemExit(4)
""",
}


@pytest.mark.parametrize("source", WAITED_FOR.values(), ids=WAITED_FOR.keys())
def test_threads_are_waited_for_as_python_does(server: Server, tmp_path: Path, source: str) -> None:
    """Output, errors and the way it ends are those without Kedge."""
    plain = server.run(TRAIN + source, tmp_path / "plain", None)
    ours = server.run(
        TRAIN + source, tmp_path / "ours", ["run", "-q", "-o", "../it.kedge", "prog.py"]
    )

    assert (ours.stdout, ours.stderr, ours.ending) == (plain.stdout, plain.stderr, plain.ending)


def test_a_handler_that_ends_the_program_after_its_end_changes_no_status(
    server: Server, tmp_path: Path
) -> None:
    """A signal that comes while Kedge finishes the recording finds a program that has ended, with its own status."""
    stop = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
import kedge.store.recording as reading
reading.Recording.open = lambda *_: signal.raise_signal(signal.SIGTERM)
train(); raise SystemExit(4)
"""
    done = server.run(TRAIN + stop, tmp_path, ["run", "-o", "it.kedge", "prog.py"])

    assert (done.stdout, done.status) == ("", 4)
