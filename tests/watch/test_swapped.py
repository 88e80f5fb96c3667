"""A watched program may swap its parameters and gradients for others (`torch.utils.swap_tensors`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.torch_internals.hook_tables import after_accumulation
from tests.watch.watched import LEVELS, Paced, names, watch


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    """Let conversions of modules swap."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def program(said: list[Any]) -> None:
    """Train, convert, train on with hooks of its own, convert there and back, load, and train on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    arrived: list[Tensor] = []

    def train(dtype: torch.dtype) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4, dtype=dtype)).square().mean().backward()
            optimizer.step()
            said.append([p.detach().sum().item() for p in model.parameters()])
            said.append(len(arrived))

    train(torch.float32)
    model.double()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(arrived.append)
    train(torch.float64)
    arrived.clear()
    model.float().double()
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    train(torch.float64)
    tensors = (*model.parameters(), *model.buffers())
    said += [(weakref.getweakrefcount(each), each._use_count()) for each in tensors]
    torch.utils.swap_tensors(model[1].running_mean, torch.ones(6, dtype=torch.float64))
    train(torch.float64)


@pytest.mark.parametrize("kinds", LEVELS, ids=names)
def test_swaps_change_nothing_and_are_recorded(kinds: tuple[object, ...], paced: Paced) -> None:
    """Numbers, references and calls of the program's hooks are those of a run without Kedge."""
    paced(*kinds)
    plain: list[Any] = []
    program(plain)
    watched: list[Any] = []
    log = watch(lambda: program(watched), every=100)
    assert watched == plain
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.step() == 12


def test_gradients_parameters_and_updates_after_a_swap_are_recorded() -> None:
    """With the numbers that they have in the new type."""
    sums: dict[tuple[str, int], float] = {}

    def training() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            if step == 2:
                model.double()
            dtype = torch.float64 if step >= 2 else torch.float32
            optimizer.zero_grad()
            model(torch.randn(5, 4, dtype=dtype)).square().mean().backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                sums[f"{name}:param", step] = param.sum().item()
                sums[f"{name}:param.grad", step] = param.grad.sum().item()
            optimizer.step()

    log = watch(training, every=1)
    sites = {entry["id"]: entry["site"] for entry in log.entries}
    found = {(sites[row["site"]], row["step"]): row for row in log.rows}
    for (site, step), value in sums.items():
        assert found[site, step]["sum"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert {step for site, step in found if site == "0.weight:update"} == {0, 1, 2, 3}


def test_a_parameter_looks_as_without_a_watch() -> None:
    """For the program it has no table of hooks, so that PyTorch gives it one that autograd calls."""
    tables: list[Any] = []

    def training() -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            tables.extend(map(after_accumulation, model.parameters()))

    watch(training)
    assert set(tables) == {None}


def test_a_swapped_model_is_examined_at_the_end() -> None:
    """A NaN that is written after the last step is an error, in a parameter and in a buffer that the swap replaced."""

    def training() -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        model.double()
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
            model[1].running_var[0] = torch.nan

    (note,) = [e for e in watch(training).events if e["kind"] == "nonfinite-at-end"]
    assert {entry["path"] for entry in note["tensors"]} == {"0.weight", "1.running_var"}
