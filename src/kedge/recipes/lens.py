"""The logit lens: what a language model would answer after each of its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.calls.arguments import called_as
from kedge.errors import InterventionError
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.model_run import name_of, preserved_state, run, without_call
from kedge.recipes.transformer_parts import Blocks, blocks
from kedge.sites import leaves


@called_as("recipes.logit_lens(model, tokens)")
def logit_lens(
    model: nn.Module, given: Any, *, inside: str = "", positions: int | slice | None = None
) -> Tensor:
    """Return the scores that a model would give after each of its blocks.

    nostalgebraist, "Interpreting GPT: the logit lens", 2020. Those after the last block are the
    model's own, to the bit. What runs after the blocks, such as the final norm and the output
    embedding, is called for each hidden state; where the model does more than to call modules, as
    to scale its scores, it runs again with each hidden state in the place of the last.

    Args:
        model: The model, in the mode for the run: usually `eval`.
        given: The input: a tensor, a tuple of arguments, or a dict of keyword arguments.
        inside: The path of a module around the blocks; see `blocks`.
        positions: Only these tokens (positions in dimension 1), so that less is kept; None for all.

    Returns:
        The scores: [blocks, batch, tokens, vocabulary].

    Raises:
        NoSiteMatched: If the model has no list of blocks, or several.
        InterventionError: If it returns no scores, or not a floating-point tensor alone.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> gpt = torch.nn.Sequential(torch.nn.Embedding(9, 8), layers, torch.nn.Linear(8, 9)).eval()
        >>> recipes.logit_lens(gpt, torch.tensor([[1, 4, 2]])).shape
        torch.Size([2, 1, 3, 9])
    """
    parts = blocks(model, given, inside=inside)
    states: dict[str, Tensor] = {}

    def keep(value: Tensor, event: Event) -> None:
        name = name_of(event)
        if name not in parts.layers:
            name = without_call(name)
        states[name] = value.detach().clone()

    with preserved_state(model), torch.no_grad():
        with session() as s:
            for text in parts.layers:
                s.hook(model, text, keep)
            own = _scores(run(model, given))
        by_modules = _tail(model, parts, states[parts.layers[-1]])
        is_whole = by_modules is not None and torch.equal(by_modules, own)
        rows = []
        for text in parts.layers:
            scores = None
            if is_whole:
                scores = _tail(model, parts, states[text])
            if scores is None:
                scores = _replaced(model, given, parts, states[text])
            if positions is not None:
                scores = scores[:, positions].clone()
            rows.append(scores)
    return torch.stack(rows)


def _tail(model: nn.Module, parts: Blocks, state: Tensor) -> Tensor | None:
    """Return what the modules behind the blocks make of a hidden state; None if they take more."""
    value = state
    for path in parts.tail:
        try:
            made = model.get_submodule(path)(value)
        except (TypeError, ValueError, RuntimeError):
            return None
        if not isinstance(made, Tensor):
            return None
        value = made
    return value


def _replaced(model: nn.Module, given: Any, parts: Blocks, state: Tensor) -> Tensor:
    """Return the model's scores with a hidden state in the place of the last."""

    def put(_: Tensor) -> Tensor:
        return state.clone()  # which the model may work on in place

    with session() as s:
        s.hook(model, parts.layers[-1], put)
        return _scores(run(model, given))


def _scores(output: Any) -> Tensor:
    """Return the scores in a model's output.

    Raises:
        InterventionError: It has none, or several floating-point tensors.
    """
    found = {name: t for name, t in leaves.find(output) if t.is_floating_point()}
    if "logits" in found:
        return found["logits"].detach()
    if len(found) != 1:
        raise InterventionError(
            f"the model returned {leaves.describe(output)}, in which scores cannot be told: "
            'they are called "logits", or are the only floating-point tensor'
        )
    return next(iter(found.values())).detach()
