"""The metrics of ``kedge serve``, read by the parser of the Prometheus client."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.serve import _write_secret
from kedge.errors import CannotServe
from kedge.report.page.document import condense
from kedge.report.page.live import News, PageServer, running
from kedge.report.page.metrics import CONTENT_TYPE, metrics_of
from kedge.report.shown_run import ShownRun
from kedge.rules.registry import check
from kedge.store.events import EndEvent
from kedge.store.follow import Follower, Pace
from kedge.store.recording import Recording
from tests.report.page.runs import Run
from tests.report.page.test_serve import get

parser = pytest.importorskip(
    "prometheus_client.parser", reason="prometheus-client is not installed"
)

NAN = float("nan")


def parsed(text: str) -> dict[str, Any]:
    """Read metrics as Prometheus does: the families by name."""
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def numbers(families: dict[str, Any], name: str, *labels: str) -> dict[Any, float]:
    """Return the numbers of a metric by their labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in families[name].samples
    }


def of(recording: Recording, **known: Any) -> dict[str, Any]:
    """Give the metrics of a recording."""
    return parsed(metrics_of(condense(ShownRun(recording, check(recording), (), **known))))


def test_a_running_run_has_its_newest_figures(run: Callable[..., Run], tmp_path: Path) -> None:
    """Each has a type, a help, and the name of its run; what is not known yet is not there."""
    made = run()
    for step in range(3):
        made.step(step)
    recording = Recording.open(tmp_path / "net.kedge")
    families = of(recording, written=True, pace=4.0)

    assert numbers(families, "kedge_run_state", "state") == {
        ("running",): 1,
        ("ended",): 0,
        ("failed",): 0,
        ("killed",): 0,
        ("unknown",): 0,
    }
    assert numbers(families, "kedge_steps", "run") == {("net.kedge",): 3}
    assert numbers(families, "kedge_measured_steps") == {(): 3}
    assert numbers(families, "kedge_step_seconds") == {(): 0.25}
    assert numbers(families, "kedge_start_time_seconds") == {(): 1795244400}
    assert numbers(families, "kedge_loss", "site", "program") == {
        ("loss:out", "/home/ada/secret/train.py --lr 1"): pytest.approx(
            recording.series("loss:out", "mean")[-1]
        )
    }
    [norm] = numbers(families, "kedge_gradient_norm", "site").values()
    assert norm == pytest.approx(math.sqrt(recording.rows(":grad.norm").sumsq[-1]))
    assert {
        sample: value
        for (sample,), value in numbers(families, "kedge_findings", "severity").items()
    } == {
        severity: sum(finding.severity == severity for finding in check(recording))
        for severity in ("error", "warning", "info")
    }
    assert "kedge_overhead_ratio" not in families
    assert {family.type for family in families.values()} == {"counter", "gauge"}
    assert families["kedge_steps"].type == "counter"
    assert all(family.documentation for family in families.values())
    made.writer.close()


def test_a_number_that_is_not_finite_is_one(run: Callable[..., Run], tmp_path: Path) -> None:
    """The newest loss is NaN, and so is its metric; the finding is counted by its rule."""
    made = run()
    made.step(0)
    made.step(1, {"relu1:out": NAN, "loss:out": NAN, ":grad.norm": NAN})
    families = of(Recording.open(tmp_path / "net.kedge"), written=False)

    assert math.isnan(*numbers(families, "kedge_loss").values())
    assert numbers(families, "kedge_rule_findings", "code", "severity")["NAN-BORN", "error"] >= 1
    assert numbers(families, "kedge_run_state", "state")["killed",] == 1
    made.writer.close()


def test_an_ended_run_has_its_sums(run: Callable[..., Run], tmp_path: Path) -> None:
    """The seconds per step and the overhead are those of the whole run."""
    made = run()
    made.step(0)
    made.writer.event(EndEvent(exit=1, steps=40, seconds=20.0, watching=1.0, slowdown=0.05))
    made.writer.close()
    families = of(Recording.open(tmp_path / "net.kedge"))

    assert numbers(families, "kedge_run_state", "state")["failed",] == 1
    assert numbers(families, "kedge_steps") == {(): 40}
    assert numbers(families, "kedge_step_seconds") == {(): 0.5}
    assert numbers(families, "kedge_overhead_ratio") == {(): 0.05}


def test_names_are_escaped_and_infinities_written_as_the_format_has_them() -> None:
    """A quote, a backslash and a line's end in the command; infinite losses of either sign."""
    sites = [{"site": f"{name}:out", "shape": [], "type": "Loss"} for name in ("up", "down")]
    rows = [
        {
            "site": f"{name}:out",
            "step": 0,
            "count": 1,
            "sum": value,
            "sumsq": math.inf,
            "min": value,
            "max": value,
        }
        for name, value in (("up", math.inf), ("down", -math.inf))
    ]
    program = 'a "b"\\\n.py'
    roots = [{"name": name, "prefix": name, "parameters": 0} for name in ("up", "down")]
    recording = Recording.build(sites, rows, {"script": program}, roots=roots)
    document = condense(ShownRun(recording, (), ()))
    document.described["run"]["command"] = program
    families = parsed(metrics_of(document))

    assert numbers(families, "kedge_loss", "site", "program") == {
        ("up:out", program): math.inf,
        ("down:out", program): -math.inf,
    }


def test_the_newest_logged_value_is_a_metric() -> None:
    """Its label is the name under which the program logged it."""
    events = [{"kind": "logged", "name": "val/accuracy", "steps": [0, 4], "values": [0.5, 0.75]}]
    families = of(Recording.build(events=events))

    assert numbers(families, "kedge_logged", "name") == {("val/accuracy",): 0.75}


def test_nothing_measured_yet(tmp_path: Path) -> None:
    """A run without a step has a state and counts of zero."""
    families = of(Recording.build())

    assert numbers(families, "kedge_run_state", "state")["unknown",] == 1
    assert numbers(families, "kedge_steps") == {(): 0}
    assert "kedge_loss" not in families


def test_metrics_are_served_to_who_has_the_token(run: Callable[..., Run], tmp_path: Path) -> None:
    """In the address or in the header of the request; nobody else gets them, nor anybody under a foreign name."""
    made = run()
    made.step(0)
    follower = Follower(tmp_path / "net.kedge")
    first = follower.poll()
    assert first is not None
    server = PageServer(
        News(follower, lambda recording: condense(ShownRun(recording, check(recording), ())), first)
    )
    bearer = {"Authorization": f"Bearer {server.token}"}
    with running(server):
        for path, headers in ((f"/{server.token}/metrics", {}), ("/metrics", bearer)):
            answer = get(server, path, **headers)
            assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
            assert numbers(parsed(answer.text), "kedge_steps") == {(): 1}
            assert get(server, path, Host="evil.example", **headers).status == 403
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": ""}):
            assert get(server, "/metrics", **headers).status == 403
        assert get(server, "/", **bearer).status == 403
        made.step(1)
        server.news.refresh()
        assert numbers(parsed(get(server, "/metrics", **bearer).text), "kedge_steps") == {(): 2}
    made.writer.close()


def test_the_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    """The file is replaced, and readable to nobody else, whatever it was before."""
    file = tmp_path / "token"
    file.write_text("old")
    file.chmod(0o644)
    _write_secret(str(file), "new")

    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(CannotServe, match="name another file with --token-file"):
        _write_secret(str(tmp_path / "no" / "token"), "new")


def test_the_pace_is_that_of_the_last_seconds_of_one_run() -> None:
    """It is not known before two readings, and begins anew when another run replaces the recording."""
    pace = Pace()

    def at(step: int, now: float) -> float | None:
        rows = [{"site": "a:out", "step": step, "count": 1, "sum": 1.0, "sumsq": 1.0, "level": 2}]
        return pace.at(Recording.build(["a:out"], rows), now)

    assert [at(0, 0.0), at(10, 1.0), at(30, 2.0)] == [None, 10.0, 15.0]
    assert [at(5, 3.0), at(7, 4.0)] == [None, 2.0]
