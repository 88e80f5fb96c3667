"""Operations in the forward of a `torch.autograd.Function`: they may be looked at, and neither edited nor differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import EditError, NeverFired


class Double(torch.autograd.Function):
    """Twice its input, with the backward by hand."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Newer(torch.autograd.Function):
    """The same, written as transforms of torch.func need it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Graphed(torch.autograd.Function):
    """The same, whose forward makes a graph of its own for the backward."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x * 2
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.y, ctx.x, grad)[0]


class InPlace(torch.autograd.Function):
    """The same, on the memory of what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Holding(torch.autograd.Function):
    """Calls a function of one's own in the forward of another."""

    @staticmethod
    def forward(ctx, x):
        return Double.apply(x) + 0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Net(nn.Module):
    """One of them between two operations."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x.sinh()).sin()


def gradient(net: nn.Module) -> Tensor:
    """Return the input's gradient."""
    x = torch.ones(2, requires_grad=True)
    net(x).sum().backward()
    return x.grad


functions = pytest.mark.parametrize(
    "function", [Double, Newer, InPlace, Holding], ids=lambda f: f.__name__
)


@pytest.mark.parametrize("site", ["/mul*:out", "/mul*:in"])
@functions
def test_an_edit_inside_a_function_of_ones_own_is_an_error(
    function: type[torch.autograd.Function], site: str
) -> None:
    """The backward by hand knows nothing of it, so the gradient would be silently wrong."""
    net = Net(function)
    inside = "Double" if function is Holding else function.__name__
    why = f"this is in the forward of {inside}, a torch.autograd.Function"
    if function is InPlace and site.endswith("in"):
        why = "mul_ changes the original tensor in place"
    with (
        pytest.raises(EditError, match=rf"/mul_?#0:(out|in\[0\]), but {why}"),
        kedge.hook(net, site, torch.zeros_like),
    ):
        gradient(net)


@functions
def test_what_is_around_such_a_function_is_edited_as_ever(
    function: type[torch.autograd.Function],
) -> None:
    """What it is given and what is made of its result have the gradients that they would have by hand."""
    net = Net(function)
    with kedge.hook(net, "/sinh:out, /sin:in", lambda value: value * 3):
        edited = gradient(net)
    x = torch.ones(2, requires_grad=True)
    by_hand = torch.autograd.grad(((x.sinh() * 3 * 2) * 3).sin().sum(), x)[0]
    assert torch.allclose(edited, by_hand)


@functions
def test_operations_inside_a_function_of_ones_own_are_seen(
    function: type[torch.autograd.Function],
) -> None:
    """Their values can be recorded, under names by which they are listed, and no gradient changes a bit."""
    net, bare = Net(function), gradient(Net(function))
    name = "/mul_" if function is InPlace else "/mul"
    assert name in [
        kedge.operations(net, torch.ones(2)).name(row)
        for row in kedge.operations(net, torch.ones(2))
    ]
    with kedge.hook(net, f"{name}:out, {name}:in", kedge.record(copy=True)) as acts:
        assert torch.equal(gradient(net), bare)
    assert torch.equal(acts[f"{name}:out"], torch.ones(2).sinh() * 2)
    assert torch.equal(acts[f"{name}:in[0]"], torch.ones(2).sinh())


@pytest.mark.parametrize("kind", ["out.grad", "in.grad"])
@functions
def test_operations_inside_a_function_of_ones_own_have_no_gradient(
    function: type[torch.autograd.Function], kind: str
) -> None:
    """The ledger says why; others of a pattern have theirs."""
    net, name = Net(function), "/mul_" if function is InPlace else "/mul"
    with (
        pytest.raises(
            NeverFired, match="in the forward of a torch.autograd.Function, which runs without grad"
        ),
        kedge.session(strict=True) as s,
    ):
        s.hook(net, f"{name}:{kind}", kedge.record())
        gradient(net)
    with kedge.hook(net, f"/*:{kind}", kedge.record()) as grads:
        gradient(net)
    assert [len(grads.records(f"{op}:{kind}")) for op in ("/sinh", name, "/sin")] == [1, 0, 1]


def test_a_graph_that_such_a_function_makes_of_its_own_is_edited() -> None:
    """With grad turned on again, the backward differentiates what the edit made."""
    net = Net(Graphed)
    with kedge.hook(net, "/mul:out", lambda value: value * 0 + 1):
        assert torch.equal(gradient(net), torch.zeros(2))
    with kedge.hook(net, "/mul:out.grad", kedge.record()) as grads:
        gradient(net)
    assert torch.allclose(grads["/mul:out.grad"], (torch.ones(2).sinh() * 2).cos())


def test_in_a_transform_such_a_function_is_one_operation() -> None:
    """Under torch.func it goes by the name of what PyTorch calls for it, and an edit of what it makes has its gradient."""
    net, x = Net(Newer), torch.ones(2)
    with kedge.hook(net, "/custom_function_call", lambda value: value * 3):
        edited = torch.func.grad(lambda x: net(x).sum())(x)
    assert torch.allclose(edited, 6 * x.cosh() * (6 * x.sinh()).cos())


def test_a_function_that_torch_library_knows_is_one_operation() -> None:
    """It goes by its name, and an edit of what it makes has the right gradient."""

    @torch.library.custom_op("kedge_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_autograd(lambda ctx, grad: grad * 2)

    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return doubled(x).sin()

    net, x = Called(), torch.ones(2)
    assert [kedge.operations(net, x).name(row) for row in kedge.operations(net, x)] == [
        "/doubled",
        "/sin",
    ]
    with kedge.hook(net, "/doubled", lambda value: value * 3):
        assert torch.allclose(gradient(net), 6 * (torch.ones(2) * 6).cos())
    with kedge.hook(net, "/doubled", lambda value: value * 0 + 1):
        assert torch.equal(gradient(net), torch.zeros(2))
