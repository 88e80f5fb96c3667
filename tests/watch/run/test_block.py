"""Watching a part of a program from within."""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import Recompiled, RecordingExists, SelectorError, WatchingFailed
from kedge.store.recording import Recording
from kedge.testing import assert_same_bits, assert_unhooked
from tests.integrations.smallnets import Log, train


def net(last=None):
    """Make a small classifier."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), last or nn.Softmax(-1))


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Make a watch that records in the test's folder, which is the current one, without a limit on what it costs."""
    monkeypatch.chdir(tmp_path)
    made = []

    def make(path="run.kedge", **options):
        made.append(kedge.watch(path, **{"budget": None, **options}))
        return made[-1]

    yield make
    for watched in made:
        watched.strict = False
        watched.end()


def test_five_lines_are_enough(tmp_path, monkeypatch, capsys):
    """A block makes a recording, and tells the user what was seen, what was found, where, and what to type next."""
    monkeypatch.chdir(tmp_path)
    with kedge.watch("run.kedge"):
        train(net(Log()))

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert "25 steps" in lines[0]
    assert re.fullmatch(
        r"\[kedge\] 1 error: NAN-BORN at 3:out; \d+ rules could not judge", lines[1]
    )
    assert re.fullmatch(r"\[kedge\] \S+:\d+ in Log.forward: return .*log.*", lines[2])
    assert lines[3].startswith("[kedge] kept steps 0, 1; run one again with: kedge replay run.")
    assert lines[4] == "[kedge] see more with: kedge report run.kedge"
    assert Recording.open("run.kedge").end.error is None


def test_a_watched_training_is_the_same_to_the_last_bit(watch):
    """Parameters, and the random numbers after it, are those of the training that is not watched."""
    ended = []
    for watched in (None, watch(every=2)):
        torch.manual_seed(1)
        model = net()
        if watched is not None:
            watched.begin()
        train(model)
        if watched is not None:
            watched.end()
        ended.append({**model.state_dict(), "next": torch.randn(3)})

    assert_same_bits(*ended)


def test_the_recording_says_what_was_watched(watch, monkeypatch):
    """The manifest names the program and the order, the end how it ended."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    with watch(sites="2", every=5, budget=0.5) as run:
        model = net()
        train(model)
    recording = Recording.open(run.recording)

    asked = {
        "sites": "2",
        "every": 5,
        "budget": 0.5,
        "script": sys.argv[0],
        "command": sys.argv,
        "pid": os.getpid(),
    }
    assert {key: recording.manifest[key] for key in asked} == asked
    assert {site.path for site in recording.sites if site.kind == "out"} == {"2"}
    assert recording.end.exit == 0
    assert recording.end.steps == run.summary.steps == 25
    assert_unhooked(model)


def test_a_list_selects_what_is_watched(watch):
    """It is written down as the text that selects the same."""
    with watch(sites=["0", "2"]) as run:
        train(net(), 2)
    recording = Recording.open(run.recording)

    assert recording.manifest["sites"] == "0, 2"
    assert {site.path for site in recording.sites if site.kind == "out"} == {"0", "2"}


def test_what_is_found_can_be_asked_while_it_runs(watch):
    """Findings and the summary are of what was seen so far; before the first step there is nothing."""
    seen = []
    run = watch()
    assert (run.findings(), run.summary) == ((), None)
    with run:
        assert run.findings() == ()
        train(
            net(Log()),
            then=lambda step: seen.append((run.summary.steps, [f.code for f in run.findings()])),
        )

    assert [steps for steps, _ in seen] == list(range(1, 26))
    assert seen[-1][1] == ["NAN-BORN"]
    assert [f.code for f in run.findings()] == ["NAN-BORN"]


def test_a_dump_is_kept_on_request(watch):
    """What was around the first value that is not finite is in the recording, if that was asked for."""
    for name, dump in (("run.kedge", True), ("other.kedge", False)):
        with watch(name, dump=dump):
            train(net(Log()))
        kinds = [event.kind for event in Recording.open(name).events]
        assert ("dump" in kinds, any(Path(name).glob("dump-*"))) == (dump, dump)


def test_without_a_block_it_begins_and_ends(watch):
    """A plain object does what the block does; ending twice is ending once."""
    run, model = watch(), net()
    assert run.begin() is run
    train(model)
    run.end()
    run.end()
    train(model)

    assert Recording.open("run.kedge").end.steps == 25
    assert_unhooked(model)


def test_an_error_passes_through_and_is_recorded(watch):
    """What ends the block ends it, the recording says so, and no hook is left."""
    model = net()
    with pytest.raises(ZeroDivisionError), watch() as run:
        train(model, 3)
        _ = 1 / 0

    assert Recording.open(run.recording).end.error == "ZeroDivisionError: division by zero"
    assert Recording.open(run.recording).end.exit == 1
    assert_unhooked(model)


def test_it_can_be_used_again(watch):
    """What it recorded is not replaced: the next recording is numbered.

    Beginning ends what is under way.
    """
    run = watch()
    for steps in (2, 3):
        run.begin()
        train(net(), steps)
    run.end()

    assert run.recording == Path("run-2.kedge")
    assert [Recording.open(name).end.steps for name in ("run.kedge", "run-2.kedge")] == [2, 3]


def test_a_place_that_is_taken_is_an_error_before_anything_runs(watch):
    """A recording is replaced only with force; a selector that cannot be read is an error at once."""
    with watch():
        train(net(), 2)
    with pytest.raises(
        RecordingExists, match="there is one already; name another place, or replace it"
    ):
        watch().begin()
    with watch(force=True):
        train(net(), 3)
    with pytest.raises(SelectorError):
        kedge.watch(sites="conv[")
    with pytest.raises(ValueError, match="must be 1 or more"):
        kedge.watch(every=0)

    assert Recording.open("run.kedge").end.steps == 3


def test_a_run_without_a_name_gets_one(watch, monkeypatch):
    """The name is made of the script's and the process's, so that no run replaces another."""
    monkeypatch.setattr(sys, "argv", ["jobs/train.py", "--lr", "1"])
    with watch(None) as run:
        train(net(), 2)

    assert run.recording == Path(f"train.py.{os.getpid()}.kedge")
    assert Recording.open(run.recording).manifest["command"] == ["jobs/train.py", "--lr", "1"]


def test_a_run_in_a_notebook_is_not_named_after_its_kernel(watch, monkeypatch):
    """The words by which Jupyter starts a kernel say nothing about the notebook."""
    monkeypatch.setattr(
        sys, "argv", ["/opt/python/site-packages/ipykernel_launcher.py", "-f", "/run/kernel-7.json"]
    )
    with watch(None) as run:
        train(net(), 2)

    assert run.recording == Path(f"notebook.{os.getpid()}.kedge")
    assert Recording.open(run.recording).manifest["command"] == ["notebook"]


def test_nothing_is_left_where_no_module_was_called(watch, capsys):
    """A block without a model leaves no recording and says so."""
    with watch():
        pass

    assert list(Path().iterdir()) == []
    assert "nothing was recorded: the program called no module" in capsys.readouterr().err


class Breaks:
    """A sink that cannot take what it is given."""

    def __init__(self):
        self.asked = self.after = 0

    def sites(self, sites, roots):
        self.asked += 1

    def stats(self, step, columns):
        self.asked, self.after = self.asked + 1, 0
        raise ValueError("full")

    def event(self, event):
        self.asked, self.after = self.asked + 1, self.after + 1

    def close(self):
        self.asked, self.after = self.asked + 1, self.after + 1


class Keeps(Breaks):
    """A sink that keeps what it is given."""

    def __init__(self):
        self.got, self.closed = [], 0

    def sites(self, sites, roots):
        self.names = [site["site"] for site in sites]

    def stats(self, step, columns):
        self.got.append((step, [self.names[i] for i in columns["site"]]))

    def event(self, event):
        self.got.append(event)

    def close(self):
        self.closed += 1


def test_a_sink_that_fails_is_reported_once_and_left_out(watch, capsys):
    """The training and the other sinks go on."""
    breaks, keeps = Breaks(), Keeps()
    with watch().send_to(breaks, keeps):
        train(net())

    assert (
        capsys.readouterr().err.count("Breaks failed: ValueError: full (watch/run/sinks.py:") == 1
    )
    assert breaks.asked > 1
    assert breaks.after == 0
    assert [got[0] for got in keeps.got if isinstance(got, tuple) and "0:out" in got[1]] == [
        0,
        1,
        10,
        20,
    ]
    assert keeps.closed == 1


def test_a_finding_reaches_a_sink_as_soon_as_something_is_not_finite(watch):
    """The verdict comes with the step that it is about, and once."""
    keeps = Keeps()
    with watch().send_to(keeps):
        train(net(Log()))
    kinds = [got["kind"] if isinstance(got, dict) else got[0] for got in keeps.got]
    kinds = [
        kind for kind in kinds if kind == "finding" or isinstance(kind, int)
    ]  # notes precede the rows they explain
    findings = [got for got in keeps.got if isinstance(got, dict) and got["kind"] == "finding"]

    assert kinds[:2] == [0, "finding"]
    assert [(finding["code"], finding["site"], finding["step"]) for finding in findings] == [
        ("NAN-BORN", "3:out", 0)
    ]


def test_what_fails_in_kedge_does_not_end_the_training(watch, monkeypatch, capsys):
    """If a watch cannot begin, Kedge says so, and the block runs unwatched."""
    monkeypatch.setattr("kedge.watch.run.block.make_watch", lambda *_: 1 / 0)
    with watch():
        train(net())

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "[kedge] beginning to watch failed: ZeroDivisionError: division by zero (watch/run/block.py:"
    )
    assert line.endswith("); the program goes on unwatched")


def test_an_end_that_fails_does_not_end_the_training(watch, monkeypatch, capsys):
    """It is reported, and the recording is completed all the same."""
    with watch() as run:
        train(net(), 2)
        monkeypatch.setattr(run._watch.record.meter, "finish", lambda: 1 / 0)

    assert "[kedge] ending the watch failed: ZeroDivisionError" in capsys.readouterr().err
    assert Recording.open("run.kedge").end.steps == 2


def test_a_program_may_change_its_folder(watch, tmp_path, monkeypatch):
    """The recording stays where it was begun, and is found there."""
    (tmp_path / "elsewhere").mkdir()
    with watch() as run:
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(net(Log()), 12)

    assert [finding.code for finding in run.findings()] == ["NAN-BORN"]
    assert Recording.open(tmp_path / "run.kedge").end.steps == 12


def test_a_hook_that_fails_does_not_end_the_training(watch, monkeypatch, capsys):
    """It is said once, with what is not watched."""
    with watch() as run:
        monkeypatch.setattr(run._watch.models, "_hook", lambda *_: 1 / 0)
        train(net())

    assert (
        capsys.readouterr().err.count(
            "the model Sequential cannot be watched: ZeroDivisionError: division by zero (watch/models/models.py:"
        )
        == 1
    )


def test_strict_raises_what_failed(watch, monkeypatch):
    """With strict, a failure of Kedge is an error at the end; the block's own error goes first."""
    with pytest.raises(WatchingFailed, match=r"watching into run.kedge failed: .*Breaks failed"):
        with watch(strict=True).send_to(Breaks()):
            train(net())
    with pytest.raises(ZeroDivisionError):
        with watch("other.kedge", strict=True).send_to(Breaks()):
            train(net())
            _ = 1 / 0
    monkeypatch.setattr("kedge.watch.run.block.make_watch", lambda *_: {}["it"])
    with pytest.raises(KeyError):
        watch("third.kedge", strict=True).begin()


def test_a_strict_healthy_run_raises_nothing(watch):
    """Strict is about Kedge's own failures, not about findings."""
    with watch(strict=True) as run:
        train(net(Log()))

    assert [finding.severity for finding in run.findings()] == ["error"]


def test_modules_called_one_by_one_can_have_the_names_of_their_model(watch):
    """A model that is never called itself lends its names to its parts."""
    model = nn.ModuleDict({"encoder": net(), "decoder": net()})
    with watch().naming(model) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model["decoder"](model["encoder"](torch.randn(2, 4))).sum().backward()
        optimizer.step()
    sites = {site.site for site in Recording.open(run.recording).sites}

    assert {"encoder:out", "encoder.0:out", "decoder:out", "decoder.2.weight:param.grad"} <= sites
    assert not {site for site in sites if site.startswith(("Sequential", "0", ":"))}


def test_the_compiler_is_not_heard(watch, compiled):
    """No warning of torch.compile's is about a hook that is Kedge's, and afterwards no filter is left."""
    before = list(warnings.filters)
    with watch():
        train(compiled(net(), backend="eager"), 3)

    assert warnings.filters == before


def test_code_compiled_before_compiles_again(watch, compiled):
    """What torch.compile has made without the hooks is made anew, and that is said."""
    model = net()
    fast = compiled(model, backend="eager")
    train(fast, 1)
    run = watch(every=1)
    with pytest.warns(Recompiled, match="Kedge discarded all compiled code, and it compiles again"):
        run.begin()
        train(fast, 3)
    run.end()

    assert Recording.open("run.kedge").rows("0:out").step.tolist() == [0, 1, 2]
    assert_unhooked(model)


def test_two_watches_do_not_disturb_each_other(watch):
    """Each records all that happens while it lasts."""
    with watch() as outer:
        train(net(), 3)
        with watch("inner.kedge") as inner:
            train(net(), 2)

    assert (outer.summary.steps, inner.summary.steps) == (5, 2)


def test_it_can_be_pickled_before_it_begins():
    """A trainer that starts processes sends its callbacks there."""
    again = pickle.loads(pickle.dumps(kedge.watch("run.kedge", every=3)))

    assert (again.options.every, again.recording) == (3, Path("run.kedge"))
