"""Operations outside of modules that a watch records: the selector, the numbers, and the steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from kedge.report.module_lines import lines, matching
from tests.watch import watched
from tests.watch.watched import Memory, batch, net, silent, watch


def train(
    model: nn.Module,
    steps: int,
    between: Callable[[], object] = lambda: None,
    evaluations: int = 3,
) -> list[Tensor]:
    """Train with two operations of one name around the model, and evaluate after each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    target = torch.tensor([0, 1, 0, 1, 1])
    losses = []
    for step in range(steps):
        x = batch().mul(step + 1)
        loss = F.cross_entropy(model(x), target).mul(0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        between()
        with torch.no_grad():
            for _ in range(evaluations):
                F.cross_entropy(model(batch()), target)
    return losses


def means(log: Memory, site: str) -> list[float]:
    """Return the mean of a site in each step."""
    return [float(value) for value in log.recording().series(site, "mean")]


def test_the_loss_of_a_loop_is_recorded_without_being_a_step() -> None:
    """The steps are the optimizer's, the numbers those of the training in each, and nothing else is recorded."""
    torch.manual_seed(0)
    torch.randn(3).mul(7)  # before the program's training
    model = net()
    found: list[Tensor] = []

    def program() -> None:
        torch.ones(2).mul(100)
        found.extend(train(model, 4))

    log = watch(program, sites="/cross_entropy, /mul, /cross_entropy:in.grad", every=1)
    halves = [float(loss) for loss in found]
    assert means(log, "/mul#0") == pytest.approx(halves)
    assert means(log, "/cross_entropy#0") == pytest.approx([2 * loss for loss in halves])
    assert "/cross_entropy#0:in.grad" in log.texts()
    assert not log.texts("out")
    assert log.watch.summary.steps == 4
    assert log.watch.models.outside.passed > 4 * 2
    assert silent(log) == {}


def test_a_program_of_functions_counts_in_each_step() -> None:
    """Without a model each backward pass, once it is alike to one before, ends a step and the numbers."""
    w = torch.ones(3, requires_grad=True)

    def program() -> None:
        for _ in range(6):
            loss = (w.mul(2).mul(3)).sum()
            (grad,) = torch.autograd.grad(loss, w)
            with torch.no_grad():
                w.sub_(grad)

    log = watch(program, sites="/mul")
    assert set(log.texts()) >= {"/mul#0:out", "/mul#1:out"}
    assert "/mul#12:out" not in log.texts()


@pytest.mark.parametrize("ends", ["optimizer", "backward"])
def test_other_steps_cost_nothing(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """In a skipped step neither the mode nor a hook of module calls is there."""
    watched.fix_kinds(monkeypatch, *watched.SKIPPED, *watched.MEASURED)
    modes = []
    model = net()

    def note() -> None:
        modes.append(len(_get_current_function_mode_stack()))

    def program() -> None:
        for _ in range(6):
            if ends == "optimizer":
                train(model, 1, note)
                continue
            loss = F.cross_entropy(model(batch()), torch.tensor([0, 1, 0, 1, 1]))
            note()
            loss.backward()

    watch(program, sites="/cross_entropy")
    assert modes[-4:] == [0, 1, 0, 1] or modes[-4:] == [1, 0, 1, 0]
    assert not _get_current_function_mode_stack()


def test_what_never_fires_has_a_cause() -> None:
    """A name that is mistyped, and one that only a forward calls."""
    log = watch(lambda: train(net(), 2), sites="**, /cross_entrop, /relu")
    causes = silent(log)
    assert "called no cross_entrop: it called" in causes["/cross_entrop:out"]
    assert "in measured steps the code outside of modules" in causes["/relu:out"]


def test_a_collective_is_recorded_and_one_that_runs_on_says_why_not() -> None:
    """What `async_op=True` returns is a handle: nothing tells of the wait for it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def program() -> None:
            def share() -> None:
                dist.all_reduce(torch.full((3,), 2.0))
                dist.broadcast(torch.ones(3), 0, async_op=True).wait()

            train(net(), 2, share)

        log = watch(program, sites="/all_reduce:in, /all_reduce, /broadcast, /broadcast:in")
    finally:
        dist.destroy_process_group()
    assert means(log, "/all_reduce#0")[-1] == 2
    assert "/broadcast#0:in" in log.texts()
    assert "returned before it had a result" in silent(log)["/broadcast:out"]


def test_the_report_has_a_line_for_each() -> None:
    """Beside those of modules, and its filter selects them by name, kind and number."""
    sites = "**, /cross_entropy, /cross_entropy:in, /mul"
    log = watch(lambda: train(net(), 3, evaluations=0), sites=sites, every=1)
    made = lines(log.recording())
    labels = [line.label for line in made]
    assert {"(Sequential)", "/cross_entropy#0", "/cross_entropy#0:in", "/mul#1"} <= {*labels}
    chosen = [line.label for line in matching(made, "/cross*:out, /mul#1")]
    assert chosen == ["/cross_entropy#0", "/mul#1"]
