"""The proof of recipes: a rebuilt tensor is compared with the original, to the last bit.

# Note [Proof]
For each place (the n-th tensor that a module saves in one call of the model), a rule's first result
is compared with the original. A rule's assumption may hold at one place and not at another: a
program can change tensors in between under ``no_grad``, where the graph does not show it. Later
results are compared by their digests, when they are rebuilt (Note [Digest] in
`kedge.offload.held.raw_bytes`), in the steps of Note [Compared steps] in `kedge.offload.held.steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference
from kedge.offload.held.handle import Handle, HandleByReference
from kedge.offload.held.raw_bytes import is_comparable, words
from kedge.offload.rebuild.failure import RuleFailed
from kedge.offload.rebuild.recipe import Find, Recipe

_NEAR = 0.25
_FULL = "can't allocate memory"
"""The message of PyTorch's allocator of host memory, which raises a plain RuntimeError."""


class _PassingParameters:
    """`handle_of` for models whose parameters do not last.

    See Note [Parameters that do not last] in `kedge.offload.rebuild.recipe_builder`.
    """

    lasting = False

    def __call__(self, saved: Any) -> Handle | None:
        return handle_of(saved)


_passing_parameters = _PassingParameters()


class ProvenRecipes:
    """Recipes that were right at their place; see Note [Proof].

    Attributes:
        dropped: Rules that gave a wrong result and are not used, each with the reason.
    """

    def __init__(self, dropped: dict[str, str]) -> None:
        self.dropped = dropped
        self._proven: set[Any] = set()
        self._wrong: set[Any] = set()

    def find(
        self, find: Find, value: Tensor, place: tuple[str | None, int], *, lasting: bool
    ) -> Recipe | None:
        """Return the recipe of a tensor; None if there is none, or if it was wrong.

        Args:
            find: Finds a recipe.
            value: The tensor.
            place: The path of the module that saves it, and the tensor's number there in this call
                of the model.
            lasting: Whether the parameters' memory lasts until backward.
        """
        if value.is_conj() or value.is_neg() or not is_comparable(value.device):
            return None
        handles = handle_of if lasting else _passing_parameters
        try:
            recipe = find(value, handles)
        except RuleFailed as failed:  # see Note [Failing rules]
            self.dropped[failed.rule] = f"{_where(value, place[0])}: {failed.why}"
            return None
        if recipe is None or not self._is_right(recipe, value, place):
            return None
        return recipe

    def _is_right(self, recipe: Recipe, value: Tensor, place: tuple[str | None, int]) -> bool:
        exact = all(handle.exact for handle in recipe.inputs)
        rule = recipe.rule, value.dtype, value.device.type, exact
        site = rule, *place
        if rule in self._wrong or site in self._wrong:
            return False
        if site in self._proven:
            return True
        wrong = mismatch(recipe, value)
        if wrong is None:
            self._proven.add(site)
            return True
        if not wrong.passing:
            self._wrong.add(rule if wrong.false else site)

        where = _where(value, place[0])
        if not wrong.false:
            where += " alone"
        if not exact:
            where += ", from values that a codec rounded"
        self.dropped[recipe.rule] = f"{where}: {wrong.why}"
        return False


def _where(value: Tensor, path: str | None) -> str:
    return f"{value.dtype} on {value.device.type}, in {path!r}"


def handle_of(saved: Any) -> Handle | None:
    """Return the handle of a node's saved tensor.

    Returns:
        None without one, or if its bytes have changed since.
    """
    handle = packed_of(saved.data)
    if type(handle) is KeptByReference:
        handle = HandleByReference(handle)
    if isinstance(handle, Handle) and handle.intact():
        return handle
    return None


class Mismatch(NamedTuple):
    """The reason why a recipe is wrong.

    Attributes:
        why: The reason in words.
        false: Whether its rule makes other values, and so is used nowhere; otherwise it only could
            not be tried here.
        passing: Whether to try it again later: there was no memory for it.
    """

    why: str
    false: bool = True
    passing: bool = False


def mismatch(recipe: Recipe, value: Tensor) -> Mismatch | None:
    """Return the mismatch between a recipe's result now and the tensor; None if they are equal."""
    try:
        with torch.no_grad():
            made = recipe.run(*(handle.read() for handle in recipe.inputs))
    except Exception as failure:  # noqa: BLE001 - the rule is not used; the program goes on
        text = str(failure)
        first, _, _ = text.partition("\n")
        full = isinstance(failure, MemoryError | torch.OutOfMemoryError) or _FULL in text
        why = f"it raised {type(failure).__name__}: {first}"
        return Mismatch(why, false=False, passing=full)

    if made.dtype != value.dtype or made.shape != value.shape:
        made_kind = f"{made.dtype} {list(made.shape)}"
        kind = f"{value.dtype} {list(value.shape)}"
        return Mismatch(f"it made {made_kind} instead of {kind}")
    if made.stride() != value.stride() or made.storage_offset() != value.storage_offset():
        return Mismatch(f"it made strides {made.stride()} instead of {value.stride()}")

    if not all(handle.exact for handle in recipe.inputs):
        if not _is_near(made, value.detach()):
            return Mismatch("it made values far from the saved ones")
        return None
    # Compared as bytes, a NaN is equal to itself, and -0.0 is not 0.0.
    if not torch.equal(words(made), words(value)):
        return Mismatch("it made other values")
    return None


def _is_near(made: Tensor, value: Tensor) -> bool:
    """Whether a result equals a tensor except for the rounding of its inputs by a codec."""
    if not value.is_floating_point():
        return True
    apart = torch.linalg.vector_norm((made - value).float())
    return bool(apart <= _NEAR * torch.linalg.vector_norm(value.float()))
