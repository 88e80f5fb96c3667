"""What is written for TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from kedge.integrations.tensorboard import TensorBoard, export
from kedge.store.recording import Recording
from tests.integrations.smallnets import net, train

NOTHING = "no findings; `kedge check` lists the rules that could judge"


def read(logdir):
    """Read a folder: the curves as lists of (step, number), and the texts."""
    found = EventAccumulator(str(logdir)).Reload()
    scalars = {
        tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    texts = [e for tag in found.Tags()["tensors"] for e in found.Tensors(tag)]
    return scalars, [(e.step, e.tensor_proto.string_val[0].decode()) for e in texts]


def test_curves_are_written_while_the_run_goes_and_are_those_of_the_recording(watch, tmp_path):
    """The root mean square of every site in every measured step is there under a name that says what it is."""
    with watch(every=5).send_to(TensorBoard(tmp_path / "logs")) as run:
        train(net())
    scalars, _ = read(tmp_path / "logs")
    recording = Recording.open(run.recording)

    assert {0, 1, 5, 10, 15, 20} <= set(
        recording.steps.tolist()
    )  # and where a note is awaited, some between
    for tag, site in (
        ("kedge_rms_out/0", "0:out"),
        ("kedge_rms_out/Sequential", ":out"),
        ("kedge_rms_out.grad/2", "2:out.grad"),
        ("kedge_rms_param.grad/0.weight", "0.weight:param.grad"),
        ("kedge_rms_update/2.bias", "2.bias:update"),
    ):
        steps, numbers = zip(*scalars[tag], strict=True)
        assert list(steps) == recording.steps.tolist()
        assert list(numbers) == pytest.approx(recording.series(site, "rms").tolist())
    losses = dict(scalars["kedge/loss"])
    assert list(losses) == recording.rows("loss").step.tolist()
    assert [losses[step] for step in recording.steps.tolist()] == pytest.approx(
        recording.series("MSELoss:out", "mean").tolist()
    )
    assert sorted({tag.partition("/")[0] for tag in scalars}) == [
        "kedge",
        "kedge_rms_out",
        "kedge_rms_out.grad",
        "kedge_rms_param",
        "kedge_rms_param.grad",
        "kedge_rms_update",
    ]
    assert sorted(tag for tag in scalars if tag.startswith("kedge/")) == [
        "kedge/loss",
        "kedge/norm_of_gradients",
    ]


def test_a_negative_loss_is_negative(watch, tmp_path):
    """The loss is its value and not its size, in every step."""
    model = net()
    with watch(every=5).send_to(TensorBoard(tmp_path / "logs")):
        for _ in range(20):
            (-model(torch.rand(4, 4)).sum() - 1.0).backward()
    losses = [value for _, value in read(tmp_path / "logs")[0]["kedge/loss"]]

    assert len(losses) == 20
    assert all(value < -1.0 for value in losses)


def test_without_a_backward_the_loss_is_what_a_model_returns(watch, tmp_path):
    """A single number that a root returns, under the name of the root."""
    model, loss = net(), nn.MSELoss()
    with torch.no_grad(), watch().send_to(TensorBoard(tmp_path / "logs")):
        for _ in range(3):
            loss(model(torch.rand(4, 4)), torch.zeros(4, 4))

    assert "kedge/loss/MSELoss" in read(tmp_path / "logs")[0]


@pytest.mark.usefixtures("without_copies")  # the end of a run does not wait long for one
def test_a_recording_gives_the_same_afterwards(watch, tmp_path):
    """What is exported from the recording is what was written while the run went, number for number."""
    with watch(every=5).send_to(TensorBoard(tmp_path / "live")) as run:
        train(net(spoils=True))
    export(run.recording, tmp_path / "after")

    live, after = read(tmp_path / "live"), read(tmp_path / "after")
    assert repr(sorted(live[0].items())) == repr(sorted(after[0].items()))
    assert live[1] == after[1]


def test_a_finding_is_written_as_text_and_nan_as_nan(watch, tmp_path):
    """What a rule says is there with the step it is about; what was measured and is NaN is no gap."""
    with watch().send_to(TensorBoard(tmp_path / "logs")):
        train(net(spoils=True))
    scalars, texts = read(tmp_path / "logs")

    [(_, text)] = [(step, text) for step, text in texts if "NAN-BORN" in text]
    head, message, remedy = text.split("\n\n")
    assert head == "**NAN-BORN** (error) at 3:out, step 0"
    assert message.startswith("3:out ")
    assert remedy
    assert math.isnan(scalars["kedge_rms_out/3"][0][1])
    assert math.isfinite(scalars["kedge_rms_out/2"][0][1])


def test_all_findings_are_one_text(tmp_path):
    """Of many texts of one name, TensorBoard shows ten drawn at random, and one a step: all findings are in the last."""
    sink = TensorBoard(tmp_path / "logs")
    for i in range(30):
        finding = {
            "code": f"RULE-{i}",
            "severity": "warning",
            "site": "0:out",
            "step": 3,
            "message": "So.",
            "remedy": "",
        }
        sink.event({"kind": "finding", **finding})
    sink.close()
    [(_, text)] = read(tmp_path / "logs")[1]

    assert text.split("\n\n---\n\n") == [
        f"**RULE-{i}** (warning) at 0:out, step 3\n\nSo." for i in range(30)
    ]


def test_a_healthy_run_is_said_to_be_one(watch, tmp_path):
    """Where nothing was found, that is written."""
    with watch().send_to(TensorBoard(tmp_path / "logs")):
        train(net())

    assert [text for _, text in read(tmp_path / "logs")[1]] == [NOTHING]


def test_other_statistics_can_be_asked_for(watch, tmp_path):
    """The statistics are those named; one that does not exist is an error that names those that do."""
    with watch(sites="1").send_to(TensorBoard(tmp_path / "logs", ("zero", "absmax"))) as run:
        train(net())
    scalars, _ = read(tmp_path / "logs")

    assert [number for _, number in scalars["kedge_zero_out/1"]] == pytest.approx(
        Recording.open(run.recording).series("1:out", "zero").tolist()
    )
    assert {"kedge_zero_out/1", "kedge_absmax_out/1"} <= set(scalars)
    assert not [tag for tag in scalars if tag.startswith("kedge_rms_")]
    with pytest.raises(
        ValueError, match=r"'norm' is not a statistic of a recording; there are mean, rms, "
    ):
        TensorBoard(tmp_path / "logs", ("norm",))


def test_the_programs_own_writer_is_left_open(watch, tmp_path):
    """Given a writer, the curves go where the program's own go, and the program closes it."""
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        with watch().send_to(TensorBoard(writer)):
            train(net())
        writer.add_scalar("accuracy", 0.5, 3)
    scalars, _ = read(tmp_path / "logs")

    assert scalars["accuracy"] == [(3, 0.5)]
    assert "kedge_rms_out/0" in scalars


def test_a_recording_without_a_step_is_exported(watch, tmp_path):
    """A program that called no model leaves an empty folder of events and no error."""
    with watch().send_to(TensorBoard(tmp_path / "logs")):
        pass

    assert read(tmp_path / "logs") == ({}, [(0, NOTHING)])
