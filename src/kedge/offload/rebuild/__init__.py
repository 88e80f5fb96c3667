"""Rebuilding: tensors that other saved tensors determine to the last bit are not kept."""

from kedge.offload.rebuild.recipe import Recipe
from kedge.offload.rebuild.rules import RULES, find

__all__ = ["RULES", "Recipe", "find"]
