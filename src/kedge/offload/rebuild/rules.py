"""All rules, and the search for a recipe among them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kedge.offload.rebuild.by_content import by_content
from kedge.offload.rebuild.copies import COPIES
from kedge.offload.rebuild.elementwise import ACTIVATIONS, ARITHMETIC, RESULTS
from kedge.offload.rebuild.failure import RuleFailed, is_the_programs
from kedge.offload.rebuild.norms import NORMS
from kedge.offload.rebuild.recipe import HandleOf, Recipe, Replay, WholeLayout
from kedge.offload.rebuild.recipe_builder import RebuildRule, RecipeBuilder
from kedge.torch_internals.autograd_nodes import raw
from kedge.torch_internals.corners import lacks
from kedge.torch_internals.tensors import changes, root_of

RULES: tuple[RebuildRule, ...] = (*ACTIVATIONS, *RESULTS, *ARITHMETIC, *NORMS, *COPIES)

_BY_NODE: dict[str, RebuildRule] = {node: rule for rule in RULES for node in rule.nodes}


def find(value: Tensor, handle_of: HandleOf) -> Recipe | None:
    """Return the recipe of a tensor that autograd is about to save, from tensors saved before.

    A recipe always rebuilds a whole storage: for a view, that of its base.

    Args:
        value: The tensor, with its graph.
        handle_of: Returns Kedge's handle behind a node's saved tensor; None if there is none.

    Returns:
        A recipe that holds neither the tensor nor its graph; None if no rule applies.

    Raises:
        RuleFailed: The rule raised an error; see Note [Failing rules].
    """
    whole = root_of(value)
    node = whole.grad_fn
    name = "content"
    try:
        if node is None:
            return _by_content(value, whole)
        rule = _BY_NODE.get(type(node).__name__)
        if rule is None:
            return None
        name = rule.name
        if lacks("saved_fields") or whole.output_nr:
            return None
        if value.dtype != whole.dtype or not _is_dense(whole):
            return None
        return _by_rule(rule, node, value, RecipeBuilder(_BY_NODE, handle_of, whole))
    except Exception as failure:
        if is_the_programs(failure):
            raise
        raise RuleFailed(name, failure) from failure


def _by_rule(rule: RebuildRule, node: Any, value: Tensor, builder: RecipeBuilder) -> Recipe | None:
    whole = builder.whole
    assert whole is not None  # noqa: S101 - the rule has not been called yet
    if rule.result is not None and raw(node, rule.result).data is not None:
        return None  # the node has saved its output; this is another version of it

    term = rule.term(node, builder)
    allowed = 0 if rule.result is None else 1 + builder.replayed
    if term is None or changes(whole) > allowed or not builder.settle(node):
        return None

    layout = WholeLayout(value, whole)
    inputs = tuple(builder.inputs)
    extra = builder.extra
    nbytes = builder.nbytes
    if extra is not None:
        nbytes += extra.nbytes
    return Replay(rule.name, rule.cost, term, layout, inputs, extra, nbytes)


def _by_content(value: Tensor, whole: Tensor) -> Recipe | None:
    if value.requires_grad or whole.requires_grad or not _is_dense(whole):
        return None
    found = by_content(whole.detach())
    if found is None:
        return None
    name, extra, term = found
    return Replay(name, "copy", term, WholeLayout(value, whole), (), extra, extra.nbytes)


def _is_dense(whole: Tensor) -> bool:
    """Whether a tensor has every element of its storage once, in some order."""
    return (
        whole.nbytes == whole.untyped_storage().nbytes() > 0
        and not whole.is_conj()
        and not whole.is_neg()
    )
