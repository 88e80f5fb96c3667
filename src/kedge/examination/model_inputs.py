"""The inputs of a model's call, by name, and what they are changed into."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.sites import leaves


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of one call of a model.

    Attributes:
        args: The arguments by position.
        kwargs: The arguments by name.
        names: The names of the arguments by position.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]

    @classmethod
    def of_call(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ModelInputs:
        """Return the inputs of a call, named as the model's forward names them."""
        names = [str(i) for i in range(len(args))]
        try:
            expected = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # it is not written in Python
            expected = []
        for i, parameter in enumerate(expected[: len(args)]):
            if parameter.kind is parameter.VAR_POSITIONAL:
                break
            names[i] = parameter.name
        return cls(args, dict(kwargs), tuple(names))

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name: ``x``, ``batch.mask``."""
        by_name = {**dict(zip(self.names, self.args, strict=True)), **self.kwargs}
        return dict(leaves.find(by_name))

    def numbers(self) -> dict[str, Tensor]:
        """Return the tensors of real or whole numbers with at least one dimension, in memory."""
        return {name: value for name, value in self.tensors().items() if _is_plain(value)}

    def with_tensors(self, new: Mapping[str, Tensor]) -> ModelInputs:
        """Return the inputs with some tensors replaced, by name; these are not changed."""
        by_position = dict(zip(self.names, self.args, strict=True))
        changed = leaves.put({**by_position, **self.kwargs}, new)
        args = tuple(changed[name] for name in self.names)
        kwargs = {name: changed[name] for name in self.kwargs}
        return ModelInputs(args, kwargs, self.names)

    def apart(self) -> ModelInputs:
        """Return inputs whose tensors are copies, so that nothing that happens to these changes them."""
        return self.with_tensors({name: _copy_of(value) for name, value in self.tensors().items()})

    def converted(self, dtype: torch.dtype) -> ModelInputs:
        """Return the inputs with all floating-point tensors in another type."""
        floats = {n: v.to(dtype) for n, v in self.tensors().items() if v.is_floating_point()}
        return self.with_tensors(floats)


def _is_plain(value: Tensor) -> bool:
    is_number = not (value.is_complex() or value.is_quantized)
    is_dense = value.layout is torch.strided and not value.is_nested
    has_elements = value.dim() > 0 and value.numel() > 0
    return is_number and is_dense and has_elements and not value.is_meta


def _copy_of(value: Tensor) -> Tensor:
    copy = value.detach().clone()
    if value.is_floating_point() or value.is_complex():
        copy.requires_grad_(value.requires_grad)
    return copy
