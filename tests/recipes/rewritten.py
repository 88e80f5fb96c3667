"""Convolutional nets whose ReLUs are written in every way there is, and by hand with the backward of a paper."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class GuidedByHand(torch.autograd.Function):
    """A ReLU through which a gradient goes back where it and the output are positive."""

    @staticmethod
    def forward(ctx, x):
        out = x.relu()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return torch.where(out > 0, grad.clamp(min=0), torch.zeros_like(grad))


class DeconvolutionByHand(torch.autograd.Function):
    """A ReLU through which a gradient goes back where it is positive."""

    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(min=0)


class Rectified(nn.Module):
    """Three ReLUs, one of whose outputs is used twice, around two convolutions; gives five logits."""

    def __init__(self, first: Callable, second: Callable, third: Callable) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(8 * 3 * 3, 16)
        self.fc2 = nn.Linear(16, 5)
        self.first, self.second, self.third = first, second, third

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.conv1(x))
        x = self.pool(x + self.second(self.conv2(x)))
        return self.fc2(self.third(self.fc1(x.flatten(1))))


class Listed(Rectified):
    """The same, with the ReLUs in a list that PyTorch knows nothing of."""

    def __init__(self) -> None:
        super().__init__(*[lambda x, i=i: self.hidden[i](x) for i in range(3)])
        self.hidden = [nn.ReLU(), nn.ReLU(), nn.ReLU(inplace=True)]


class Checkpointed(Rectified):
    """The same, with its convolutions in a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(F.relu, nn.ReLU(inplace=True), torch.relu)
        self.reentrant = reentrant

    def features(self, x: Tensor) -> Tensor:
        x = self.first(self.conv1(x))
        return self.pool(x + self.second(self.conv2(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.features, x, use_reentrant=self.reentrant)
        return self.fc2(self.third(self.fc1(x.flatten(1))))


def shared(*, inplace: bool) -> Rectified:
    """Make one with a single ReLU for all three."""
    relu = nn.ReLU(inplace=inplace)
    return Rectified(relu, relu, relu)


FORMS: dict[str, Callable[[], nn.Module]] = {
    "modules": lambda: Rectified(nn.ReLU(), nn.ReLU(), nn.ReLU()),
    "modules in place": lambda: Rectified(
        nn.ReLU(inplace=True), nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    ),
    "one shared module": lambda: shared(inplace=False),
    "one shared module in place": lambda: shared(inplace=True),
    "F.relu": lambda: Rectified(F.relu, F.relu, F.relu),
    "F.relu in place": lambda: Rectified(*[lambda x: F.relu(x, inplace=True)] * 3),
    "torch.relu": lambda: Rectified(*[lambda x: torch.relu(x)] * 3),
    "method": lambda: Rectified(*[lambda x: x.relu()] * 3),
    "method in place": lambda: Rectified(*[lambda x: x.relu_()] * 3),
    "all kinds": lambda: Rectified(nn.ReLU(), F.relu, lambda x: x.relu_()),
    "hidden in a list": Listed,
    "in a checkpoint": lambda: Checkpointed(reentrant=False),
}


def made(form: str) -> nn.Module:
    """Make the net of a form, always with the same weights."""
    torch.manual_seed(3)
    return FORMS[form]().eval()


def by_hand(function: type[torch.autograd.Function]) -> nn.Module:
    """Make the net with a ReLU that is written by hand, with the same weights."""
    torch.manual_seed(3)
    return Rectified(function.apply, function.apply, function.apply).eval()


def images() -> Tensor:
    """Make four images."""
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def plainly(model: nn.Module, x: Tensor, target: int) -> Tensor:
    """Return the gradient of a class's logit with respect to the input, as one would write it."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(model(x)[:, target].sum(), x)[0]
