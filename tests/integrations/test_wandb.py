"""What is logged to Weights & Biases, read back from the file of an offline run."""

from __future__ import annotations

import functools
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kedge.store.recording import Recording
from tests import forked

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(
        find_spec("wandb") is None, reason="wandb is not installed"
    ),  # to import it takes seconds
]

PROGRAM = """
import sys

sys.path.insert(0, sys.argv[1])
import wandb
from tests.integrations.smallnets import net, train

import kedge
from kedge.integrations.wandb import Wandb, export

how, spoils = sys.argv[2], sys.argv[3] == "True"
run = wandb.init(project="kedge", dir=".")
if how == "after":
    with kedge.watch("run.kedge", budget=None):
        train(net(spoils=spoils))
    export("run.kedge", run)
else:
    with kedge.watch("run.kedge", budget=None).send_to(Wandb(run, commit=how == "live")):
        train(net(spoils=spoils))
    run.log({"loss": 1.0}, step=1)
run.finish()
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return what a program logs to an offline run; each program is run once."""
    return functools.cache(lambda how, spoils: run(tmp_path_factory.mktemp("run"), how, spoils))


def run(folder, how, spoils):
    """Run a program that logs to an offline run; return its file's records and its recording."""
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        PROGRAM,
        str(Path(__file__).parents[2]),
        how,
        str(spoils),
    ]
    done = forked.run(command, cwd=folder, env=os.environ | quiet, timeout=120)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    return list(records(file.read_bytes())), Recording.open(folder / "run.kedge")


def records(content):
    """Read the records of an offline run: LevelDB's log, with seven bytes before it."""
    from wandb.proto import wandb_internal_pb2

    at, record = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def named(items):
    """Return what is in a row or in the summary by name."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def rows(found):
    """Return the logged rows, each with wandb's own step."""
    return [
        (record.history.step.num, named(record.history.item))
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


def summary(found):
    """Return the summary as it is in the end."""
    merged = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            merged |= named(record.summary.update)
    return merged


@pytest.mark.parametrize(("how", "spoils"), [("live", False), ("after", True)])
def test_curves_are_logged_on_an_axis_of_their_own(log, how, spoils):
    """Each measured step is a row with the step it belongs to, and the numbers are those of the recording."""
    found, recording = log(how, spoils)
    logged = {row["kedge/step"]: row for _, row in rows(found) if "kedge_rms_out/0" in row}

    assert list(logged) == recording.steps.tolist()
    assert {0, 1, 10, 20} <= set(logged)
    for name, site in (
        ("out/0", "0:out"),
        ("out/Sequential", ":out"),
        ("param.grad/0.weight", "0.weight:param.grad"),
    ):
        series = recording.series(site, "rms").tolist()
        assert [row[f"kedge_rms_{name}"] for row in logged.values()] == pytest.approx(
            series, nan_ok=True
        )
    axes = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
    patterns = {axis.glob_name for axis in axes if axis.step_metric == "kedge/step"}
    assert {"kedge/*", "kedge_*"} <= patterns


def test_the_summary_has_the_run_and_not_its_sites(log):
    """Each row of the summary is a column of the table of runs: a model's thousands of sites would drown the loss."""
    found, _ = log("live", False)
    ours = {name for name in summary(found) if name.startswith("kedge")}

    counts = {"kedge/errors", "kedge/warnings", "kedge/info"}
    assert ours == counts | {"kedge/step", "kedge/loss", "kedge/norm_of_gradients"}


@pytest.mark.parametrize("how", ["live", "after"])
def test_findings_are_in_the_summary_and_errors_are_alerts(log, how):
    """Runs can be sorted by what was found in them, and an error reaches the user at once."""
    found, _ = log(how, True)
    alerts = [record.alert for record in found if record.WhichOneof("record_type") == "alert"]
    left = summary(found)

    assert [(alert.title, alert.level) for alert in alerts] == [("NAN-BORN at 3:out", "ERROR")]
    assert left["kedge/errors"] == 1
    assert left["kedge/NAN-BORN"].startswith("3:out ")


def test_a_healthy_run_has_no_errors_in_its_summary(log):
    """Where nothing was found, the summary says zero, and nobody is alerted."""
    found, _ = log("live", False)

    assert summary(found)["kedge/errors"] == 0
    assert [record for record in found if record.WhichOneof("record_type") == "alert"] == []


def test_a_program_that_gives_its_own_steps_keeps_them(log):
    """Without commit the numbers join the program's next row, so that no row of its own is behind and dropped."""
    found, _ = log("joined", False)
    logged = [(step, row) for step, row in rows(found) if "loss" in row]

    assert [step for step, _ in logged] == [1]
    assert logged[0][1]["loss"] == 1.0


def test_the_title_of_an_alert_fits():
    """The server takes less than 64 characters: a long path is cut in its middle, and the rule and the last name stay."""
    from types import SimpleNamespace

    from kedge.integrations.wandb import Wandb

    titles = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        summary={},
        alert=lambda title, **_: titles.append(title),
    )
    site = "model.vision_tower.encoder.layers.17.self_attn.out_proj.weight:param.grad"
    finding = {"code": "NAN-BORN", "severity": "error", "site": site, "message": "m", "remedy": ""}
    Wandb(run).send_finding(finding)

    assert len(titles[0]) < 64
    assert titles[0].startswith("NAN-BORN at ")
    assert "17" in titles[0]
    assert titles[0].endswith("weight:param.grad")
