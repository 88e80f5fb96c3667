"""Steps of optimizers that are not taken: the gradients are set aside meanwhile.

# Note [A step without gradients]
A hook cannot keep PyTorch from calling an optimizer's step. But PyTorch's optimizers leave a
parameter alone whose gradient is None: it does not decay, and its state stays, also that of
momentum and the count of its steps. So each gradient is None during the step, and then the same
tensor as before. An optimizer of the program's own has to keep that convention, too.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.watch.models.optimizers import params_of


class GradientsAside:
    """Gradients that are set aside for a step; see Note [A step without gradients]."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}

    def forget(self, optimizer: Optimizer) -> None:
        """Drop the gradients of a step that has failed, as the program has begun another one."""
        self._of.pop(id(optimizer), None)

    def take(self, optimizer: Optimizer) -> None:
        """Set the gradients of an optimizer aside."""
        taken = self._of[id(optimizer)] = []
        for param in params_of(optimizer):
            if param.grad is not None:
                taken.append((param, param.grad))
                param.grad = None

    def put_back(self, optimizer: Optimizer) -> None:
        """Put the gradients of an optimizer back, if they are set aside."""
        for param, grad in self._of.pop(id(optimizer), ()):
            param.grad = grad
