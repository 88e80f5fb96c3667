"""What a checkpoint holds of its inputs, in containers and by keyword, is moved where nobody else has it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kedge
from kedge.sites import leaves
from tests.offload.engines import Shelf, engaged

ROWS, SIZE = 64, 32
BYTES = ROWS * SIZE * 4
top = torch._C._autograd._top_saved_tensors_default_hooks


@dataclasses.dataclass
class Given:
    """A tensor in a data class."""

    x: Any


Named = namedtuple("Named", ["x", "y"])  # noqa: PYI024 - a plain one, as programs have


class Block(nn.Module):
    """Computes with the largest tensor among what it is given, however it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.down(
            torch.tanh(self.up(max((t for _, t in leaves.find([args, kwargs])), key=Tensor.numel)))
        )
        return y


Giving = Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
WAYS: dict[str, Giving] = {
    "positional": lambda h: ((h,), {}),
    "keyword": lambda h: ((), {"x": h}),
    "dict": lambda h: (({"x": h},), {}),
    "nested lists": lambda h: (([[h], [h[0]]],), {}),
    "tuple": lambda h: (((1, (h,)),), {}),
    "named tuple": lambda h: ((Named(h, None),), {}),
    "data class": lambda h: ((Given(h),), {}),
    "all at once": lambda h: ((h, {"a": [(h, Given({"b": h}))]}), {"x": h, "y": [h]}),
    "two in a dict": lambda h: (({"x": h, "y": h * 2},), {}),
}


class Model(nn.Module):
    """Three blocks in checkpoints, each given what the one before it has made."""

    def __init__(
        self, way: str, *, reentrant: bool = False, keeps: bool = False, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.way, self.reentrant, self.options = WAYS[way], reentrant, options
        self.kept: list[Any] | None = [] if keeps else None
        self.storages: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = h * 1.5
            self.storages.append(weakref.ref(h.untyped_storage()))
            if (
                self.reentrant
            ):  # which needs a tensor with a gradient, and takes no notice of the others
                inside = h.detach() * 1.0
                args, kwargs = self.way(inside)
                h = checkpoint(block, *args, h.mean(), **kwargs, use_reentrant=True) + h
            else:
                args, kwargs = self.way(h)
                h = checkpoint(block, *args, **kwargs, use_reentrant=False, **self.options)
            if self.kept is not None:
                self.kept.append(args)
            del args, kwargs
        return h


KINDS = [(way, False) for way in WAYS] + [
    (way, True) for way in WAYS if way not in ("keyword", "all at once")
]
X = torch.linspace(-1, 1, ROWS * SIZE).view(ROWS, SIZE)


def gradients(model: nn.Module, times: int = 1) -> list[Tensor]:
    """Return the gradients of the input and of the parameters that have one."""
    model.zero_grad()
    x = X.clone().requires_grad_()
    loss = model(x).pow(2).sum()
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    return [p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are the same to the last bit."""
    return len(one) == len(other) > 1 and all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    "to",
    [kedge.Disk(rebuild=False), kedge.Disk(), kedge.Rebuild()],
    ids=["disk", "both", "rebuild"],
)
@pytest.mark.parametrize(("way", "reentrant"), KINDS)
def test_gradients_are_the_same(way: str, reentrant: bool, to: Any) -> None:
    """However a checkpoint is given its inputs, offloading changes no bit, backward once or twice, and leaves nothing."""
    model = Model(way, reentrant=reentrant)
    plain = gradients(model)
    with kedge.offload(model, to=to, min_bytes=0) as account:
        found = [gradients(model) for _ in range(2)]
    gc.collect()

    assert all(equal(plain, each) for each in found)
    total = account.total
    if not isinstance(to, kedge.Rebuild):
        assert total.moved["disk"].number >= 6
    assert top(True) is None
    assert all(storage() is None for storage in model.storages)


@pytest.mark.parametrize("options", [{}, {"early_stop": False}], ids=["plain", "to the end"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_backward_is_the_same(way: str, options: dict[str, Any]) -> None:
    """With the graph retained, what was put back for the first backward is there for the second."""
    model = Model(way, **options)
    plain = gradients(model, times=2)
    with engaged(model, Shelf(), find=None):
        found = gradients(model, times=2)

    assert equal(plain, found)


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_that_logs_its_operations_is_the_same(way: str) -> None:
    """With ``debug=True``, under which a checkpoint's function runs in a mode of its own."""
    model = Model(way, debug=True)
    plain = gradients(model)
    with engaged(model, Shelf(), find=None):
        found = gradients(model)

    assert equal(plain, found)


@pytest.mark.parametrize(("way", "reentrant"), KINDS)
def test_what_is_moved_is_freed(way: str, reentrant: bool) -> None:
    """After the forward no input of a checkpoint is in memory; after the backward nothing is in the store."""
    model, shelf = Model(way, reentrant=reentrant), Shelf()
    with engaged(model, shelf, find=None):
        loss = model(X.clone().requires_grad_()).sum()
        alive = [storage() for storage in model.storages if storage() is not None]
        count = len(shelf.slots)
        loss.backward()
        del loss

    assert alive == []
    assert count >= 3
    assert shelf.freed == len(shelf.slots)


def test_the_inputs_are_moved_while_the_forward_runs() -> None:
    """When a block runs, what the one before it was given has gone."""
    model = Model("dict")
    there: list[int] = []
    model.blocks[2].register_forward_hook(
        lambda *_: there.append(sum(storage() is not None for storage in model.storages[:2]))
    )
    with engaged(model, Shelf(), find=None):
        model(X.clone().requires_grad_())

    assert there == [0]


def test_a_container_that_the_program_has_stays_as_it_is() -> None:
    """What somebody else could look into is not touched; keywords are the checkpoint's own, and what they hold goes."""
    model, shelf = Model("dict", keeps=True), Shelf()
    plain = gradients(model)
    assert model.kept is not None
    model.kept.clear()
    with engaged(model, shelf, find=None):
        loss = model(X).pow(2).sum()
        assert [type(given["x"]) for (given,) in model.kept] == [Tensor] * 3
        assert shelf.slots == [] or max(shelf.sizes) <= BYTES
        model.zero_grad()
        loss.backward()

    assert all(
        map(torch.equal, plain[1:], [p.grad for p in model.parameters() if p.grad is not None])
    )


def test_a_container_that_the_program_fills_is_recomputed_as_without() -> None:
    """One dict that all blocks write into, which then hold what the last has written, gives the same as without."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(3)])
            self.calls: list[list[str]] = []

        def forward(self, x: Tensor) -> Tensor:
            notes: dict[str, Any] = {"bias": x * 0.5}
            for number, layer in enumerate(self.layers):

                def run(
                    x: Tensor, notes: dict[str, Any], layer: Any = layer, number: int = number
                ) -> Tensor:
                    self.calls.append(sorted(notes))
                    notes[str(number)] = number
                    y: Tensor = torch.tanh(layer(x)) + notes["bias"]
                    return y

                x = checkpoint(run, x, notes, use_reentrant=False, early_stop=False)
            return x

    model = Shared()
    plain = gradients(model)
    before, model.calls = model.calls, []
    with engaged(model, Shelf(), find=None):
        found = gradients(model)

    assert equal(plain, found)
    assert model.calls == before


def test_a_tensor_that_is_still_there_is_put_back_itself() -> None:
    """The recompute of a function gets the very tensor if the program still has it."""
    given: list[Tensor] = []

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            self.h = x * 2

            def run(d: dict[str, Tensor]) -> Tensor:
                given.append(d["x"])
                y: Tensor = torch.tanh(self.layer(d["x"]))
                return y

            y: Tensor = checkpoint(run, {"x": self.h}, use_reentrant=False)
            return y

    model, shelf = Kept(), Shelf()
    with engaged(model, shelf, find=None):
        model(X).sum().backward()

    assert len(given) == 2
    assert given[0] is given[1] is model.h
    assert shelf.gets == 0


def test_a_selective_checkpoint_counts_its_own_operations_alone() -> None:
    """What is taken while a selective checkpoint runs is no operation of its function, which it would have to find again."""

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    class Copying(Block):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            y: Tensor = (
                super().forward(*args, **kwargs).clone() * self.up.weight.detach().clone().sum()
            )
            return y

    model = Model("dict", context_fn=lambda: create_selective_checkpoint_contexts(policy))
    model.blocks = nn.ModuleList([Copying() for _ in range(3)])
    plain = gradients(model)
    with engaged(model, Shelf(), find=None):
        found = gradients(model)

    assert equal(plain, found)


def test_nested_checkpoints_with_containers() -> None:
    """A checkpoint in a checkpoint, both given dicts, gives the same bits, and both frames are let go."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            def inner(d: dict[str, Tensor]) -> Tensor:
                y: Tensor = checkpoint(self.second, {"x": self.first(d) * 2}, use_reentrant=False)
                return y

            y: Tensor = checkpoint(inner, {"x": x * 2}, use_reentrant=False)
            other: Tensor = checkpoint(self.first, x=x * 3, use_reentrant=False)
            return y * other

    model, shelf = Nested(), Shelf()
    plain = gradients(model)
    with engaged(model, shelf, find=None):
        found = gradients(model, times=1)
    gc.collect()

    assert equal(plain, found)
    assert shelf.freed == len(shelf.slots) > 0


def test_an_input_that_is_rebuilt_is_no_part_of_the_recompute() -> None:
    """What is computed to give an input back happens outside of the checkpoint's function, which saves as in the forward."""

    class Rebuilt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.block = nn.LayerNorm(SIZE), Block()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(
                self.block, {"x": torch.nn.functional.gelu(self.norm(x))}, use_reentrant=False
            )
            return y

    model = Rebuilt()
    plain = gradients(model)
    with kedge.offload(model, min_bytes=0) as account:
        found = gradients(model)

    assert account.total.rebuilt
    assert equal(plain, found)


def test_a_forward_that_fails_between_checkpoints_leaves_nothing() -> None:
    """What was taken before an exception is let go with the graph, and the next step is as any."""
    model, shelf = Model("dict"), Shelf()
    plain = gradients(model)
    fails = [True]

    def fail(*_: Any) -> None:
        if fails[0]:
            raise ValueError("in the middle")

    handle = model.blocks[2].register_forward_pre_hook(fail)
    with engaged(model, shelf, find=None):
        with pytest.raises(ValueError, match="in the middle"):
            model(X.clone().requires_grad_())
        gc.collect()
        assert shelf.freed == len(shelf.slots)
        fails[0] = False
        found = gradients(model)
    handle.remove()

    assert equal(plain, found)
