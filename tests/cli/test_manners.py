"""What was typed wrong is answered in one line: what was asked, what was found, what to do."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from kedge.cli.extract import ExtractCommand
from kedge.cli.main import main
from kedge.cli.recordings import expanded, scanned
from kedge.cli.sites import SitesCommand

#: What is typed, and what the answer says; RUN has a healthy recording, a broken one, programs, a
#: folder and a file.
MISTYPED = [
    ("repot", "there is no command 'repot'; did you mean: kedge report"),
    (
        "repot healthy.kedge --all",
        "there is no command 'repot'; did you mean: kedge report healthy.kedge --all",
    ),
    (
        "rnu train.py",
        "no command 'rnu'; did you mean: kedge run train.py (all commands: kedge --help)",
    ),
    ("rum", "there is no command 'rum'; did you mean: kedge run (all commands: kedge --help)"),
    ("RUN train.py", "did you mean: kedge run train.py"),
    ("show healthy", "there is no command 'show'; did you mean: kedge report healthy"),
    ("frobnicate", "there is no command 'frobnicate'; the commands are run, examine, attach,"),
    (
        "train.py --lr 1",
        "train.py is a program, not a command; to run and record it: kedge run train.py --lr 1",
    ),
    ("./train.py", "to run and record it: kedge run ./train.py"),
    (
        "healthy.kedge",
        "healthy.kedge is a recording, not a command; to read it: kedge report healthy.kedge",
    ),
    (
        "--every 1 train.py",
        "--every is an option of kedge run, which is missing: kedge run --every 1 train.py",
    ),
    ("-m package", "-m is an option of kedge run, which is missing: kedge run -m package"),
    ("--hlep", "there is no option --hlep; did you mean --help?"),
    ("-v", "there is no option -v; see kedge --help"),
    ("report nothing", "nothing is not a recording: there is no such folder; here there is"),
    (
        "report helthy",
        "helthy is not a recording: there is no such folder; did you mean healthy.kedge?",
    ),
    ("report ./broke.kedge", "there is no such folder; did you mean ./broken.kedge?"),
    (
        "report train.py",
        "train.py is not a recording: it is a file; its newest recording is train.py.7.kedge",
    ),
    (
        "report bad.py",
        "bad.py is not a recording: it is a file; name a folder that kedge run wrote",
    ),
    (
        "report torn",
        "torn.kedge is not a recording: the folder is empty and has no manifest.json; name a folder",
    ),
    (
        "report folder",
        "folder is not a recording: the folder is empty and has no manifest.json; name a folder",
    ),
    (
        "report healthy broken --saved",
        "--headroom, --saved and --all are for a single recording: name one",
    ),
    (
        "report healthy broken --sites log",
        "a table of several recordings has no modules: leave --sites out, add --html, or name one",
    ),
    ("report healthy --html --all", "a page has all sites: leave --all out"),
    ("report healthy --htlm", "there is no option --htlm; did you mean --html?"),
    ("report healthy -x", "there is no option -x; see kedge report --help"),
    ("report healthy -o x.html", "-o and --no-source are for pages: add --html"),
    ("report healthy --html -o folder", "cannot write folder: Is a directory;"),
    (
        "report healthy --html -o none/x.html",
        "cannot write none/x.html: No such file or directory; create the folder",
    ),
    (
        "report healthy --json --all",
        "--json prints every module: leave --html, --headroom, --saved and --all out",
    ),
    ("report healthy --sites nosuch", '"nosuch" selects nothing in this recording;'),
    (
        "report healthy --html --sites lgo",
        '"lgo" selects nothing in this recording; the nearest are "log"',
    ),
    (
        "report healthy broken --html --sites lgo",
        '"lgo" selects nothing in this recording; the nearest are "log"',
    ),
    ("serve healthy --sites lgo", '"lgo" selects nothing in this recording; the nearest are "log"'),
    (
        "diff healthy broken --sites lgo",
        '"lgo" selects nothing in these recordings; the nearest are "log"',
    ),
    (
        "diff healthy broken --html --sites lgo",
        '"lgo" selects nothing in these recordings; the nearest are "log"',
    ),
    (
        "query healthy SELECT --sites lgo",
        '"lgo" selects nothing in this recording; the nearest are "log"',
    ),
    (
        "export healthy --parquet --sites lgo",
        '"lgo" selects nothing in this recording; the nearest are "log"',
    ),
    (
        "report healthy --config none.toml",
        "cannot read none.toml: No such file or directory; name another file",
    ),
    ("check healthy --select NAN-BURN", "there is no rule 'NAN-BURN': the nearest are NAN-BORN"),
    ("check healthy --select", "--select: expected one argument; see kedge check --help"),
    ("check healthy --jsn", "there is no option --jsn; did you mean --json?"),
    ("diff healthy", "name two recordings, or one with --ranks and two numbers"),
    ("diff healthy broken more", "'more' is one argument too many; see kedge diff --help"),
    ("diff healthy brken", "did you mean broken.kedge?"),
    (
        "diff healthy broken --tolerance big",
        "--tolerance: 'big' is not a relative difference; 1e-5 tolerates",
    ),
    ("diff healthy --ranks 0 x", "--ranks: invalid int value: 'x'; see kedge diff --help"),
    ("diff healthy --ranks 0 5", "healthy.kedge has no data of rank 5: it has rank 0"),
    ("explain NAN-BURN", "there is no rule 'NAN-BURN': the nearest are NAN-BORN"),
    ("explain SPIKE --jsno", "there is no option --jsno; did you mean --json?"),
    ("export healthy", "one of the arguments --parquet is required; see kedge export --help"),
    (
        "export healthy --parquet -o taken.txt",
        "cannot write taken.txt: it exists already; replace it with --force",
    ),
    (
        "query healthy",
        'the query is missing; write it after the name of the recording, such as "SELECT',
    ),
    ("query", "the following arguments are required: SQL; see kedge query --help"),
    ("run", "name the program to run: a script, or -m and a module"),
    ("run nothing.py", "cannot run nothing.py: there is no such file in"),
    ("run tran.py --lr 1", "did you mean: kedge run train.py --lr 1"),
    ("run train", "did you mean: kedge run train.py"),
    ("run folder", "cannot run folder: the directory has no __main__.py; name a script in it"),
    (
        "run healthy.kedge",
        "cannot run healthy.kedge: it is a recording; to read it: kedge report healthy.kedge",
    ),
    (
        "run train.ipynb",
        "cannot run train.ipynb: it is a notebook; use kedge.watch in a cell of it",
    ),
    (
        "run python train.py",
        "there is no such file in {here}; leave python out: kedge run train.py",
    ),
    ("run python", "cannot run python: there is no such file in {here}; check the path"),
    ("run -- python train.py --lr 1", "leave python out: kedge run train.py --lr 1"),
    ("run python -m package.train", "leave python out: kedge run -m package.train"),
    (
        "run .venv/bin/python3.11 -u -W error train.py",
        "kedge: .venv/bin/python3.11 -u -W error -m kedge run train.py",
    ),
    ("run bindings/python train.py", "leave bindings/python out: kedge run train.py"),
    ("run python -c 1", "code on the command line cannot be recorded; write it into a file"),
    (
        "run torchrun --nproc-per-node 2 train.py --lr 1",
        "watched: torchrun --nproc-per-node 2 -m kedge run train.py --lr 1",
    ),
    (
        "run torchrun --nproc-per-node 2 -m a.b",
        "watched: torchrun --nproc-per-node 2 -m kedge run -m a.b",
    ),
    ("run torchrun --help", "watched: torchrun --help -m kedge run SCRIPT"),
    (
        "run -m torch.distributed.run train.py",
        "watched: python -m torch.distributed.run -m kedge run train.py",
    ),
    (
        "run python -m torch.distributed.run train.py",
        "watched: python -m torch.distributed.run -m kedge run train.py",
    ),
    (
        "run accelerate launch --num_processes 2 train.py",
        "watched: accelerate launch --num_processes 2 -m kedge run train.py",
    ),
    ("run bin/torchrun train.py", "watched: bin/torchrun -m kedge run train.py"),
    ("run deepspeed --module a.b", "watched: deepspeed --module kedge run -m a.b"),
    (
        "torchrun train.py",
        "torchrun is not a command; torchrun starts other processes, and each of them is to be watched",
    ),
    (
        "run A=1 B='x y' python train.py",
        "variables stand before kedge: A=1 B='x y' kedge run train.py",
    ),
    (
        "run nohup nice -n 5 python train.py",
        "nohup stands before kedge: nohup nice -n 5 kedge run train.py",
    ),
    (
        "run A=1 python -u train.py",
        "variables stand before kedge: A=1 python -u -m kedge run train.py",
    ),
    (
        "run A=1 torchrun train.py",
        "variables stand before kedge: A=1 torchrun -m kedge run train.py",
    ),
    ("run A=1", "variables stand before kedge: A=1 kedge run SCRIPT"),
    (
        "run nohup python -u train.py",
        "nohup stands before kedge: nohup python -u -m kedge run train.py",
    ),
    (
        "run srun -n 2 torchrun train.py",
        "srun stands before kedge: srun -n 2 torchrun -m kedge run train.py",
    ),
    ("run uv run train.py", "uv stands before kedge: uv run kedge run train.py"),
    (
        "run job.sh",
        "cannot run job.sh: job.sh is for a shell; write kedge run into it in place of python",
    ),
    ("run ./bin/job", "./bin/job is for a shell; write kedge run into it in place of python"),
    ("run bash job.sh", "job.sh is for a shell; write kedge run into it in place of python"),
    (
        "run package.train",
        "there is no such file in {here}; did you mean: kedge run -m package.train",
    ),
    ("run ''", "the name of the program is empty: name a script, or -m and a module"),
    ("help repot", "there is no command 'repot'; did you mean: kedge report --help"),
    (
        "--help frobnicate",
        "there is no command 'frobnicate'; the commands are run, examine, attach,",
    ),
    ("run -m", "name the program to run: a script, or -m and a module"),
    ("run -m nosuch", "cannot run -m nosuch: there is no module nosuch; check the name"),
    ("run -m train.py", "this is a file; to run a file, leave -m out: kedge run train.py"),
    ("run --evry 3 train.py", "there is no option --evry; did you mean --every?"),
    ("run --every 0 train.py", "--every: '0' is not a number of steps; 1 measures every step"),
    (
        "run --budget 300% train.py",
        "--budget: '300%' is not a share of the time; write one such as 3%",
    ),
    (
        "run -o taken.txt train.py",
        "something that is not a recording is there and is left alone; name another place",
    ),
    (
        "run -o healthy.kedge train.py",
        "there is one already; name another place, or replace it with --force",
    ),
    ("run -o none/x.kedge train.py", "there is no folder none; create it, or name another place"),
    ("attach", "the following arguments are required: PID; see kedge attach --help"),
    (
        "attach train.py",
        "PID: 'train.py' is not the number of a process; list the Python processes: pgrep -a python",
    ),
    ("attach 1 --for soon", "--for: 'soon' is not a time; write one such as 90s, 5m or 2h"),
    ("sites tran.py", "did you mean: kedge sites train.py"),
    ("sites --ops --json train.py", "--json lists only sites: leave --ops out"),
    ("sites --ops --sites a train.py", "--sites chooses no operations: leave --ops out"),
    ("serve healthy --port x", "--port: 'x' is not a port; name a number up to 65535"),
    ("serve nothing.kedge", "there is no such folder; here there is"),
    ("live healthy", "kedge live needs a terminal, and its output is not one; kedge report prints"),
    (
        "extract",
        "the following arguments are required: --data, --sites, --out; see kedge extract --help",
    ),
    (
        "extract a:b --data a:b --sites a --out d --batch-size many",
        "--batch-size: invalid int value: 'many'; see",
    ),
]


@pytest.fixture
def here(tmp_path: Path, recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the working directory a folder with recordings, programs, a folder and a file."""
    for number, (name, broken) in enumerate(
        [("train.py.7", None), ("broken", 10), ("healthy", None)]
    ):
        place = recorded(broken).rename(tmp_path / f"{name}.kedge")
        os.utime(place / "manifest.json", (number, number))
    (tmp_path / "train.py").write_text("raise SystemExit('this program is not to be run')\n")
    (tmp_path / "bad.py").write_text("def (:\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bindings" / "python").mkdir(parents=True)
    (tmp_path / "torn.kedge").mkdir()
    (tmp_path / "taken.txt").write_text("mine")
    (tmp_path / "job.sh").write_text("python train.py\n")
    for name, text in (
        ("bin/torchrun", "raise SystemExit"),
        ("bin/job", "#!/bin/bash -e\n"),
        ("package/train.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(line: str) -> int | str | None:
    """Return the exit status of a command line."""
    try:
        return main(shlex.split(line))
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(("line", "answer"), MISTYPED, ids=[line for line, _ in MISTYPED])
def test_what_was_typed_wrong_is_answered_in_one_line(
    line: str, answer: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line goes to stderr, the exit status is 2, and nothing is written."""
    before = sorted(here.rglob("*"))

    assert typed(line) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kedge")
    assert answer.format(here=here) in said.err
    assert said.err.count("\n") == 1
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "prog"),
    [
        ("sites train.py", "kedge sites"),
        ("extract a:b --data a:b --sites a --out d", "kedge extract"),
        ("--version -v", "kedge --version -v"),
    ],
)
@pytest.mark.usefixtures("here")
def test_without_torch_its_lack_is_named(
    line: str, prog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that needs PyTorch says so where Kedge was installed without it."""
    lacking = ModuleNotFoundError("No module named 'torch'", name="torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (SitesCommand, ExtractCommand):
        monkeypatch.setattr(command, "run", Mock(side_effect=lacking))

    assert typed(line) == 2
    assert capsys.readouterr() == (
        "",
        f"kedge: {prog} needs PyTorch, and {sys.executable} has none; pip install torch\n",
    )


@pytest.mark.parametrize(
    "name", ["healthy", "healthy.kedge", "./healthy", "healthy/", "{here}/healthy"]
)
@pytest.mark.usefixtures("here")
def test_a_recording_is_found_without_its_suffix(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kedge check healthy`` reads healthy.kedge."""
    assert typed(f"check {name.format(here=here)}") == 0
    assert capsys.readouterr().out.startswith("✓ no findings")


def test_a_folder_of_the_same_name_is_not_in_the_way(here: Path) -> None:
    """A folder that is not a recording does not hide the recording beside it."""
    (here / "healthy").mkdir()

    assert typed("check healthy") == 0


@pytest.mark.parametrize(
    ("line", "status"),
    [("check", 0), ("report --all", 0), ("query --json 'SELECT 1'", 0), ("export --parquet", 0)],
)
@pytest.mark.usefixtures("here")
def test_without_a_name_the_newest_recording_is_read(
    line: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named on stderr, so that stdout has the answer alone."""
    assert typed(line) == status
    assert capsys.readouterr().err == "[kedge] reading healthy.kedge, the newest recording here\n"


def test_any_name_will_do_for_a_recording(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One without the suffix is found like the others: as the newest, as a near name, and in a folder."""
    (here / "healthy.kedge").rename(here / "healthy")

    assert typed("check") == 0
    assert capsys.readouterr().err == "[kedge] reading healthy, the newest recording here\n"
    assert typed("check helthy") == 2
    assert capsys.readouterr().err.endswith("did you mean healthy?\n")
    names = ["train.py.7.kedge", "broken.kedge", "healthy", "torn.kedge"]
    assert [one.name for one in scanned(str(here))] == names
    assert [Path(path).name for path in expanded([str(here)])] == names


def test_what_only_looks_like_a_recording_is_not_found(here: Path) -> None:
    """Other programs have manifests, too, and Kedge begins a recording in a hidden folder; a newer version's counts."""
    for name, text in {
        "site": '{"name": "a web page", "format": "html"}',
        "broken-json": "{",
        ".new.kedge.12ab": '{"format": 1}',
        "newer": '{"format": 99, "kedge": "9.0"}',
    }.items():
        (here / name).mkdir()
        (here / name / "manifest.json").write_text(text)
    (here / "file.kedge").touch()

    found = {one.name: one.whole for one in scanned(str(here))}
    whole = ["train.py.7.kedge", "broken.kedge", "healthy.kedge", "newer"]
    assert found == dict.fromkeys(whole, True) | {"torn.kedge": False}
    assert scanned(str(here / "nothing")) == []


def test_where_there_is_no_recording_one_must_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name and a recording, the answer says what writes one."""
    monkeypatch.chdir(tmp_path)

    assert typed("check") == 2
    assert capsys.readouterr().err == (
        f"kedge: no recording is named, and there is none in {tmp_path}: kedge run writes one; or name its folder\n"
    )


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "line",
    ["diff healthy --json broken", "diff --json healthy broken", "diff healthy broken --json"],
)
def test_options_may_stand_anywhere(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option between two arguments does not end them."""
    assert typed(line) == 1
    assert '"parted": true' in capsys.readouterr().out
