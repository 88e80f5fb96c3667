"""Keepers of saved tensors among other pairs: the program's own, a checkpoint's, and each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kedge.hooks.saved.keeper import SavingPlace, keep
from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference

top = torch._C._autograd._top_saved_tensors_default_hooks
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Named:
    """A keeper that takes what it is told to take, and notes what it is given."""

    def __init__(
        self, name: str, log: list[str], takes: Callable[[Tensor], bool] = lambda value: True
    ) -> None:
        self.name, self.log, self.takes = name, log, takes

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        if not self.takes(value):
            self.log.append(f"{self.name} leaves {place.path}")
            return None
        self.log.append(f"{self.name} packs {place.path}")
        return self, value.detach().clone()

    def unpack(self, packed: Any) -> Tensor:
        assert packed[0] is self
        self.log.append(f"{self.name} unpacks")
        found: Tensor = packed[1]
        return found


class Watching(Named):
    """A keeper that only looks."""

    watches = True

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        self.log.append(f"{self.name} sees {place.path}")

    see = pack


class Layer(nn.Module):
    """Saves one tensor: its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.weight).exp()


class Blocks(nn.Module):
    """Layers, of which those in between run under what is given."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = Layer(), nn.Sequential(Layer(), Layer()), Layer()
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.around(self.inner, self.first(x) * 0.1) * 0.1)
        return y


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters."""
    model.zero_grad()
    model(X).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are the same to the last bit."""
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module."""
    y: Tensor = module(x)
    return y


def under(pair: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Call a module under a pair of hooks."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        with pair():
            return plainly(module, x)

    return call


def checkpointed(**options: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    """Call a module in a checkpoint."""
    return lambda module, x: checkpoint(module, x, **options)  # type: ignore[no-any-return]


def halving(log: list[str]) -> saved_tensors_hooks:
    """A pair of the program's own that packs a tensor into a tensor."""

    def pack(value: Tensor) -> Tensor:
        log.append("program packs")
        return value.detach() * 2

    def unpack(packed: Tensor) -> Tensor:
        log.append("program unpacks")
        return packed / 2

    return saved_tensors_hooks(pack, unpack)


@pytest.mark.parametrize("ambient", [True, False])
def test_a_pair_of_the_program_around_comes_first(ambient: bool) -> None:
    """A pair around gets the tensor first; what it makes goes on to the keeper, and back the other way."""
    log: list[str] = []
    layer = Layer()
    plain = gradients(layer)
    with halving(log), ExitStack() as stack:
        keep(stack, layer, Named("ours", log), ambient=ambient)
        found = gradients(layer)

    assert log == ["program packs", "ours packs ", "ours unpacks", "program unpacks"]
    assert equal(plain, found)


@pytest.mark.parametrize("ambient", [True, False])
def test_a_pair_of_the_program_inside_comes_first(ambient: bool) -> None:
    """The same for a pair that the program puts around a part of the model."""
    log: list[str] = []
    model = Blocks(under(lambda: halving(log)))
    plain = gradients(model)
    log.clear()
    with ExitStack() as stack:
        keep(stack, model, Named("ours", log), ambient=ambient)
        found = gradients(model)

    assert [entry for entry in log if "unpacks" not in entry] == [
        "ours packs first",
        "program packs",
        "ours packs inner.0",
        "program packs",
        "ours packs inner.1",
        "ours packs last",
    ]
    assert equal(plain, found)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_what_the_program_makes_no_tensor_of_stays_its_own(where: str) -> None:
    """save_on_cpu keeps what it has taken, the keeper takes the rest, and the gradients are right."""
    log: list[str] = []
    model = Blocks(under(save_on_cpu) if where == "inside" else plainly)
    plain = gradients(model)
    with ExitStack() as stack:
        if where == "around":
            stack.enter_context(save_on_cpu())
        keep(stack, model, Named("ours", log), ambient=True)
        found = gradients(model)

    assert equal(plain, found)
    assert [e for e in log if "inner" in e] == []
    assert bool(log) is (where == "inside")


def test_of_two_keepers_the_inner_decides_first() -> None:
    """What the inner keeper takes the outer never sees; what it leaves is offered to the outer one."""
    log: list[str] = []
    model = Blocks(plainly)
    plain = gradients(model)
    with ExitStack() as stack:
        keep(stack, model, Named("outer", log), ambient=True)
        keep(stack, model.inner, Named("inner", log, lambda value: True), ambient=False)
        found = gradients(model)

    assert [e for e in log if "unpacks" not in e and not e.endswith(" packs ")] == [
        "outer packs first",
        "inner packs 0",
        "inner packs 1",
        "outer packs last",
    ]
    assert equal(plain, found)

    log.clear()
    with ExitStack() as stack:
        keep(stack, model, Named("outer", log), ambient=True)
        keep(stack, model, Named("inner", log, lambda value: False), ambient=True)
        layer = gradients(model.first)
    assert log == ["inner leaves first", "outer packs first", "outer unpacks"]
    assert len(layer) == 1


def test_those_who_watch_are_shown_everything() -> None:
    """A keeper that watches sees what others take, whether they are inside, around, or the program's."""
    log: list[str] = []
    layer = Layer()
    with ExitStack() as stack:
        keep(stack, layer, Watching("around", log), ambient=True)
        keep(stack, layer, Named("ours", log), ambient=True)
        keep(stack, layer, Watching("inside", log), ambient=True)
        layer(X)
        assert log == ["inside sees ", "ours packs ", "around sees "]
        log.clear()
        with save_on_cpu():
            layer(X)
    assert log == ["inside sees ", "around sees "]


def test_what_all_leave_is_kept_by_reference() -> None:
    """Between several keepers that take nothing a tensor stays where it is, its version checked."""
    log: list[str] = []
    with ExitStack() as stack:
        for name in ("one", "two"):
            keep(stack, nn.Identity(), Named(name, log, lambda value: False), ambient=True)
        y = torch.ones(3, requires_grad=True).exp()
        assert isinstance(packed_of(y.grad_fn._raw_saved_result.data), KeptByReference)
        y.add_(1)
        with pytest.raises(
            RuntimeError, match=r"output 0 of Exp\w*, is at version 1; expected version 0"
        ):
            y.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("ambient", [True, False])
def test_inside_a_checkpoint_nothing_is_asked(ambient: bool, early_stop: bool) -> None:
    """Of a non-reentrant checkpoint a keeper is asked for the inputs; what is inside is the checkpoint's, and runs again."""
    log: list[str] = []
    model = Blocks(checkpointed(use_reentrant=False, early_stop=early_stop))
    plain = gradients(model)
    with ExitStack() as stack:
        keep(stack, model, Named("ours", log), ambient=ambient)
        found = gradients(model)
        again = gradients(model)

    assert [e for e in log if "inner" in e] == []
    assert log.count("ours packs ") == 2  # the input of the block, in each of the two passes
    assert log.count("ours packs last") == 2
    assert equal(plain, found)
    assert equal(plain, again)
    assert top(True) is None


def test_a_reentrant_checkpoint_saves_in_its_recompute() -> None:
    """What a reentrant checkpoint's recompute saves is asked for then, and marked as a recompute."""
    recomputes: list[tuple[str | None, bool]] = []

    class Noting(Named):
        def pack(self, value: Tensor, place: SavingPlace) -> Any:
            recomputes.append((place.path, place.recompute))
            return super().pack(value, place)

    model = Blocks(checkpointed(use_reentrant=True))
    plain = gradients(model)
    with ExitStack() as stack:
        keep(stack, model, Noting("ours", []), ambient=True)
        found = gradients(model)

    assert [entry for entry in recomputes if entry[1]] == [("inner.0", True), ("inner.1", True)]
    assert ("inner.0", False) not in recomputes
    assert equal(plain, found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_each_other(reentrant: bool) -> None:
    """Nested checkpoints give the same gradients under a keeper."""

    def nested(module: nn.Module, x: Tensor) -> Tensor:
        inside = checkpointed(use_reentrant=reentrant)
        y: Tensor = checkpoint(lambda x: inside(module, x).sin(), x, use_reentrant=reentrant)
        return y

    model = Blocks(nested)
    plain = gradients(model)
    with ExitStack() as stack:
        keep(stack, model, Named("ours", []), ambient=True)
        found = gradients(model)

    assert equal(plain, found)


def test_a_keeper_that_begins_inside_a_checkpoint_leaves_it_alone() -> None:
    """A block inside the checkpointed function, run twice, is asked nothing and disturbs nothing."""
    log: list[str] = []

    def around(module: nn.Module, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            with ExitStack() as stack:
                keep(stack, module, Named("ours", log), ambient=True)
                return plainly(module, x)

        y: Tensor = checkpoint(block, x, use_reentrant=False)
        return y

    model = Blocks(around)
    bare = Blocks(checkpointed(use_reentrant=False))
    bare.load_state_dict(model.state_dict())

    assert equal(gradients(bare), gradients(model))
    assert log == []
    assert top(True) is None


def test_a_pair_inside_a_checkpointed_function_keeps_its_meaning() -> None:
    """Under the program's own pair inside a checkpointed function tensors are saved, and the keeper gets what it makes."""
    log: list[str] = []

    def around(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            lambda x: under(lambda: halving([]))(module, x), x, use_reentrant=False
        )
        return y

    model = Blocks(around)
    plain = gradients(model)
    with ExitStack() as stack:
        keep(stack, model, Named("ours", log), ambient=True)
        found = gradients(model)

    assert equal(plain, found)
    assert "ours packs inner.0" in log


def test_selective_checkpoints_give_the_same_gradients() -> None:
    """What a selective checkpoint keeps goes past all hooks; gradients are right all the same."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op is torch.ops.aten.exp.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    model = Blocks(
        checkpointed(
            use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    )
    plain = gradients(model)
    with ExitStack() as stack:
        keep(stack, model, Named("ours", []), ambient=True)
        found = gradients(model)

    assert equal(plain, found)


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters,
    reason="this PyTorch does not ask",
)
@pytest.mark.parametrize("asked", [None, False, True])
def test_a_selective_checkpoint_asks_hooks_if_the_program_says_so(asked: bool | None) -> None:
    """A program without hooks of its own is not warned because of ours; ours is asked if the program asks for hooks."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op is torch.ops.aten.exp.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    model = Blocks(
        checkpointed(use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=asked)
    )
    plain, logs = gradients(model), []
    for around in (True, False):
        log: list[str] = []
        with ExitStack() as stack:
            keep(stack, model, Named("ours", log), ambient=around)
            found = gradients(model)
        assert equal(plain, found)
        logs.append(log)

    packs = [sum("packs" in line for line in log) for log in logs]
    without = Blocks(checkpointed(use_reentrant=False, context_fn=contexts))
    for around, count in zip((True, False), packs, strict=True):
        log = []
        with ExitStack() as stack:
            keep(stack, without, Named("ours", log), ambient=around)
            gradients(without)
        assert (count > sum("packs" in line for line in log)) is (asked is True)


def test_a_checkpoint_in_a_failing_forward_leaves_nothing() -> None:
    """An exception inside a checkpointed function, in its forward or its recompute, leaves the stack as it was."""

    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = Layer(), 0

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            self.calls += 1
            if self.calls == self.when:
                raise ValueError("no")
            return y.sin()

    for when in (1, 2):
        model, log = Blocks(checkpointed(use_reentrant=False)), []  # type: ignore[var-annotated]
        raising = Raising()
        raising.when = when  # type: ignore[assignment]
        model.inner = nn.Sequential(raising)
        with ExitStack() as stack:
            keep(stack, model, Named("ours", log), ambient=True)
            with pytest.raises(ValueError, match="no"):
                model(X).sum().backward()
            log.clear()
            assert len(gradients(model)) == 3
            assert log[0] == "ours packs first"
        assert top(True) is None
