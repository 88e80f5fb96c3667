"""The loss: what each backward pass began at, by the program's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kedge.rules.recorded.losses import maker_at
from kedge.rules.training.double_softmax import DoubleSoftmax
from tests.watch.watched import net, watch


def test_a_loss_is_recorded_with_its_operation_its_line_and_its_value() -> None:
    """In every step, with the chain of operations behind it."""
    values = []

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(7):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long))
            loss.backward()
            values.append(loss.item())
            optimizer.step()

    log = watch(program, every=3)
    (entry,) = [e for e in log.entries if e["kind"] == "loss"]
    assert (entry["site"], entry["operation"], entry["node"]) == (
        "loss",
        "nll_loss",
        "NllLossBackward0",
    )
    assert __file__.endswith(entry["source"]["file"])
    assert entry["root"] == -1
    rows = log.recording().rows("loss")
    assert rows.sum.tolist() == pytest.approx(values)
    assert rows.level.tolist() == [2, 2, 1, 2, 1, 1, 2]
    (graph,) = [event for event in log.events if event["kind"] == "loss-graph"]
    assert graph["nodes"][:3] == ["NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0"]


@pytest.mark.parametrize("every", [1, 50])
def test_a_jump_in_a_smaller_batch_is_noted_with_both_sizes(every: int) -> None:
    """Also in a skipped step, by the graphs of the loss alone; a jump in a batch of the usual size is none."""

    def program() -> None:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(40):
            samples = 2 if step == 30 else 8
            optimizer.zero_grad()
            far = 100.0 if step in (30, 36) else 1.0
            (far * (model(torch.ones(samples, 4)) - 3.0)).square().mean().backward()
            optimizer.step()

    log = watch(program, every=every)
    (event,) = [event for event in log.events if event["kind"] == "small-batch"]
    assert (event["step"], event["samples"], event["usual"]) == (30, 2, 8)


def test_each_line_that_calls_backward_has_a_loss_of_its_own() -> None:
    """Several calls of one line are one loss, which was called several times."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(5, 4)).mean().backward()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()

    log = watch(program, every=1)
    losses = {
        e["site"]: (e["operation"], e["source"]["line"]) for e in log.entries if e["kind"] == "loss"
    }
    assert {site: operation for site, (operation, _) in losses.items()} == {
        "loss": "mean",
        "loss_2": "sum",
    }
    assert losses["loss_2"][1] == losses["loss"][1] + 1
    assert set(log.recording().rows("loss").calls.tolist()) == {3}
    assert set(log.recording().rows("loss_2").calls.tolist()) == {1}


@pytest.mark.filterwarnings("ignore:.*requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_passes_inside_of_a_checkpoint_are_no_losses(reentrant: bool) -> None:
    """A reentrant one runs a backward pass of its own within the program's: that began at the loss."""

    def program() -> None:
        body, head = net(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 4, requires_grad=True)
            head(checkpoint(body, x, use_reentrant=reentrant)).square().mean().backward()
            optimizer.step()

    log = watch(program, every=1)
    assert [(e["site"], e["operation"]) for e in log.entries if e["kind"] == "loss"] == [
        ("loss", "mean")
    ]
    assert log.recording().rows("loss").step.tolist() == [*range(4)]


def test_a_gradient_that_is_asked_for_is_a_loss_too() -> None:
    """What `torch.autograd.backward` begins at several tensors is one loss."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(
                [model(torch.randn(5, 4)).sum(), model(torch.randn(5, 4)).mean()]
            )
            optimizer.step()

    log = watch(program, every=1)
    rows = log.recording().rows("loss")
    assert (rows.step.tolist(), set(rows.calls.tolist())) == ([0, 1, 2], {2})


def test_the_operation_of_a_loss_is_that_of_each_step() -> None:
    """A step whose loss is made by another operation has that one's name, and the next step the usual one again."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).square().mean()
            if step == 3:
                loss = loss.clamp(max=1.0)
            loss.backward()
            optimizer.step()

    recording = watch(program, every=3).recording()
    site = recording.site("loss")
    nodes = [maker_at(recording, site, step)[0] for step in range(6)]
    assert nodes == ["MeanBackward0"] * 3 + ["ClampBackward1"] + ["MeanBackward0"] * 2
    assert maker_at(recording, site, 3)[1].line == site.source.line


def test_a_step_of_several_operations_names_none() -> None:
    """Two backward passes of one line, of losses made in two ways: which of them was bad is not known."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for loss in (model(torch.randn(5, 4)).mean(), model(torch.randn(5, 4)).sum()):
                loss.backward()
            optimizer.step()

    recording = watch(program, every=1).recording()
    assert [maker_at(recording, recording.site("loss"), step)[0] for step in range(3)] == [None] * 3


def test_a_loss_that_is_made_otherwise_in_every_step_takes_no_room() -> None:
    """After some changes its operation is unknown, and that is said once."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(90):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).square()
            (loss.mean() if step % 2 else loss.sum()).backward()
            optimizer.step()

    log = watch(program, every=1)
    recording = log.recording()
    assert [event["step"] for event in log.events if event["kind"] == "loss-operation"] == list(
        range(1, 66)
    )
    assert maker_at(recording, recording.site("loss"), 63)[0] == "MeanBackward0"
    assert maker_at(recording, recording.site("loss"), 80)[0] is None


@pytest.mark.parametrize(("dim", "logs_first"), [(0, False), (1, True)])
def test_the_graph_of_a_loss_tells_what_is_picked_of_a_softmax(dim: int, logs_first: bool) -> None:
    """A policy takes the probabilities of its actions; both dimensions are recorded."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        found = model(torch.randn(6, 4))
        actions = torch.zeros(6, 1, dtype=torch.int64)
        if logs_first:
            chosen = found.softmax(dim).log().gather(1, actions)
        else:
            chosen = found.softmax(dim).gather(1, actions).log()
        chosen.mean().neg().backward()
        optimizer.step()

    (graph,) = [event for event in watch(program).events if event["kind"] == "loss-graph"]
    (read,) = graph["softmaxes"]
    assert (read["by"], read["dim"], read["classes"]) == ("gather", dim, [1])


class Speller(nn.Module):
    """Says one class at each time step, and writes what it says into a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.out = nn.Linear(8, 5)
        self.dim = dim

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Spell sequences of time steps by samples."""
        said = torch.zeros(*sequences.shape[:2], 5)
        state = torch.zeros(sequences.shape[1], 8)
        for time, now in enumerate(sequences):
            state = self.cell(now, state)
            said[time] = F.log_softmax(self.out(state), dim=self.dim)
        return said


@pytest.mark.parametrize(
    ("dim", "through", "number"), [(0, "nll", 1), (1, "nll", 0), (0, "ctc", 1), (1, "ctc", 0)]
)
def test_a_softmax_over_the_samples_is_found_behind_a_buffer(
    dim: int, through: str, number: int
) -> None:
    """As of a decoder, whose time steps stand before its samples."""

    def program() -> None:
        model = Speller(dim)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            said = model(torch.randn(7, 6, 4))
            if through == "nll":
                loss = F.nll_loss(said[1:].view(-1, 5), torch.zeros(36, dtype=torch.long))
            else:
                loss = F.ctc_loss(said, torch.ones(6, 2, dtype=torch.long), (7,) * 6, (2,) * 6)
            loss.backward()
            optimizer.step()

    findings = list(DoubleSoftmax().check(watch(program).recording()))
    assert len(findings) == number
    assert all("log_softmax over dimension 0" in each.message for each in findings)


@pytest.mark.parametrize("every", [1, 50])
def test_a_loss_that_is_made_large_is_known_by_the_number_that_backward_began_with(
    every: int,
) -> None:
    """As of a critic: ``loss.backward(torch.tensor(-1.0))``."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            for sign in (1.0, -1.0):
                number = torch.tensor(sign)
                if sign > 0:
                    model(torch.randn(6, 4)).mean().backward(number)
                else:
                    model(torch.randn(6, 4)).mean().backward(number)
            optimizer.step()

    graphs = [e for e in watch(program, every=every).events if e["kind"] == "loss-graph"]
    assert [graph.get("ascends", False) for graph in graphs] == [False, True]
