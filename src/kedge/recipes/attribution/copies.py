"""An attribution over changed copies of the input: with noise, or on the way from a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.calls.arguments import noted_arguments
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.attribution.attribution import Attribution
from kedge.recipes.attribution.scores import Target, score, settled
from kedge.recipes.model_run import name_of, preserved_state
from kedge.sites import leaves


class Change(Protocol):
    """An action that changes a batch of copies, and what becomes of their attributions."""

    verb: str
    """What it does, for an error: there is nothing to ..."""

    def begin(self, values: Mapping[str, Tensor]) -> None:
        """Begin a call, given the values without a change, by their names."""

    def start(self, first: int, copies: int) -> None:
        """Begin another forward, of a number of copies from one on."""

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Return the changed value of all copies; a recompute of the forward gets the same one."""

    def summed(self, parts: Tensor, first: int) -> Tensor:
        """Return the sum of the attributions of some copies, which are the second dimension."""

    def ended(self, name: str, summed: Tensor) -> Tensor:
        """Return the attribution at a value, given the sum of all copies."""


class OverCopies:
    """An attribution, taken over changed copies of its input; called like the model.

    Args:
        attribution: The attribution.
        change: What changes the copies.
        copies: Their number.
        at_once: The number in one forward.
    """

    def __init__(self, attribution: Attribution, change: Change, copies: int, at_once: int) -> None:
        self.attribution = attribution
        self.change = change
        self.copies = copies
        self.at_once = at_once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the attribution for these arguments; see `Attribution`."""
        change = self.change
        targets, n, names = self._settled(args, kwargs)
        total: dict[str, Tensor] = {}
        kinds: dict[str, torch.dtype] = {}
        for first in range(0, self.copies, self.at_once):
            copies = min(self.at_once, self.copies - first)
            change.start(first, copies)
            many, keywords = _repeated((args, kwargs), n, copies)
            wanted = [_for_each(target, n, copies) for target in targets]
            answer = self.attribution.answer(many, keywords, self.where, change, target=wanted)
            if isinstance(self.attribution.wrt, str):
                answer = {self.attribution.wrt: answer}
            for text, part in answer.items():
                # Many halves would lose the last ones.
                wide = torch.promote_types(part.dtype, torch.float32)
                summed = change.summed(part.unflatten(1, (copies, -1)).to(wide), first)
                if text in total:
                    summed = total[text] + summed
                total[text] = summed
                kinds[text] = part.dtype

        several = isinstance(self.attribution.target, Sequence)
        found = {}
        for text, summed in total.items():
            whole = change.ended(names.get(text, ""), summed)
            if not several:
                whole = whole[0]
            found[text] = whole.to(kinds[text])
        if isinstance(self.attribution.wrt, str):
            return found[self.attribution.wrt]
        return found

    @property
    def where(self) -> str:
        """The selector of the values that are changed."""
        noisy = self.attribution.method().noisy
        if noisy:
            return noisy
        return ", ".join(self._places())

    def _places(self) -> list[str]:
        wrt = self.attribution.wrt
        return [wrt] if isinstance(wrt, str) else list(wrt)

    def _settled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Target], int, dict[str, str]]:
        """Return the targets for all copies, the number of samples, and the value of each place.

        They are found by one forward without a change.
        """
        changed: dict[str, Tensor] = {}
        names: dict[str, str] = {}

        def is_changed(value: Tensor) -> bool:
            return value.is_floating_point() and value.dim() > 0

        def keep(value: Tensor, event: Event) -> None:
            if is_changed(value):
                changed[name_of(event)] = value.detach().clone()

        def find(text: str, value: Tensor, event: Event) -> None:
            if is_changed(value):
                names[text] = name_of(event)

        model = self.attribution.model
        with preserved_state(model), torch.no_grad(), session() as s:
            s.hook(model, self.where, keep)
            for text in self._places():
                s.hook(model, text, partial(find, text))
            with noted_arguments(model, args, kwargs):
                output = model(*args, **kwargs)
            s.end(quiet=True)
        if not changed:
            raise AttributionError(
                f'there is nothing to {self.change.verb}: "{self.where}" holds no '
                "floating-point tensor"
            )

        self.change.begin(changed)
        given = self.attribution.target
        targets = list(given) if isinstance(given, Sequence) else [given]
        sizes = [len(value) for value in changed.values()]
        return [settled(output, one) for one in targets], sizes[0], names


def _for_each(target: Target, n: int, copies: int) -> Target:
    """Return the target for a number of copies of the samples; a function is called for each copy."""
    if copies == 1 or target is None or isinstance(target, int):
        return target
    if isinstance(target, Tensor) or not callable(target):
        classes = torch.as_tensor(target)
        if not classes.dim():
            return target
        return classes.repeat(copies)
    one = target

    def together(output: Any) -> Tensor:
        found = leaves.find(output)
        rows = {name: t for name, t in found if t.dim() and len(t) == n * copies}
        scores = []
        for i in range(copies):
            part = {name: t[i * n : (i + 1) * n] for name, t in rows.items()}
            scores.append(score(leaves.put(output, part), one))
        return sum(scores[1:], scores[0])

    return together


def _repeated(given: tuple[tuple[Any, ...], dict[str, Any]], n: int, copies: int) -> Any:
    """Return the arguments with repeated tensors, where a tensor has a row for each sample."""
    if copies == 1:
        return given
    repeated = {}
    for name, tensor in leaves.find(given):
        if tensor.dim() and len(tensor) == n:
            repeated[name] = tensor.repeat(copies, *[1] * (tensor.dim() - 1))
    return leaves.put(given, repeated)
