"""A loss, a parameter or a buffer that is not finite is a finding, whatever the budget and the gradients say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.watch.records import closing_exam
from tests.watch.watched import GUARDED, MEASURED, MIXED, SKIPPED, Memory, Paced, at_levels, watch

BAD = 6


def trained(
    loss_of: Callable[[Tensor, bool], Tensor],
    *,
    after: Callable[[int, nn.Module], None] | None = None,
    steps: int = 9,
) -> Memory:
    """Train a layer with a loss that becomes non-finite at the given steps."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model(torch.randn(6, 4)), step == BAD).backward()
            optimizer.step()
            if after is not None:
                after(step, model)

    return watch(program, every=100)


def findings(log: Memory) -> list[Finding]:
    """Run the rule on what was written."""
    return list(NanBorn().check(log.recording()))


def mean_of_nothing(y: Tensor, bad: bool) -> Tensor:
    """Take the mean over an empty mask, whose gradients are all zero."""
    return y[torch.full((6,), not bad)].square().mean()


def all_ignored(y: Tensor, bad: bool) -> Tensor:
    """Ignore every target."""
    return F.cross_entropy(y, torch.full((6,), -100 if bad else 1))


def cut_product(y: Tensor, bad: bool) -> Tensor:
    """Add a NaN that no gradient comes from."""
    loss = y.square().mean()
    return loss + loss.detach() * (float("nan") if bad else 0.0)


@pytest.mark.parametrize("kinds", [MEASURED, GUARDED, SKIPPED, MIXED])
@pytest.mark.parametrize("loss_of", [mean_of_nothing, all_ignored, cut_product])
def test_a_loss_that_is_nan_in_one_step_is_an_error(
    loss_of: Callable[[Tensor, bool], Tensor], kinds: tuple[object, ...], paced: Paced
) -> None:
    """Although all gradients are finite, and the run goes on as if nothing had happened."""
    paced(*kinds)
    (finding,) = findings(trained(loss_of))
    assert (finding.severity, finding.site, finding.step) == ("error", "loss", BAD)
    assert finding.evidence.recovered is (kinds != SKIPPED)  # then no later loss was recorded


def test_a_loss_that_stays_nan_has_not_recovered() -> None:
    """Finite gradients do not make a step sound whose loss is not finite."""
    (finding,) = findings(trained(lambda y, bad: cut_product(y, bad=True)))
    assert (finding.severity, finding.step, finding.evidence.recovered) == ("error", 0, False)
    assert "went on" not in finding.message


def test_the_mean_of_no_elements_is_named() -> None:
    """The sizes that a node keeps show it for certain."""
    (finding,) = findings(trained(mean_of_nothing))
    assert "mean made it" in finding.message
    assert "it took the mean of no elements" in finding.message


def test_no_operation_is_accused_where_several_may_have_made_it() -> None:
    """They are listed, in the order of the forward."""
    (event,) = [
        e for e in trained(all_ignored).events if e["kind"] == "producer" and not e.get("again")
    ]
    assert [entry["operation"] for entry in event["among"]][-2:] == ["log_softmax", "nll_loss"]
    assert not event["certain"]


def spoil(name: str, value: float) -> Callable[[int, nn.Module], None]:
    """Return what spoils one element of a tensor after the last step."""

    def after(step: int, model: nn.Module) -> None:
        if step == 8:
            with torch.no_grad():
                tensors = dict(model.named_parameters()) | dict(model.named_buffers())
                tensors[name].view(-1)[0] = value

    return after


@pytest.mark.parametrize(
    ("name", "value", "severity", "site"),
    [
        ("0.weight", float("nan"), "error", "0.weight:param"),
        ("1.bias", float("inf"), "error", "1.bias:param"),
        ("1.running_var", float("nan"), "error", "1.running_var"),
        ("1.running_mean", float("inf"), "warning", "1.running_mean"),
    ],
)
def test_what_is_not_finite_at_the_end_is_a_finding(
    name: str, value: float, severity: str, site: str, paced: Paced
) -> None:
    """Even if it became so after the last step that was measured; a mask of infinities was so from the start."""
    paced(*SKIPPED)
    (finding,) = findings(trained(lambda y, bad: y.square().mean(), after=spoil(name, value)))
    assert (finding.severity, finding.site) == (severity, site)
    assert finding.message.startswith(
        f"The {'parameter' if site.endswith('param') else 'buffer'} {name} was not finite"
    )


def test_a_healthy_run_passes_the_exam() -> None:
    """Its mask holds an infinity by design."""
    log = trained(lambda y, bad: y.square().mean())
    assert findings(log) == []
    assert [event for event in log.events if event["kind"] == "nonfinite-at-end"] == []


def test_nan_behind_a_mask_is_found_where_it_was_made() -> None:
    """A row whose keys are all masked: the output of attention holds NaN, the loss does not, and backward spreads it."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm, self.out = (
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.LayerNorm(8),
                nn.Linear(8, 2),
            )

        def forward(self, h: Tensor, pad: Tensor) -> Tensor:
            h = self.norm(h + self.attn(h, h, h, key_padding_mask=pad)[0])
            return self.out(h.masked_fill(pad.unsqueeze(-1), 0.0).sum(1))

    def program() -> None:
        model = Reader()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            pad = torch.zeros(3, 5, dtype=torch.bool)
            pad[0] = step == 3
            optimizer.zero_grad()
            model(torch.randn(3, 5, 8), pad).square().mean().backward()
            optimizer.step()

    first = findings(watch(program, every=1))[0]
    assert (first.site, first.step) == ("attn:out", 3)
    assert "clipping" not in first.message
    assert "overflowed float32" not in first.remedy
    assert "-inf everywhere is NaN" in first.remedy


def test_a_scaled_loss_is_recorded_as_the_program_means_it() -> None:
    """A GradScaler multiplies it by a power of two before backward; the curve says so."""
    values = []

    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            values.append(loss.item())
            scaler.scale(loss / 2).backward()
            scaler.step(optimizer)
            scaler.update()

    log = watch(program, every=3)
    assert log.recording().rows("loss").sum.tolist() == [value / 2 for value in values]
    (graph,) = [event for event in log.events if event["kind"] == "loss-graph"]
    assert graph["unscaled"]


def test_a_loss_times_a_constant_is_left_as_it_is() -> None:
    """Without a scaler a factor belongs to the loss."""
    values = []

    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean() * torch.tensor(8.0)
            values.append(loss.item())
            loss.backward()
            optimizer.step()

    assert watch(program, every=3).recording().rows("loss").sum.tolist() == values


ENDS = [KeyboardInterrupt, SystemExit, ValueError]


def ends_badly(device: str, end: type[BaseException], name: str) -> Memory:
    """Train, spoil one number of a parameter or a buffer, and end the program so."""
    log = Memory()

    def program() -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(9):
            optimizer.zero_grad()
            model(torch.randn(6, 4).to(device)).square().mean().backward()
            optimizer.step()
            spoil(name, float("nan"))(step, model)
        model(torch.randn(6, 4).to(device))  # as of half a step
        raise end

    with pytest.raises(end):
        watch(program, log=log)
    return log


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_the_end_is_examined_however_it_comes(
    end: type[BaseException], name: str, paced: Paced
) -> None:
    """Although no step was measured since, and the program did not come to its last line."""
    paced(*SKIPPED)
    (finding,) = findings(ends_badly("cpu", end, name))
    assert finding.severity == "error"
    assert f"{name} was not finite at the end" in finding.message


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_the_end_is_examined_on_a_device(
    sim: Any, end: type[BaseException], name: str, paced: Paced
) -> None:
    """With one wait, and without memory for a copy of the tensors."""
    paced(*SKIPPED)
    (finding,) = findings(ends_badly("sim", end, name))
    assert finding.severity == "error"
    assert f"{name} was not finite at the end" in finding.message


def test_the_exam_takes_no_memory_of_the_device(sim: Any) -> None:
    """Where the program has left none: a copy of a large tensor would fail, and so would its exam."""
    wide = nn.Linear(1 << 20, 1, bias=False).to("sim")
    with torch.no_grad():
        wide.weight[0, 5] = float("inf")
    before = sim.memory_allocated()
    sim.set_limit(before + (1 << 16), "sim")
    assert closing_exam._norms([wide.weight.detach()]) == [float("inf")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_largest_numbers_of_a_device_are_finite(sim: Any, dtype: torch.dtype) -> None:
    """Also where their squares are not, in any dtype; infinities are counted as such."""
    real = dtype.to_real() if dtype.is_complex else dtype
    values = torch.full((8,), torch.finfo(real).max, dtype=dtype)
    bad = values.clone()
    bad[3] = float("inf")
    named = [("large", values.to("sim")), ("bad", bad.to("sim"))]
    assert [name for name, _, _ in closing_exam._not_finite(named)] == ["bad"]


def ends_in_half_a_step(device: str) -> Memory:
    """Train until the loss is NaN; the program sees that after backward, and ends before its optimizer takes it."""
    log = Memory()

    def program() -> None:
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(9):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4).to(device)).square().mean()
            loss = loss * (float("nan") if step == BAD else 1.0)
            loss.backward()
            if not loss.isfinite():
                sys.exit("the loss is not finite")
            optimizer.step()

    with pytest.raises(SystemExit):
        watch(program, log=log)
    return log


@at_levels(MEASURED, GUARDED, SKIPPED)
def test_a_loss_of_half_a_step_is_a_finding(levels: tuple[object, ...], paced: Paced) -> None:
    """Values after the last step belong to none, but for one that is not finite."""
    paced(*levels)
    finding = findings(ends_in_half_a_step("cpu"))[0]
    assert (finding.step, finding.severity) == (BAD, "error")
    assert "loss" in finding.message


@at_levels(MEASURED, GUARDED, SKIPPED)
def test_a_loss_of_half_a_step_on_a_device_is_a_finding(
    sim: Any, levels: tuple[object, ...], paced: Paced
) -> None:
    """It is waited for at the end."""
    paced(*levels)
    finding = findings(ends_in_half_a_step("sim"))[0]
    assert (finding.step, finding.severity) == (BAD, "error")
    assert "loss" in finding.message
