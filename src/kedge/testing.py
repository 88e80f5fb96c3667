"""Helpers for tests of programs that use hooks; Kedge's own tests use them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kedge.sites import leaves
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.hook_tables import after_accumulation, for_modules, on_tensor, tables_of
from kedge.torch_internals.module_tables import modules_in, parameters_in


def hook_tables(model: nn.Module) -> dict[str, Any]:
    """Return every hook on a model, by place: on its modules, on its parameters, and on all modules."""
    tables: dict[str, Any] = {}
    for path, m in modules_in(model).items():
        own = tables_of(m)
        tables |= {f"{path}.{name}": table for name, table in own.items()}
        tables[f"{path}.__dict__"] = sorted(k for k in m.__dict__ if k not in own)
    for path, p in parameters_in(model).items():
        tables[f"{path}._backward_hooks"] = dict(on_tensor(p) or {})
        tables[f"{path}._post_accumulate"] = dict(after_accumulation(p) or {})
    return tables | {name: dict(table) for name, table in for_modules().items()}


def assert_unhooked(model: nn.Module) -> None:
    """Assert that no hook is on a model, its parameters, or on all modules."""
    left = {
        place: hooks
        for place, hooks in hook_tables(model).items()
        if hooks and not place.endswith("__dict__")
    }
    assert not left, f"hooks are left: {left}"
    concealed = [
        f"{path}.{name}"
        for path, m in modules_in(model).items()
        for name, table in vars(m).items()
        if isinstance(table, OrderedDict) and vars(table)
    ]
    assert not concealed, f"these tables are still concealed: {concealed}"


@contextmanager
def assert_hooks_restored(model: nn.Module) -> Iterator[None]:
    """Assert that the block leaves every hook table as it was before."""
    before = hook_tables(model)
    yield
    after = hook_tables(model)
    assert after == before, (
        f"hook tables differ at {[k for k in before | after if before.get(k) != after.get(k)]}"
    )


def assert_same_bits(a: Any, b: Any, where: str = "value") -> None:
    """Assert that two structures hold tensors of equal bits: same names, dtypes, shapes and elements.

    NaN is equal to NaN.
    """
    ours, theirs = dict(leaves.find(a)), dict(leaves.find(b))
    assert list(ours) == list(theirs), (
        f"{where}: one has the tensors {list(ours)}, the other {list(theirs)}"
    )
    for name, x in ours.items():
        y = theirs[name]
        place = f"{where}[{name}]" if name else where
        assert (x.dtype, x.shape) == (y.dtype, y.shape), (
            f"{place}: {leaves.describe(x)} against {leaves.describe(y)}"
        )
        differ = int((_bits(x) != _bits(y)).sum())
        assert not differ, f"{place}: {differ} bytes of {x.nbytes} differ"


def _bits(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)).view(torch.uint8)


def training_step(
    model: nn.Module, loss: Callable[[nn.Module], Any], seed: int = 0
) -> Mapping[str, Any]:
    """Return the results of one seeded forward and backward on a copy of a model.

    Args:
        model: The model, which stays unchanged.
        loss: A function that runs the forward and returns (outputs, scalar loss).
        seed: The seed of the random numbers, such as those of dropout.

    Returns:
        The outputs, the loss, every gradient, the state dict and the states of the random number
        generators.
    """
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    outputs, scalar = loss(twin)
    scalar.backward()
    grads = {n: p.grad for n, p in parameters_in(twin).items() if p.grad is not None}
    state, rng = twin.state_dict(), generator_states()
    return {"outputs": outputs, "loss": scalar, "grads": grads, "state": state, "rng": rng}
