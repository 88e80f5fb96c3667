"""Keepers of saved tensors where there is nothing to see: they step aside, and say so once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap

from kedge.errors import SavedAside
from kedge.hooks.saved.keeper import SavingPlace, keep
from kedge.hooks.saved.pairs import pair_stack

top = torch._C._autograd._top_saved_tensors_default_hooks
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Hoard:
    """A keeper that takes everything."""

    def __init__(self) -> None:
        self.paths: list[str | None] = []

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        self.paths.append(place.path)
        return [value.detach()]

    def unpack(self, packed: Any) -> Tensor:
        found: Tensor = packed[0]
        return found


@contextmanager
def keeping(model: nn.Module, hoard: Hoard, *, ambient: bool = True) -> Iterator[list[str]]:
    """Put a keeper in force for a block; returns the messages of the block."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
        warnings.simplefilter("always")
        keep(stack, model, hoard, ambient=ambient)
        yield said
    said += [str(w.message) for w in caught if isinstance(w.message, SavedAside)]
    assert [w for w in caught if not isinstance(w.message, SavedAside)] == []


def network() -> nn.Sequential:
    """A small model with its own parameters."""
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def loss(model: nn.Module) -> Callable[..., Tensor]:
    """The loss as a function of the parameters."""
    return lambda params, x=X: functional_call(model, params, (x,)).sum()


def _grad(model: nn.Module, params: Any) -> Any:
    return grad(loss(model))(params)


def _vjp(model: nn.Module, params: Any) -> Any:
    return vjp(loss(model), params)[1](torch.tensor(2.0))


def _jacrev(model: nn.Module, params: Any) -> Any:
    return jacrev(lambda p: functional_call(model, p, (X,)))(params)


def _hessian(model: nn.Module, params: Any) -> Any:
    return hessian(loss(model))(params)


def _samples(model: nn.Module, params: Any) -> Any:
    return vmap(grad(loss(model)), in_dims=(None, 0))(params, X)


def _grad_twice(model: nn.Module, params: Any) -> Any:
    return grad(lambda p: sum(g.pow(2).sum() for g in grad(loss(model))(p).values()))(params)


TRANSFORMS = [_grad, _vjp, _jacrev, _hessian, _samples, _grad_twice]


def flat(value: Any) -> list[Tensor]:
    """Return all tensors in nested dicts and tuples."""
    found, _ = torch.utils._pytree.tree_flatten(value)
    return found


@pytest.mark.parametrize("ambient", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_work_as_without_a_keeper(transform: Callable[..., Any], ambient: bool) -> None:
    """The transforms that refuse saved-tensor hooks run, with the same results; that nothing is seen is said once."""
    model, hoard = network(), Hoard()
    params = {name: p.detach() for name, p in model.named_parameters()}
    plain = flat(transform(model, params))
    with keeping(model, hoard, ambient=ambient) as said:
        found, again = flat(transform(model, params)), flat(transform(model, params))
        model(X).sum().backward()

    assert all(map(torch.equal, plain, found))
    assert all(map(torch.equal, plain, again))
    assert len(said) == 1
    assert "torch.func" in said[0]
    assert hoard.paths == ["0", "1", "2", "2"]  # of the ordinary pass after them


def test_a_functional_call_is_seen() -> None:
    """functional_call alone is no transform: what its modules save is seen."""
    model, hoard = network(), Hoard()
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with keeping(model, hoard) as said:
        loss(model)(params).backward()

    assert said == []
    assert hoard.paths == ["0", "1", "2", "2"]
    assert all(p.grad is not None for p in params.values())


@pytest.mark.parametrize("ambient", [True, False])
def test_vmap_alone_is_seen(ambient: bool) -> None:
    """Under vmap autograd saves the values of all samples at once."""
    model, hoard = network(), Hoard()
    plain = torch.autograd.grad(vmap(model)(X).sum(), list(model.parameters()))
    with keeping(model, hoard, ambient=ambient) as said:
        found = torch.autograd.grad(vmap(model)(X).sum(), list(model.parameters()))

    assert said == []
    assert "1" in hoard.paths
    assert all(map(torch.equal, plain, found))


@pytest.mark.parametrize("ambient", [True, False])
def test_a_transform_inside_a_module(ambient: bool) -> None:
    """A module that differentiates in its own forward does so as without a keeper, and is seen before and after."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            slope = grad(lambda t: t.sin().sum())(y.detach())
            return (y * slope).exp()

    model, hoard = Inside(), Hoard()
    plain = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    with keeping(model, hoard, ambient=ambient) as said:
        found = torch.autograd.grad(model(X).sum(), list(model.parameters()))

    assert len(said) == 1
    assert hoard.paths == ["a", "", ""]  # the product needs the slope alone
    assert all(map(torch.equal, plain, found))
    assert top(True) is None


def test_a_transform_that_fails_leaves_everything_in_place() -> None:
    """After an exception inside a transform the keeper is asked as before."""

    def raising(x: Tensor) -> Tensor:
        raise ValueError("no")

    model, hoard = network(), Hoard()
    with keeping(model, hoard) as said:
        with pytest.raises(ValueError, match="no"):
            grad(raising)(torch.ones(2))
        before = top(True)
        with pytest.raises(KeyboardInterrupt):
            grad(lambda x: (_ for _ in ()).throw(KeyboardInterrupt()))(torch.ones(2))
        assert top(True) == before
        model(X)

    assert len(said) == 1
    assert len(hoard.paths) == 4
    assert top(True) is None


def test_a_pair_of_the_program_still_makes_a_transform_refuse() -> None:
    """What PyTorch refuses without Kedge it refuses with it."""
    with keeping(network(), Hoard()):
        with save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
            grad(lambda x: x.sin().sum())(torch.ones(2))
        assert pair_stack.pairs != []
        assert top(True)[0] is pair_stack.pairs[-1].hooks[0]


def test_the_functions_of_torch_are_what_they_were() -> None:
    """After the last block, in whatever order they end, the function by which transforms forbid hooks is untouched."""
    (cell,) = graph.disable_saved_tensors_hooks.__closure__  # type: ignore[attr-defined]
    function, inside = graph.disable_saved_tensors_hooks, cell.cell_contents
    one, other = ExitStack(), ExitStack()
    keep(one, network(), Hoard(), ambient=True)
    keep(other, network(), Hoard(), ambient=False)
    assert cell.cell_contents is not inside
    one.close()
    assert cell.cell_contents is not inside
    other.close()

    assert cell.cell_contents is inside
    assert graph.disable_saved_tensors_hooks is function
    with (
        graph.disable_saved_tensors_hooks("not now"),
        pytest.raises(RuntimeError, match="not now"),
        save_on_cpu(),
    ):
        pass


def test_under_a_fake_tensor_mode_nothing_is_asked() -> None:
    """FakeTensors hold nothing: shapes come out as without a keeper, which is not asked and says so."""
    hoard = Hoard()
    with keeping(nn.Identity(), hoard) as said, FakeTensorMode():
        model = network()
        model(torch.ones(2, 3)).exp().sum().backward()

    assert model[0].weight.grad is not None
    assert hoard.paths == []
    assert len(said) == 1
    assert "FakeTensor" in said[0]


@pytest.mark.parametrize("ambient", [True, False])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_runs_as_without_a_keeper(
    compiled: Callable[..., Any], compiled_first: bool, ambient: bool
) -> None:
    """Outputs and gradients of compiled code are the same, and it is said that it is not seen inside."""
    model, hoard = network(), Hoard()
    fast = compiled(model, backend="aot_eager", fullgraph=True)
    if compiled_first:
        fast(X)
    plain = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    with keeping(fast, hoard, ambient=ambient) as said:
        found = torch.autograd.grad(fast(X).sum(), list(model.parameters()))
    after = torch.autograd.grad(fast(X).sum(), list(model.parameters()))

    assert len(said) == 1
    assert "compiled" in said[0]
    assert not {"0", "1", "2"} & set(hoard.paths)
    for other in (found, after):
        assert all(map(torch.allclose, plain, other))


def test_a_keeper_makes_nothing_compile_again(compiled: Callable[..., Any]) -> None:
    """Code that was compiled before the block serves in it and after it."""
    model, seen = network(), []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    fast = compiled(model, backend=backend)
    fast(X)
    with keeping(fast, Hoard(), ambient=False):
        fast(X)
    fast(X)

    assert len(seen) == 1


def test_a_transform_in_compiled_code_refuses_as_under_any_pair(
    compiled: Callable[..., Any],
) -> None:
    """Dynamo itself forbids hooks for a transform that it compiles, and fails; of ours nothing stays."""

    def slope(x: Tensor) -> Tensor:
        y: Tensor = grad(lambda t: t.sin().sum())(x)
        return y

    try:
        with (
            keeping(nn.Identity(), Hoard()),
            pytest.raises(RuntimeError, match="saved tensor hooks"),
        ):
            compiled(slope, backend="eager")(X)
        assert top(True) is None
    finally:
        torch._C._autograd._saved_tensors_hooks_enable()  # which Dynamo forgets
    with keeping(nn.Identity(), Hoard(), ambient=False):
        assert torch.equal(compiled(slope, backend="eager")(X), X.cos())
