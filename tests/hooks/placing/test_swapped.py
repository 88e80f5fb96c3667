"""A program may swap its tensors (`torch.utils.swap_tensors`) while they are hooked, as `model.double()` can do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import kedge


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    """Let conversions of modules swap."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def net() -> nn.Module:
    """Return a small network with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def backward(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Run a pass on inputs that follow from the generator."""
    model.zero_grad()
    model(torch.randn(5, 4, dtype=dtype)).square().mean().backward()


def load(model: nn.Module) -> None:
    """Load a state dict, which swaps."""
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], object], torch.dtype]] = {
    "double": (lambda model: model.double(), torch.float64),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "there and back": (lambda model: model.double().float(), torch.float32),
    "load_state_dict": (load, torch.float32),
}


@pytest.mark.parametrize(("convert", "dtype"), CONVERSIONS.values(), ids=CONVERSIONS.keys())
@pytest.mark.parametrize("kind", ["param.grad", "param.acc"])
def test_gradients_after_a_swap_are_seen(
    kind: str, convert: Callable[[nn.Module], object], dtype: torch.dtype
) -> None:
    """They are those of the new numbers, once for each backward, and the swap is that of a plain model."""
    plain, model = net(), net()
    backward(plain)
    convert(plain)
    torch.manual_seed(1)
    backward(plain, dtype)
    seen: list[Tensor] = []
    with kedge.session() as s:
        s.hook(model, f"0.weight:{kind}", lambda g: seen.append(g.clone()))
        s.hook(model, "**:param.grad, **:param, **:out, **:out.grad", kedge.measure())
        s.hook(model, "3:out", kedge.record())
        torch.manual_seed(0)
        net()
        backward(model)
        convert(model)
        torch.manual_seed(1)
        backward(model, dtype)
    assert len(seen) == 2
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype is dtype
        assert torch.equal(a, b), name
        assert torch.equal(a.grad, b.grad), name
    weight = model.get_parameter("0.weight").grad
    assert weight is not None
    assert torch.equal(seen[1], weight)


def test_an_edit_of_a_gradient_goes_on_after_a_swap() -> None:
    """Every gradient is doubled, whatever the parameter has become."""
    plain, model = net(), net()
    with kedge.hook(model, "3.weight:param.grad", kedge.scale(2)):
        for each in (plain, model):
            each.double()
            torch.manual_seed(1)
            backward(each, torch.float64)
    twice = plain.get_parameter("3.weight").grad
    assert twice is not None
    assert torch.equal(twice * 2, model.get_parameter("3.weight").grad)


@pytest.mark.parametrize("kind", ["param.grad", "param.acc"])
def test_hooks_of_the_program_are_called_as_without_kedge(kind: str) -> None:
    """PyTorch calls those that were registered after a swap, and none from before it."""

    def calls(model: nn.Module) -> list[str]:
        found: list[str] = []
        early, late = model.get_parameter("0.bias"), model.get_parameter("3.bias")
        register = "register_hook" if kind == "param.grad" else "register_post_accumulate_grad_hook"
        getattr(early, register)(lambda _: found.append("before"))
        backward(model)
        model.double()
        getattr(late, register)(lambda _: found.append("after"))
        backward(model, torch.float64)
        backward(model, torch.float64)
        return found

    hooked = net()
    with kedge.hook(hooked, f"**:{kind}", kedge.measure()):
        found = calls(hooked)
    assert found == calls(net()) == ["before", "after", "after"]


def test_parameters_that_are_exchanged_with_each_other_keep_their_sites() -> None:
    """Each site has the gradient of the parameter that has its name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    seen: dict[str, Tensor] = {}

    def note(value: Tensor, event: kedge.Event) -> None:
        assert event.site.path not in seen
        seen[event.site.path] = value.clone()

    with kedge.hook(model, "*.weight:param.grad", note):
        torch.utils.swap_tensors(model[0].weight, model[1].weight)
        model(torch.randn(2, 3)).square().mean().backward()
    for name, value in seen.items():
        assert torch.equal(value, model.get_parameter(name).grad)  # type: ignore[arg-type]
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["param.grad", "param.acc"])
def test_nothing_is_left_that_would_outlive_a_swap(kind: str) -> None:
    """After a session, a parameter has no table, which would make PyTorch forget the program's next hook."""
    model, called = net(), []
    with kedge.hook(model, f"**:{kind}", kedge.measure()):
        backward(model)
    model.double()
    for param in model.parameters():
        param.register_hook(lambda _: called.append("grad"))
        param.register_post_accumulate_grad_hook(lambda _: called.append("acc"))
    backward(model, torch.float64)
    assert len(called) == 2 * len(list(model.parameters()))


def test_a_paused_hook_comes_back_after_a_swap() -> None:
    """Even if the program has put a hook of its own on the parameter meanwhile."""
    model, seen, own = net(), [], []
    with kedge.session() as s:
        s.hook(model, "0.weight:param.acc, 0.weight:param.grad", lambda g: seen.append(1))
        backward(model)
        s.pause()
        model.double()
        model.get_parameter("0.weight").register_post_accumulate_grad_hook(
            lambda p: own.append(p.dtype)
        )
        backward(model, torch.float64)
        s.resume()
        assert len(seen) == 2
        backward(model, torch.float64)
        assert len(seen) == 4
    assert len(own) == 2


def test_an_account_of_saved_tensors_leaves_no_reference() -> None:
    """The model can be swapped between two accounts, and the input, too."""
    model, x = net(), torch.randn(5, 4, requires_grad=True)
    kedge.saved(model, backward=True)(x)
    model.double()
    torch.utils.swap_tensors(x, torch.randn(5, 4, dtype=torch.float64, requires_grad=True))
    assert kedge.saved(model, backward=True)(x)


def test_offloaded_tensors_leave_no_reference() -> None:
    """Neither to parameters and buffers nor to inputs."""
    model, x = net(), torch.randn(5, 4, requires_grad=True)
    with kedge.offload(model):
        loss = model(x).square().mean()
        loss.backward()
        for each in (x, *model.parameters(), *model.buffers()):
            assert not weakref.getweakrefcount(each)
        del loss
        model.double()
        torch.utils.swap_tensors(x, torch.randn(5, 4, requires_grad=True))
        backward(model, torch.float64)


def test_a_hooked_leaf_can_be_swapped() -> None:
    """A tensor that belongs to no module is held by its gate no more than a parameter."""
    z = torch.randn(3, requires_grad=True)
    with kedge.session() as s:
        s.hook(z, kedge.scale(2))
        z.sum().backward()
        assert torch.equal(z.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
        z.grad = None
        torch.utils.swap_tensors(z, torch.randn(3, requires_grad=True))
