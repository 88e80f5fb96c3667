"""What plain PyTorch says of a training step, for comparison, without any help of Kedge's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.training import batch_of, seed
from tests.architectures.zoo import Architecture


class Witness:
    """What plain PyTorch hooks say of every module: calls, tensors, and, from `torch.autograd.grad`, gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[tuple[str, str], list[Tensor]] = {}
        self.versions: dict[int, int] = {}
        self.called: set[str] = set()
        self.gradients: dict[tuple[str, str], list[Tensor | None]] = {}
        self.handles = ExitStack()
        for name, module in model.named_modules():
            self.handles.callback(
                module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove
            )
            self.handles.callback(
                module.register_forward_hook(lambda m, a, o, n=name: self._keep(n, "out", o)).remove
            )

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.called.add(name)
            self._keep(name, "in", (args, kwargs))

        return before

    def _keep(self, name: str, kind: str, value: Any) -> None:
        found = plain_leaves(value)
        self.values.setdefault((name, kind), []).extend(found)
        self.versions |= {id(t): t._version for t in found if id(t) not in self.versions}

    def differentiate(self, loss: Tensor) -> None:
        """Ask for the gradient of every tensor that was seen; None where the loss does not depend on it."""
        self.handles.close()
        asked = {id(t): t for ts in self.values.values() for t in ts if t.requires_grad}
        got = torch.autograd.grad(loss, list(asked.values()), allow_unused=True, retain_graph=True)
        by_id = dict(zip(asked, got, strict=True))
        self.gradients = {site: [by_id.get(id(t)) for t in ts] for site, ts in self.values.items()}

    def intact(self, path: str, kind: str) -> bool:
        """Whether no tensor of a site was changed in place after it was seen."""
        return all(t._version == self.versions[id(t)] for t in self.values[path, kind])


def plain_leaves(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and model outputs."""
    if isinstance(value, Tensor):
        return [value]
    inside = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [t for child in inside for t in plain_leaves(child)]


def witnessed(architecture: Architecture) -> Witness:
    """The same training step as seen by plain PyTorch."""
    model = architecture.build()
    witness = Witness(model)
    seed(2)
    witness.differentiate(architecture.loss(model(**batch_of(architecture))))
    return witness
