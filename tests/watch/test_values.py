"""Values of any kind: numbers of every type, and what cannot be looked through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.registry import check
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import (
    GUARDED,
    MIXED,
    SKIPPED,
    Paced,
    at_levels,
    batch,
    descend,
    net,
    watch,
    watched,
)


class Complex(nn.Module):
    """A model whose weights are complex, as in Fourier layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize(
    "make",
    [Complex, lambda: nn.Linear(3, 2).bfloat16(), lambda: nn.LSTM(3, 2)],
    ids=["complex", "bfloat16", "lstm"],
)
def test_models_of_other_precisions_and_structures_are_watched(make: Any) -> None:
    """Complex, narrow and structured values are measured, and guarded between: the step after an optimizer's first is, too."""
    model = make()
    dtype = torch.bfloat16 if isinstance(model, nn.Linear) else torch.float32

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            out = model(torch.ones(4, 3, dtype=dtype))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            optimizer.step()

    log = watch(program, every=2)
    assert log.steps(level=2) == [0, 1, 2, 4]
    assert log.watch.summary.levels == {"measured": 4, "guarded": 1, "skipped": 0}
    assert {
        f"{n}:{k}" for n, _ in model.named_parameters() for k in ("param", "param.grad", "update")
    } <= set(log.texts())


class Odd(nn.Module):
    """Holds parameters of kinds that have no norm, as quantized models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.whole = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
        self.narrow = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class ComplexOut(nn.Module):
    """Returns complex values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight


@at_levels(GUARDED, SKIPPED, MIXED)
@pytest.mark.parametrize(
    "make",
    [
        lambda: net().double(),
        lambda: net().half(),
        Odd,
        lambda: nn.Sequential(net(), nn.Linear(2, 4), ComplexOut()),
    ],
    ids=["double", "half", "bytes-float8-and-nothing", "complex"],
)
def test_values_of_any_kind_of_number_are_no_failure(
    make: Callable[[], nn.Module],
    levels: tuple[StepKind, ...],
    paced: Paced,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Doubles, whole numbers, bytes, nothing and complex numbers are measured, or passed over."""
    paced(*levels)
    log = watched(lambda watch: descend(make(), 6))
    assert capsys.readouterr().err == ""
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.summary.steps == 6


def test_a_large_double_is_finite(paced: Paced) -> None:
    """A norm that float32 could not hold is not taken for infinite."""
    paced(StepKind.GUARDED)
    model = nn.Linear(4, 2).double()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-60)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(5, 4, dtype=torch.float64)).sum() * 1e50).backward()
            optimizer.step()

    recording = watched(program).recording()
    assert [f for f in check(recording) if f.code == "NAN-BORN"] == []


class Raises(dict[str, Tensor]):
    """Can be read by its maker, and by nobody else."""

    def items(self) -> Any:
        raise OSError("not now")

    def __iter__(self) -> Iterator[str]:
        raise OSError("not now")


class Late(nn.Module):
    """Returns a mapping that raises when it is read for the third time and later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return Raises(y=self.fc(x)) if self.calls > 2 else {"y": self.fc(x)}


def test_what_cannot_be_read_is_not_looked_at_in_guarded_steps(
    paced: Paced, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is returned to the program may be something that cannot be looked at."""
    paced(StepKind.GUARDED)
    model = Late()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(6):
            model(torch.randn(5, 4))["y"].mean().backward()
            optimizer.step()

    log = watched(program)
    assert capsys.readouterr().err == ""
    assert log.recording().rows("loss").step.tolist() == list(range(6))


class Secretive(nn.Module):
    """Takes and returns what cannot be looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return Raises(y=self.inner(x["x"]))


@at_levels()
def test_a_value_that_cannot_be_looked_through_ends_no_program(
    levels: tuple[StepKind, ...], paced: Paced, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported once for each place, and everything else is seen."""
    paced(*levels)
    model = Secretive()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(6):
            optimizer.zero_grad()
            model(Raises(x=batch()))["y"].mean().backward()
            optimizer.step()

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 6
    assert not log.watch.failed
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[kedge] :in is not observed: it cannot be searched: OSError: not now"
    assert len(lines) == len(set(lines)) <= 4
    assert log.recording().rows("inner:out").step.tolist()[0] == 0
